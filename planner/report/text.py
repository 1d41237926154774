"""The offset map for a terminal: a picture and a table that fit its width."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.graph import Role, Tensor
from planner.plan import Plan
from planner.report.colours import role_text
from planner.report.columns import Row, table_lines
from planner.report.facts import (
    Gap,
    Occupant,
    about_tensor,
    at_step,
    by_offset,
    handed_over,
    live_nbytes,
    peak_step,
    size_text,
)

#: Columns, where the reader's terminal is not known.
WIDTH = 100
#: Rows of the picture.
ROWS = 24
#: Rows of the table of a plan too large to list whole: its largest storages.
TABLE_ROWS = 40
_MARGIN = 11
_KEYS = string.ascii_letters + string.digits
_FREE = "·"
#: Where a plan has more storages than letters, the map shows roles.
_ROLE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        Role.PARAMETER: "P",
        Role.BUFFER: "B",
        Role.INPUT: "I",
        Role.SAVED: "S",
        Role.GRAD_OUTPUT: "G",
        Role.CONSTANT: "C",
        Role.TEMPORARY: "t",
        Role.WORKSPACE: "w",
        Role.OUTPUT: "O",
        Role.GRADIENT: "g",
        Role.PARAMETER_GRADIENT: "p",
        Role.OPTIMIZER_STATE: "o",
    }
)
_BARS = " ▁▂▃▄▅▆▇█"


def offset_map(plan: Plan, width: int = WIDTH) -> str:
    """Memory figures, a map of time × offset, and a table of the storages by offset; ``width`` in columns."""
    keys = storage_keys(plan)
    parts = [_header(plan, width), _picture(plan, keys, width), _table(plan, keys, width)]
    return "\n\n".join(part for part in parts if part) + "\n"


def step_text(plan: Plan, step: int, width: int = WIDTH) -> str:
    """One step: its operation, what it reads and writes, and what is alive, by offset, with the free gaps.

    Where much is alive the largest are listed, whatever the operation uses, and the largest gaps.

    Raises:
        ShapeError: there is no such step.
    """
    facts = at_step(plan, step)
    storages = plan.graph.storages
    lines = [_cut(f"step {step} of 0 to {plan.steps - 1}: {_operation_text(plan, step)}", width)]
    free = plan.arena_nbytes - facts.live_nbytes
    lines.append(
        f"live {size_text(facts.live_nbytes)} of {size_text(plan.arena_nbytes)}, free {size_text(free)}"
        f" in {len(facts.gaps)} gap{'s' * (len(facts.gaps) != 1)}"
    )
    read = [entry for entry in facts.occupants if entry.reads]
    written = [entry for entry in facts.occupants if entry.writes]
    for word, used in (("reads", read), ("writes", written)):
        names = [f"{storages[entry.storage].name} ({size_text(entry.nbytes)})" for entry in used]
        if names:
            lines.append(_wrapped(word, ", ".join(names), width, indent=8))
    lines += [_wrapped("alive", _by_role(plan, facts.occupants), width, indent=8), ""]
    occupants, gaps = list(facts.occupants), list(facts.gaps)
    if len(occupants) + len(gaps) > 2 * TABLE_ROWS:
        largest = sorted(occupants, key=lambda entry: (-entry.nbytes, entry.storage))[:TABLE_ROWS]
        occupants = [entry for entry in occupants if entry in largest or entry.reads or entry.writes]
        gaps = sorted(gaps, key=lambda gap: (-gap.nbytes, gap.offset))[: TABLE_ROWS // 4]
    entries: list[Occupant | Gap] = sorted([*occupants, *gaps], key=lambda entry: entry.offset)
    lines += [_cut(line, width) for line in table_lines([_entry_row(plan, entry) for entry in entries], width)]
    hidden = [entry for entry in facts.occupants if entry not in occupants]
    if hidden:
        nbytes = size_text(sum(entry.nbytes for entry in hidden))
        gap = f" and {len(facts.gaps) - len(gaps):,} smaller gaps" if len(gaps) < len(facts.gaps) else ""
        note = f"… {len(hidden):,} smaller storages ({nbytes}){gap} are not listed; --json has all"
        lines.append(_filled(note, width, indent=2))
    return "\n".join(lines) + "\n"


def _entry_row(plan: Plan, entry: Occupant | Gap) -> Row:
    """A storage alive, or a gap, as a row of a table."""
    if isinstance(entry, Gap):
        return Row(entry.offset, entry.nbytes, "(free)")
    storage, place = plan.graph.storages[entry.storage], plan.placements[entry.storage]
    use = " and ".join(word for word, does in (("read", entry.reads), ("written", entry.writes)) if does)
    name = storage.name + (f"  ({use})" if use else "")
    return Row(entry.offset, entry.nbytes, name, storage.role, f"[{place.birth}, {place.death})")


def _by_role(plan: Plan, occupants: Sequence[Occupant]) -> str:
    """Bytes and number of the storages alive in each role, most bytes first."""
    sums: dict[str, tuple[int, int]] = {}
    for entry in occupants:
        role = role_text(plan.graph.storages[entry.storage].role)
        nbytes, count = sums.get(role, (0, 0))
        sums[role] = (nbytes + entry.nbytes, count + 1)
    ranked = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return ", ".join(f"{role} {size_text(nbytes)} in {count:,}" for role, (nbytes, count) in ranked) or "nothing"


def tensor_text(plan: Plan, name: str, width: int = WIDTH) -> str:
    """Everything about one tensor, wrapped to ``width``; raise `ShapeError`, naming near matches, if there is none."""
    facts = about_tensor(plan, name)
    tensor, place = facts.tensor, facts.placement
    end = place.offset + facts.storage.nbytes
    rows = [
        ("tensor", f"{tensor.name}: {_tensor_type(tensor)}, strides {list(tensor.strides)}"),
        ("in the arena", f"from byte {facts.arena_offset:,}"),
        ("storage", f"{facts.storage.name} ({facts.storage.role}), {size_text(facts.storage.nbytes)}"),
        ("", f"bytes {place.offset:,} to {end:,} of the arena, the tensor at byte {tensor.offset:,} of it"),
        ("lifetime", f"steps [{place.birth}, {place.death})"),
        ("written", _steps_text(plan, facts.storage_writers) or "by the caller, before the first step"),
        ("read", _steps_text(plan, facts.storage_readers) or "by no step"),
        ("views", ", ".join(_some(facts.views, 8)) or "none"),
        ("in place", _chain_text(plan, tensor.storage, facts.chain) if len(facts.chain) > 1 else "no"),
        *_neighbour_rows("above", plan, facts.above),
        *_neighbour_rows("below", plan, facts.below),
    ]
    return "\n".join(_wrapped(label, text, width) for label, text in rows) + "\n"


def _wrapped(label: str, text: str, width: int, indent: int = 14) -> str:
    """A label and its text, which goes on below itself."""
    return textwrap.fill(
        f"{label:<{indent}}{text}",
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def _header(plan: Plan, width: int) -> str:
    def figure(label: str, nbytes: int, note: str = "") -> str:
        return f"  {label:<13}{size_text(nbytes):>12}  {note}".rstrip()

    graph = plan.graph
    kind = plan.strategy if plan.slices is None else f"{plan.strategy}, {plan.slices} slices in flight"
    counts = f"{len(graph.operations):,} steps, {len(graph.storages):,} storages, alignment {plan.alignment} B"
    lines = [f"Offset map of a {graph.mode} plan ({kind}): {counts}"]
    gap = plan.arena_nbytes - plan.lower_bound_nbytes
    if gap == 0:
        bound_note = "most bytes alive at once; the arena equals it"
    else:
        bound_note = f"most bytes alive at once; the arena is {size_text(gap)} above it"
    if gap and plan.proved_optimal:
        bound_note += ", proved least"
    lines += [
        figure("arena", plan.arena_nbytes),
        figure("lower bound", plan.lower_bound_nbytes, bound_note),
        figure("resident", plan.resident_nbytes, "there before the pass starts"),
    ]
    extra_note = "arena − resident: what the pass adds"
    if plan.formula is not None:
        extra_note += f"; max(S, 3X) is {size_text(plan.formula.target)}"
    lines += [
        figure("extra", plan.extra_nbytes, extra_note),
        figure("naive", plan.naive_nbytes, "a buffer for each storage"),
    ]
    if plan.unplanned:
        total = sum(entry.nbytes for entry in plan.unplanned)
        names = ", ".join(sorted({entry.operator for entry in plan.unplanned}))
        lines.append(figure("unplanned", total, f"outside the arena: {names}"))
    return "\n".join(_filled(line, width, indent=2 if line is lines[0] else 29) for line in lines)


def storage_keys(plan: Plan) -> tuple[str, ...]:
    """A letter for each storage in order of birth, or its role's letter where there are too many."""
    storages, places = plan.graph.storages, plan.placements
    if len(storages) > len(_KEYS):
        return tuple(_ROLE_KEYS[storage.role] for storage in storages)
    order = sorted(range(len(storages)), key=lambda index: (places[index].birth, places[index].offset, index))
    letters = dict(zip(order, _KEYS, strict=False))
    return tuple(letters[index] for index in range(len(storages)))


