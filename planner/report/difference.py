"""Two plans side by side: what differs between them, as numbers and as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.plan import Plan
from planner.report.facts import peak_step, size_text

#: Storages named where one plan has them and the other has not.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One figure of both plans; ``unit`` is ``"bytes"``, ``"count"`` or ``"step"``."""

    label: str
    before: int
    after: int
    unit: str

    @property
    def change(self) -> int:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two plans.

    Attributes:
        rows: figures of both.
        both: number of storage names that both have.
        only_before, only_after: names that only one has, largest first.
        resized: names that both have, in another size, by how much the size differs, most first.
    """

    rows: tuple[DifferenceRow, ...]
    both: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    resized: tuple[str, ...]


def difference(before: Plan, after: Plan) -> Difference:
    """Figures and storages of two plans; storages are told apart by their names."""
    figures = (
        ("arena", before.arena_nbytes, after.arena_nbytes, "bytes"),
        ("lower bound", before.lower_bound_nbytes, after.lower_bound_nbytes, "bytes"),
        ("resident", before.resident_nbytes, after.resident_nbytes, "bytes"),
        ("extra", before.extra_nbytes, after.extra_nbytes, "bytes"),
        ("naive", before.naive_nbytes, after.naive_nbytes, "bytes"),
        ("storages", len(before.graph.storages), len(after.graph.storages), "count"),
        ("steps", before.steps, after.steps, "count"),
        ("peak at step", peak_step(before), peak_step(after), "step"),
    )
    old, new = _sizes(before), _sizes(after)
    common = old.keys() & new.keys()
    return Difference(
        rows=tuple(DifferenceRow(*figure) for figure in figures),
        both=len(common),
        only_before=_largest(old, old.keys() - common),
        only_after=_largest(new, new.keys() - common),
        resized=tuple(
            sorted(
                (name for name in common if old[name] != new[name]),
                key=lambda name: (-abs(new[name] - old[name]), name),
            )
        ),
    )


def difference_lines(before: Plan, after: Plan, names: tuple[str, str]) -> tuple[str, ...]:
    """Sentences on the storages that differ; ``names`` are those of the two plans."""
    found = difference(before, after)
    lines = [f"{found.both:,} storages have the same name in both."]
    for missing, plan, name in ((found.only_before, before, names[0]), (found.only_after, after, names[1])):
        if missing:
            sizes = _sizes(plan)
            lines.append(f"Only in {name}: {len(missing):,}, {_examples(missing, sizes)}.")
    if found.resized:
        old, new = _sizes(before), _sizes(after)
        name = found.resized[0]
        change = f"{_short(name)} from {size_text(old[name])} to {size_text(new[name])}"
        lines.append(f"Of another size: {len(found.resized):,}, most {change}.")
    return tuple(lines)


def difference_text(before: Plan, after: Plan, names: tuple[str, str]) -> str:
    """A table of the figures for a terminal, with the sentences below."""
    found = difference(before, after)
    shown = [_short(name, 22) for name in names]
    lines = [f"{'':<14}{shown[0]:>24}{shown[1]:>24}{'difference':>24}"]
    for row in found.rows:
        show = size_text if row.unit == "bytes" else "{:,}".format
        share = f" ({100 * row.change / row.before:+.1f} %)" if row.before and row.change and row.unit != "step" else ""
        change = "none" if not row.change else f"{'+' if row.change > 0 else '-'}{show(abs(row.change))}{share}"
        lines.append(f"{row.label:<14}{show(row.before):>24}{show(row.after):>24}{change:>24}")
    return "\n".join([*lines, *difference_lines(before, after, names)]) + "\n"


def _sizes(plan: Plan) -> dict[str, int]:
    return {storage.name: storage.nbytes for storage in plan.graph.storages}


def _largest(sizes: Mapping[str, int], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (-sizes[name], name)))


def _examples(names: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    shown = ", ".join(f"{_short(name)} ({size_text(sizes[name])})" for name in names[:_NAMED])
    return f"the largest {shown}" if len(names) > 1 else shown


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
