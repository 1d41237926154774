"""Tables of storages that keep their names readable however narrow the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.report.facts import size_text

ROOMY = 100
"""Columns from which every table has the same layout; below it, columns are as wide as what they hold."""

_LEAST_NAME = 20
"""Columns of a name below which another column is given up."""


@dataclass(frozen=True, slots=True)
class Row:
    """A storage or a gap (no role, no lifetime): its letter on the map, where it lies, and what it is."""

    offset: int
    nbytes: int
    name: str
    role: str = ""
    lifetime: str = ""
    key: str = ""


def table_lines(rows: Sequence[Row], width: int) -> list[str]:
    """A heading and the rows; offsets and bytes in full, then the role, the lifetime and the name.

    Where that leaves too little for the names the role goes, then the bytes are rounded.
    """
    mark = 3 if any(row.key for row in rows) else 0
    if width >= ROOMY:
        return [_line(row, mark, (15, 15, 18, 13), f"{row.nbytes:,}") for row in (_HEADING, *rows)]
    offset = max([6, *(len(f"{row.offset:,}") for row in rows)])
    whole = max([5, *(len(f"{row.nbytes:,}") for row in rows)])
    short = max([5, *(len(size_text(row.nbytes)) for row in rows)])
    role = max([4, *(len(row.role) for row in rows)])
    life = max([8, *(len(row.lifetime) for row in rows)])
    wanted = min(_LEAST_NAME, max([4, *(len(row.name) for row in rows)]))
    layouts = ((False, whole, role), (False, whole, 0), (True, short, 0))
    fitting = [layout for layout in layouts if width - mark - offset - layout[1] - layout[2] - life - 6 >= wanted]
    rounded, size, role = fitting[0] if fitting else layouts[-1]
    widths = (offset, size, role, life)
    return [
        _line(row, mark, widths, size_text(row.nbytes) if rounded else f"{row.nbytes:,}") for row in (_HEADING, *rows)
    ]


_HEADING = Row(0, 0, "name", "role", "lifetime")


def _line(row: Row, mark: int, widths: tuple[int, int, int, int], nbytes: str) -> str:
    offset, size, role, life = widths
    heading = row is _HEADING
    start = f"{f' {row.key}' if row.key else '':<{mark}}"
    place = f"{'offset' if heading else f'{row.offset:,}':>{offset}} {'bytes' if heading else nbytes:>{size}}  "
    if not row.role:
        return f"{start}{place}{row.name}"
    kind = f"{row.role:<{role}} " if role else ""
    return f"{start}{place}{kind}{row.lifetime:<{life}} {row.name}"
