"""Naive checks of packings, independent of the code under test: quadratic, or worse, on purpose."""

from __future__ import annotations

import csv
from itertools import permutations
from math import lcm
from pathlib import Path

from planner.problem import Colouring, Lifetime, Problem

MINIMALLOC = Path(__file__).parent / "data" / "minimalloc"


def minimalloc(letter: str, capacity: int | None = None) -> Problem:
    """Return one of minimalloc's problems, read without the reader under test."""
    with (MINIMALLOC / f"{letter}.1048576.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Problem(
        tuple(Lifetime(row["id"], int(row["size"]), int(row["lower"]), int(row["upper"])) for row in rows), capacity
    )


def faults(problem: Problem, colouring: Colouring) -> list[str]:
    """Return everything wrong with a packing; empty means it is valid."""
    found = []
    items = problem.lifetimes
    if len(colouring.offsets) != len(items):
        return [f"{len(colouring.offsets)} offsets for {len(items)} lifetimes"]
    at = dict(zip((item.name for item in items), colouring.offsets, strict=True))
    for item in items:
        if at[item.name] < 0 or at[item.name] % item.alignment:
            found.append(f"{item.name} at {at[item.name]}")
        if item.offset is not None and at[item.name] != item.offset:
            found.append(f"{item.name} is not where it was pinned")
        for other in items:
            together = item.birth < other.death and other.birth < item.death and item.nbytes and other.nbytes
            over = at[item.name] < at[other.name] + other.nbytes and at[other.name] < at[item.name] + item.nbytes
            if item.name < other.name and together and over:
                found.append(f"{item.name} overlaps {other.name}")
    for group in {item.group for item in items} - {None}:
        end = None
        for member in (item for item in items if item.group == group):
            if end is not None and at[member.name] != end + -end % member.alignment:
                found.append(f"{member.name} is not behind the member before it")
            end = at[member.name] + member.nbytes
    if colouring.peak_nbytes != max((at[item.name] + item.nbytes for item in items), default=0):
        found.append("peak is not the largest end")
    if colouring.peak_nbytes < live_peak(problem) or colouring.peak_nbytes < colouring.lower_bound_nbytes:
        found.append("peak is below what is alive")
    return found


def live_peak(problem: Problem) -> int:
    """Return the most bytes alive at any step."""
    return max(
        (
            sum(item.nbytes for item in problem.lifetimes if item.birth <= step < item.death)
            for step in {item.birth for item in problem.lifetimes}
        ),
        default=0,
    )


def first_fit_peak(problem: Problem, order: tuple[int, ...] | None = None) -> int:
    """Return the peak of first fit, by trying every place that could be lowest; no groups."""
    items = problem.lifetimes
    at: dict[int, int] = {i: item.offset for i, item in enumerate(items) if item.offset is not None}
    for index in order or range(len(items)):
        item = items[index]
        if index in at:
            continue
        others = [
            (at[j], at[j] + items[j].nbytes)
            for j in at
            if items[j].nbytes and item.nbytes and item.birth < items[j].death and items[j].birth < item.death
        ]
        places = sorted({0, *(end + -end % item.alignment for _, end in others)})
        at[index] = next(
            place for place in places if all(place + item.nbytes <= low or end <= place for low, end in others)
        )
    return max((at[i] + item.nbytes for i, item in enumerate(items)), default=0)


def first_fit_peak_of_groups(problem: Problem) -> int:
    """Return the peak of first fit in the order given where a group is placed whole at its first member; no pins."""
    units: dict[str, list[Lifetime]] = {}
    for item in problem.lifetimes:
        units.setdefault(f"group {item.group}" if item.group else f"item {item.name}", []).append(item)
    placed: list[tuple[int, Lifetime]] = []
    for members in units.values():
        rises = []
        rise = 0
        for member in members:
            rise += -rise % member.alignment
            rises.append(rise)
            rise += member.nbytes
        step = lcm(*(member.alignment for member in members))
        bases = {0, *(at + item.nbytes - rise for at, item in placed for rise in rises)}
        for base in sorted(base + -base % step for base in bases if base >= 0):
            here = [(base + rise, member) for rise, member in zip(rises, members, strict=True)]
            if not any(_overlap(one, other) for one in here for other in placed):
                placed += here
                break
    return max((at + item.nbytes for at, item in placed), default=0)


def _overlap(one: tuple[int, Lifetime], other: tuple[int, Lifetime]) -> bool:
    """Whether two placed lifetimes have a byte in common at some step."""
    (low, item), (bottom, there) = one, other
    together = item.birth < there.death and there.birth < item.death
    return together and max(low, bottom) < min(low + item.nbytes, bottom + there.nbytes)


def least_peak(problem: Problem) -> int:
    """Return the least peak of all: some order of first fit reaches it. For a handful of lifetimes, no groups."""
    return min(first_fit_peak(problem, order) for order in permutations(range(len(problem.lifetimes))))