def _legend(plan: Plan, width: int) -> str:
    if len(plan.graph.storages) <= len(_KEYS):
        return ""
    roles = {storage.role for storage in plan.graph.storages}
    words = ", ".join(f"{key} {role}" for role, key in _ROLE_KEYS.items() if role in roles)
    indent = " " * (_MARGIN + 1)
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent) + "\n"


def _picture(plan: Plan, keys: Sequence[str], width: int) -> str:
    if not plan.arena_nbytes:
        return ""
    room = width - _MARGIN - 2
    each = max(1, min(8, room // plan.steps))  # Columns for each step.
    columns = min(room, plan.steps * each)
    steps = [column * plan.steps // columns for column in range(columns)]
    cells = [[_FREE] * columns for _ in range(ROWS)]
    for index in sorted(range(len(plan.placements)), key=lambda i: (plan.placements[i].birth, i)):
        place, nbytes = plan.placements[index], plan.graph.storages[index].nbytes
        # A cell shows what covers its middle; a later storage covers the one whose bytes it takes.
        low = -(-(2 * ROWS * place.offset - plan.arena_nbytes) // (2 * plan.arena_nbytes))
        high = -(-(2 * ROWS * (place.offset + nbytes) - plan.arena_nbytes) // (2 * plan.arena_nbytes))
        first, last = -(-place.birth * columns // plan.steps), -(-place.death * columns // plan.steps)
        for row in range(max(low, 0), min(high, ROWS)):
            cells[row][first:last] = [keys[index]] * len(range(first, min(last, columns)))
    lines = [
        f"{'offset':>{_MARGIN - 1}}  time: steps 0 to {plan.steps - 1}; {_FREE} is free\n{_legend(plan, width)}".rstrip(
            "\n"
        )
    ]
    for row in reversed(range(ROWS)):
        label = size_text(plan.arena_nbytes * (row + 1) // ROWS) if (row + 1) % 6 == 0 else ""
        lines.append(f"{label:>{_MARGIN - 1}} ┤{''.join(cells[row])}")
    lines += [_cut(_axis(plan, columns, each), width), _live_line(plan, steps)]
    return "\n".join(lines)


def _axis(plan: Plan, columns: int, each: int) -> str:
    spacing = max(10, -(-10 // each) * each)
    marks = ""
    for column in range(0, columns, spacing):
        marks = marks.ljust(column) + str(column * plan.steps // columns)
    return f"{'step':>{_MARGIN - 1}} └{marks}"


def _live_line(plan: Plan, steps: Sequence[int]) -> str:
    live = live_nbytes(plan)
    peak = max(live)
    spans = zip(steps, [*steps[1:], plan.steps], strict=True)
    heights = [max(live[first : max(last, first + 1)]) for first, last in spans]
    bars = "".join(
        _BARS[-(-min(height, plan.arena_nbytes) * (len(_BARS) - 1) // plan.arena_nbytes)] for height in heights
    )
    return f"{'live':>{_MARGIN - 1}}  {bars}\n{'':{_MARGIN + 1}}peak {size_text(peak)} at step {live.index(peak)}"


def _table(plan: Plan, keys: Sequence[str], width: int) -> str:
    storages = plan.graph.storages
    shown, note = by_offset(plan, range(len(storages))), ""
    if len(storages) > len(_KEYS):
        peak = peak_step(plan)
        alive = [index for index, place in enumerate(plan.placements) if place.birth <= peak < place.death]
        largest = sorted(alive, key=lambda index: (-storages[index].nbytes, index))[:TABLE_ROWS]
        shown = by_offset(plan, largest)
        note = (
            f"   … and {len(storages) - len(shown):,} more; these are the largest of {len(alive):,} alive at the peak."
        )
    after = handed_over(plan)
    rows = []
    for index in shown:
        storage, place = storages[index], plan.placements[index]
        name = storage.name
        if place.in_place_of is not None:
            name += f" ← {storages[place.in_place_of].name}"
        elif index in after:
            name += f" → {storages[after[index]].name}"
        lifetime = f"[{place.birth}, {place.death})"
        rows.append(Row(place.offset, storage.nbytes, name, storage.role, lifetime, keys[index]))
    lines = table_lines(rows, width)
    shown_lines = [_cut(line, width) for line in lines]
    if any(" ← " in line or " → " in line for line in lines):
        text = "   b ← a: b takes the place of a and overwrites it; a → b: a is overwritten by b."
        shown_lines.append(_filled(text, width, indent=3))
    if note:
        shown_lines.append(_filled(note, width, indent=5))
    return "\n".join(shown_lines)


def _operation_text(plan: Plan, step: int) -> str:
    if not plan.graph.operations:
        return "no operation"
    operation = plan.graph.operations[step]
    where = f" at {operation.source}" if operation.source else ""
    return f"{operation.name} = {operation.operator}{where}"


def _steps_text(plan: Plan, steps: Sequence[int], most: int = 4) -> str:
    text = "; ".join(f"step {step} {_operation_text(plan, step)}" for step in steps[:most])
    return text + (f"; and {len(steps) - most} more" if len(steps) > most else "")


def _neighbour_rows(label: str, plan: Plan, neighbours: Sequence[int], most: int = 6) -> list[tuple[str, str]]:
    """A row for each storage next to another, in order of birth: where several lie there they take turns."""
    if not neighbours:
        return [(label, "nothing")]
    ordered = sorted(neighbours, key=lambda index: (plan.placements[index].birth, index))
    texts = []
    for index in ordered[:most]:
        place, storage = plan.placements[index], plan.graph.storages[index]
        end = place.offset + storage.nbytes
        texts.append(f"{storage.name}, steps [{place.birth}, {place.death}), bytes {place.offset:,} to {end:,}")
    if len(ordered) > most:
        texts.append(f"and {len(ordered) - most} more at other steps")
    return [(label if row == 0 else "", text) for row, text in enumerate(texts)]


def _chain_text(plan: Plan, storage: int, chain: Sequence[int]) -> str:
    """Who hands the bytes on to whom; of a long chain both ends and what is near ``storage``."""
    at = chain.index(storage)
    last = len(chain) - 1
    shown = [place for place in range(len(chain)) if len(chain) <= 12 or place in (0, last) or abs(place - at) <= 3]
    parts: list[str] = []
    for before, place in zip([-1, *shown], shown, strict=False):
        if place > before + 1:
            parts.append(f"… {place - before - 1} more …")
        parts.append(plan.graph.storages[chain[place]].name)
    return " → ".join(parts)


def _some(names: Sequence[str], most: int) -> list[str]:
    """The first names, and how many more there are."""
    return [*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])]


def _tensor_type(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _filled(line: str, width: int, indent: int) -> str:
    """A line, going on below itself where it is too long."""
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
