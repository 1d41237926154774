"""Lower bounds on the peak: the heaviest clique of the conflict graph, found by one sweep over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from planner.problem import Lifetime, Problem

BOTTLENECK_NAMES = 8
"""How many storages a bottleneck names: enough to act on, few enough for one line."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The step at which most bytes are alive.

    Attributes:
        step: the first such step (0 for a problem without bytes).
        live_nbytes: bytes alive there.
        names: the largest storages alive there, largest first, ties in problem order.
    """

    step: int
    live_nbytes: int
    names: tuple[str, ...]


def peak_live(lifetimes: Sequence[Lifetime]) -> tuple[int, int]:
    """Return the peak of live bytes and the first step that has it: the weight of the heaviest clique.

    Intervals have the Helly property, so every clique of the conflict graph is alive at one common step
    (Golumbic, Algorithmic Graph Theory and Perfect Graphs, ch. 8); a sweep over births and deaths sees them all.
    """
    change: dict[int, int] = {}
    for lifetime in lifetimes:
        change[lifetime.birth] = change.get(lifetime.birth, 0) + lifetime.nbytes
        change[lifetime.death] = change.get(lifetime.death, 0) - lifetime.nbytes
    live = peak = 0
    peak_step = min((lifetime.birth for lifetime in lifetimes), default=0)
    for step in sorted(change):
        live += change[step]
        if live > peak:
            peak, peak_step = live, step
    return peak, peak_step


def bottleneck(problem: Problem, count: int = BOTTLENECK_NAMES) -> Bottleneck:
    """Return the step at which most bytes are alive and the names of the ``count`` largest storages there."""
    peak, step = peak_live(problem.lifetimes)
    alive = [item for item in problem.lifetimes if item.birth <= step < item.death and item.nbytes]
    alive.sort(key=lambda item: -item.nbytes)
    return Bottleneck(step, peak, tuple(item.name for item in alive[:count]))


def lower_bound(problem: Problem) -> int:
    """Return bytes that no packing can go below: the aligned peak of live bytes, and the highest pinned end.

    With ``g`` the greatest common divisor of all alignments, every offset is a multiple of ``g``, so of the
    storages alive at a step all but the topmost take their size rounded up to ``g``; which one is topmost is
    unknown, so the largest rounding is given back. Rounding every size up to its own alignment would not be
    valid: the topmost storage needs none, and one of small alignment can lie in another's rounding.
    """
    lifetimes = [item for item in problem.lifetimes if item.nbytes]
    pinned = max((item.offset + item.nbytes for item in problem.lifetimes if item.offset is not None), default=0)
    unit = gcd(*(item.alignment for item in lifetimes))
    if unit <= 1 or all(item.nbytes % unit == 0 for item in lifetimes):
        return max(pinned, peak_live(lifetimes)[0])
    return max(pinned, _padded_peak(lifetimes, unit))


def _padded_peak(lifetimes: Sequence[Lifetime], unit: int) -> int:
    """Return the largest, over the steps, of the sizes padded to ``unit`` less the largest padding."""
    padding = [-item.nbytes % unit for item in lifetimes]
    events = [(item.death, 0, index) for index, item in enumerate(lifetimes)]
    events += [(item.birth, 1, index) for index, item in enumerate(lifetimes)]
    count = dict.fromkeys(padding, 0)
    largest_first = sorted(count, reverse=True)
    live = peak = 0
    for _, born, index in sorted(events):
        padded = lifetimes[index].nbytes + padding[index]
        if not born:
            live -= padded
            count[padding[index]] -= 1
            continue
        live += padded
        count[padding[index]] += 1
        if live > peak:  # the padding given back can only lower it, so other steps need no look
            given_back = next(amount for amount in largest_first if count[amount])
            peak = max(peak, live - given_back)
    return peak
