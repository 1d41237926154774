"""The offset map for a terminal: a picture and a table that fit its width."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.graph import Role, Tensor
from planner.plan import Plan
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
    }
)
_BARS = " ▁▂▃▄▅▆▇█"


def offset_map(plan: Plan, width: int = WIDTH) -> str:
    """Memory figures, a map of time × offset, and a table of the storages by offset; ``width`` in columns."""
    keys = storage_keys(plan)
    parts = [_header(plan, width), _picture(plan, keys, width), _table(plan, keys, width)]
    return "\n\n".join(part for part in parts if part) + "\n"


def step_text(plan: Plan, step: int, width: int = WIDTH) -> str:
    """What is alive at one step, by offset, with the free gaps; raise `ShapeError` if there is no such step."""
    facts = at_step(plan, step)
    lines = [_cut(f"step {step} of 0 to {plan.steps - 1}: {_operation_text(plan, step)}", width)]
    free = plan.arena_nbytes - facts.live_nbytes
    lines.append(
        f"live {size_text(facts.live_nbytes)} of {size_text(plan.arena_nbytes)}, free {size_text(free)}"
        f" in {len(facts.gaps)} gap{'s' * (len(facts.gaps) != 1)}"
    )
    lines += ["", f"{'offset':>15} {'bytes':>15}  {'role':<18} {'lifetime':<13} name"]
    entries: list[Occupant | Gap] = sorted([*facts.occupants, *facts.gaps], key=lambda entry: entry.offset)
    for entry in entries:
        if isinstance(entry, Gap):
            lines.append(f"{entry.offset:>15,} {entry.nbytes:>15,}  (free)")
            continue
        storage, place = plan.graph.storages[entry.storage], plan.placements[entry.storage]
        use = " and ".join(word for word, does in (("read", entry.reads), ("written", entry.writes)) if does)
        name = storage.name + (f"  ({use})" if use else "")
        lifetime = f"[{place.birth}, {place.death})"
        lines.append(_cut(f"{entry.offset:>15,} {entry.nbytes:>15,}  {storage.role:<18} {lifetime:<13} {name}", width))
    return "\n".join(lines) + "\n"


def tensor_text(plan: Plan, name: str, width: int = WIDTH) -> str:
    """Everything about one tensor, wrapped to ``width``; raise `ShapeError`, naming near matches, if there is none."""
    facts = about_tensor(plan, name)
    storages = plan.graph.storages
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
        ("views", ", ".join(facts.views) or "none"),
        ("in place", " → ".join(storages[index].name for index in facts.chain) if len(facts.chain) > 1 else "no"),
        ("above", ", ".join(_place_text(plan, index) for index in facts.above) or "nothing"),
        ("below", ", ".join(_place_text(plan, index) for index in facts.below) or "nothing"),
    ]
    return "\n".join(_wrapped(label, text, width) for label, text in rows) + "\n"


def _wrapped(label: str, text: str, width: int) -> str:
    """A label and its text, which goes on below itself."""
    return textwrap.fill(
        f"{label:<14}{text}", width, subsequent_indent=" " * 14, break_on_hyphens=False, replace_whitespace=False
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
    return "\n".join(_cut(line, width) for line in lines)


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
    lines = [f"   {'offset':>15} {'bytes':>15}  {'role':<18} {'lifetime':<13} name"]
    for index in shown:
        storage, place = storages[index], plan.placements[index]
        name = storage.name
        if place.in_place_of is not None:
            name += f" ← {storages[place.in_place_of].name}"
        elif index in after:
            name += f" → {storages[after[index]].name}"
        lifetime = f"[{place.birth}, {place.death})"
        row = f"{place.offset:>15,} {storage.nbytes:>15,}  {storage.role:<18} {lifetime:<13} {name}"
        lines.append(f" {keys[index]} {row}")
    if any(" ← " in line or " → " in line for line in lines):
        lines.append("   b ← a: b takes the place of a and overwrites it; a → b: a is overwritten by b.")
    if note:
        lines.append(note)
    return "\n".join(_cut(line, width) for line in lines)


def _operation_text(plan: Plan, step: int) -> str:
    if not plan.graph.operations:
        return "no operation"
    operation = plan.graph.operations[step]
    where = f" at {operation.source}" if operation.source else ""
    return f"{operation.name} = {operation.operator}{where}"


def _steps_text(plan: Plan, steps: Sequence[int], most: int = 4) -> str:
    text = "; ".join(f"step {step} {_operation_text(plan, step)}" for step in steps[:most])
    return text + (f"; and {len(steps) - most} more" if len(steps) > most else "")


def _place_text(plan: Plan, storage: int) -> str:
    place, nbytes = plan.placements[storage], plan.graph.storages[storage].nbytes
    return f"{plan.graph.storages[storage].name} (bytes {place.offset:,} to {place.offset + nbytes:,})"


def _tensor_type(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
