"""Allocation problems as CSV, as minimalloc reads and writes them.

The first row names the columns: ``id``, ``lower``, ``upper`` (half-open steps) and ``size`` (bytes), in any order;
``alignment`` and ``offset`` (a pin) may follow and may be empty. Other columns are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.errors import ProblemError
from planner.files import write_whole
from planner.problem import LARGEST_NBYTES, Colouring, Lifetime, Problem

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset")
WRITTEN = ("id", "lower", "upper", "size", "alignment", "offset")


def read_problem(path: str | Path, capacity: int | None = None, keep_offsets: bool = True) -> Problem:
    """Read a problem; offsets in the file pin their storages unless ``keep_offsets`` is false.

    Raises:
        ProblemError: a row cannot be used; it names the file and the line.
        OSError: the file cannot be read.
    """
    source = str(path)
    if Path(path).is_char_device() or Path(path).is_block_device():
        raise ProblemError(source, "it is a device, not a file")
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            return Problem(tuple(_lifetimes(csv.reader(file, strict=True), source, keep_offsets)), capacity)
    except UnicodeDecodeError as error:
        raise ProblemError(source, f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None


def write_packing(path: str | Path, problem: Problem, colouring: Colouring) -> None:
    """Write a problem with the offsets found, in the problem's order.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
    """
    aligned = any(lifetime.alignment != 1 for lifetime in problem.lifetimes)
    columns = [column for column in WRITTEN if aligned or column != "alignment"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for lifetime, offset in zip(problem.lifetimes, colouring.offsets, strict=True):
        row = [lifetime.name, lifetime.birth, lifetime.death, lifetime.nbytes]
        writer.writerow([*row, lifetime.alignment, offset] if aligned else [*row, offset])
    write_whole(Path(path), text.getvalue().encode())


def _lifetimes(rows: Iterator[list[str]], source: str, keep_offsets: bool) -> Iterator[Lifetime]:
    """Yield the rows as lifetimes; a row's line is that of its end, as quoted names may hold line breaks."""
    line = 0
    lines: dict[str, int] = {}
    try:
        header = [column.strip().lower() for column in next(rows, [])]
        at = _columns(header, source)
        line = rows.line_num  # type: ignore[attr-defined]
        for row in rows:
            line = rows.line_num  # type: ignore[attr-defined]
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            if len(row) != len(header):
                raise ProblemError(source, f"{len(row)} values for {len(header)} columns", line)
            lifetime = _lifetime({name: row[index].strip() for name, index in at.items()}, source, line, keep_offsets)
            if lifetime.name in lines:
                raise ProblemError(
                    source, f"id {lifetime.name!r} was used before, on line {lines[lifetime.name]}", line
                )
            lines[lifetime.name] = line
            yield lifetime
    except csv.Error as error:
        raise ProblemError(source, f"it is not well-formed CSV: {error}", line + 1) from None


def _columns(header: Sequence[str], source: str) -> dict[str, int]:
    """Return where each column we read is."""
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        found = ", ".join(name for name in header if name) or "none"
        raise ProblemError(source, f"missing column {', '.join(missing)} (found: {found})", 1)
    twice = [name for name in (*REQUIRED, *OPTIONAL) if header.count(name) > 1]
    if twice:
        raise ProblemError(source, f"column {twice[0]} is there twice", 1)
    return {name: header.index(name) for name in (*REQUIRED, *OPTIONAL) if name in header}


def _lifetime(values: dict[str, str], source: str, line: int, keep_offsets: bool) -> Lifetime:
    """Return one row as a lifetime, or say what is wrong with it."""
    lower = _integer(values["lower"], "lower", source, line, least=-LARGEST_NBYTES)
    upper = _integer(values["upper"], "upper", source, line, least=-LARGEST_NBYTES)
    size = _integer(values["size"], "size", source, line)
    alignment = _integer(values.get("alignment") or "1", "alignment", source, line, least=1)
    offset = _integer(values["offset"], "offset", source, line) if keep_offsets and values.get("offset") else None
    if upper <= lower:
        raise ProblemError(source, f"upper {upper} is not greater than lower {lower}", line)
    if offset is not None and offset % alignment:
        raise ProblemError(source, f"offset {offset} is not a multiple of the alignment {alignment}", line)
    return Lifetime(values["id"], size, lower, upper, alignment, offset)


def _integer(text: str, column: str, source: str, line: int, least: int = 0) -> int:
    """Return a whole number between ``least`` and 2**63 - 1, written in ASCII digits."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise ProblemError(source, f"{column} {text!r} is not a whole number", line)
    if len(digits.lstrip("0")) > len(str(LARGEST_NBYTES)) or abs(int(digits)) > LARGEST_NBYTES:
        raise ProblemError(source, f"{column} {text[:40]} is larger than {LARGEST_NBYTES}", line)
    value = int(text)
    if value < least:
        raise ProblemError(source, f"{column} {value} is less than {least}", line)
    return value
