"""First fit: each item in turn at the lowest offset where nothing alive with it lies.

The order decides everything (Gergov, SODA 1999; Buchsbaum et al., STOC 2003, bound what a good one can do).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from planner.colouring.instance import FREE, Instance
from planner.errors import ProblemError
from planner.problem import Lifetime

CELLS = 512
"""Cells that time is cut into where items are only stacked."""

Placed = tuple[int, int, int, int]
"""Offset, end, first step, step after the last; ordered by offset."""


def check_pins(instance: Instance, lifetimes: Sequence[Lifetime], source: str = "problem") -> None:
    """Raise ``ProblemError`` if two pinned items collide; it names them by the ``lifetimes`` of the whole problem.

    One sweep over births and deaths: what is alive is kept by offset, so a newcomer can only collide with the one
    below it or the one above.
    """
    events: list[tuple[int, int, int, int, int]] = []
    for item, pin in enumerate(instance.pin):
        if pin != FREE:
            for block in instance.blocks[item]:
                if block.size:
                    low, high = pin + block.rise, pin + block.rise + block.size
                    events += [(block.end, 0, low, high, item), (block.start, 1, low, high, item)]
    alive: list[tuple[int, int, int]] = []
    for _, born, low, high, item in sorted(events):
        at = bisect_left(alive, (low, high, item))
        if not born:
            del alive[at]
            continue
        if at < len(alive) and alive[at][0] < high:
            other = at
        elif at and alive[at - 1][1] > low:
            other = at - 1
        else:
            alive.insert(at, (low, high, item))
            continue
        where, among = max(low, alive[other][0]) * instance.unit, (alive[other], (low, high, item))
        names = " and ".join(_pinned_name(instance, lifetimes, *one) for one in among)
        remedy = "move one of them, or leave its offset empty"
        raise ProblemError(source, f"{names} are pinned over each other at offset {where}; {remedy}")


def _pinned_name(instance: Instance, lifetimes: Sequence[Lifetime], low: int, _high: int, item: int) -> str:
    """The name of a pinned item, of a group that of the member which lies at ``low``."""
    rise = (low - instance.pin[item]) * instance.unit
    return next(lifetimes[index].name for index, at in instance.members[item] if at == rise and lifetimes[index].nbytes)


def pinned_offsets(instance: Instance) -> tuple[list[int], list[Placed]]:
    """Return offsets with only the pinned items placed, and their rectangles."""
    placed = sorted(
        (pin + block.rise, pin + block.rise + block.size, block.start, block.end)
        for item, pin in enumerate(instance.pin)
        if pin != FREE
        for block in instance.blocks[item]
    )
    return list(instance.pin), placed


def stacked(instance: Instance, offsets: Sequence[int]) -> list[int]:
    """Return offsets in which each item that is still ``FREE`` lies over all that is placed at its time, or nearly.

    Gaps are not looked at, and time is cut into few cells, so it takes next to no time whatever the problem.
    """
    steps = max(instance.end)
    cells = min(steps, CELLS)
    first = [start * cells // steps for start in instance.start]
    stop = [(end - 1) * cells // steps + 1 for end in instance.end]
    whole = [pin if at == FREE else at for at, pin in zip(offsets, instance.pin, strict=True)]
    top = [0] * cells
    there = [item for item, at in enumerate(whole) if at != FREE]
    there.sort(key=lambda item: whole[item] + instance.size[item])  # so that the highest end is written last
    for item in there + [item for item, at in enumerate(whole) if at == FREE]:
        begin, end = first[item], stop[item]
        if whole[item] == FREE:
            base = max(top[begin:end])
            whole[item] = base + -base % instance.alignment[item]
        top[begin:end] = [whole[item] + instance.size[item]] * (end - begin)
    return whole


def first_fit(instance: Instance, order: Sequence[int]) -> list[int]:
    """Return the offset of each item, in units, when the free ones are placed in ``order``."""
    offsets, placed = pinned_offsets(instance)
    for item in order:
        if instance.pin[item] != FREE:
            continue
        blocks = instance.blocks[item]
        lowest = _lowest_of_blocks if len(blocks) > 1 else _lowest
        offset = lowest(instance, item, placed)
        offsets[item] = offset
        for block in blocks:
            insort(placed, (offset + block.rise, offset + block.rise + block.size, block.start, block.end))
    return offsets


def _lowest(instance: Instance, item: int, placed: list[Placed]) -> int:
    """Return the lowest aligned offset at which an item of one block fits."""
    size, start, end, alignment = (
        instance.size[item],
        instance.start[item],
        instance.end[item],
        instance.alignment[item],
    )
    offset = 0
    for other, other_end, other_start, other_stop in placed:
        if other_end > offset and other_start < end and start < other_stop:
            if other - offset >= size:
                break
            offset = other_end + -other_end % alignment
    return offset


def _lowest_of_blocks(instance: Instance, item: int, placed: list[Placed]) -> int:
    """Return the lowest aligned offset at which every block of an item fits."""
    blocked = sorted(
        (other - block.rise - block.size, other_end - block.rise)
        for block in instance.blocks[item]
        for other, other_end, other_start, other_stop in placed
        if other_start < block.end and block.start < other_stop
    )
    alignment = instance.alignment[item]
    offset = 0
    for low, high in blocked:  # offsets strictly between low and high collide
        if low >= offset:
            break
        if high > offset:
            offset = high + -high % alignment
    return offset
