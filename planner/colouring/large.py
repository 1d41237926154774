"""First fit in many orders for components too large for interpreted loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from planner.colouring.backend import SAFE_TOTAL, compiled_first_fit
from planner.colouring.best import Best
from planner.colouring.first_fit import stacked
from planner.colouring.first_fit_kernel import COUNTS, HIGHEST, OVERFLOW, STEPS
from planner.colouring.instance import FREE, Instance, instances
from planner.colouring.orders import heaviest_moments
from planner.colouring.ragged import ragged_first_fit
from planner.problem import Lifetime, Problem

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.int64]]

SLICE = 2000
"""Items placed between two looks at the clock."""

EVENTS_IN_BUCKET, LARGEST_BUCKETS = 200, 500
"""Births and deaths in a bucket of time, looked at one by one, and how many buckets there may be."""

FIRST_ROOM, ITEMS_A_RANGE = 2048, 25
"""Ranges a bucket's list has room for, at least and for so many items each; four times as many when one is full."""

LEAST_SECONDS = 2.0
"""Seconds first fit in the first order and the given one may take, however short the limit: some tens of thousands
of items, so that only a larger problem gets less than first fit."""

HINTED_SIZES = 64
"""Sizes for which each list keeps a hint: all there are, or so many spread over them."""

WORK, WORK_PER_ITEM = 120_000_000, 10_000
"""Steps allowed under a limit of ten seconds, in all and for each item; a core makes some 200 million a second."""


class LargeFirstFit:
    """First fit over the arrays of one instance; groups are packed as their hulls."""

    def __init__(self, instance: Instance, place: Callable[..., int]) -> None:
        import numpy as np

        self.instance = instance
        self._np = np
        self._place = place
        self.work = 0
        self.ample = sum(instance.size) + sum(instance.alignment) + max(instance.pin) + max(instance.size)
        self.size, self.birth, self.death, self.span, self.alignment, self.pin = (
            np.array(values, dtype=np.int64)
            for values in (
                instance.size, instance.start, instance.end, instance.span, instance.alignment, instance.pin,
            )
        )  # fmt: skip
        births, deaths = np.sort(self.birth), np.sort(self.death)
        self.conflicts = (
            np.searchsorted(births, self.death, side="left") - np.searchsorted(deaths, self.birth, side="right") - 1
        )
        sizes = np.unique(self.size)
        if len(sizes) > HINTED_SIZES:
            sizes = np.unique(np.quantile(self.size, np.linspace(0, 1, HINTED_SIZES), method="higher"))
        self._hints = len(sizes) + 1
        self._smaller = np.searchsorted(sizes, self.size, side="right")
        self._larger = np.searchsorted(sizes, self.size, side="left") + 1
        self._buckets = self._cut()
        self._room = max(FIRST_ROOM, len(self.size) // ITEMS_A_RANGE)
        self._crowd: Array | None = None

    def _cut(self) -> tuple[Array, ...]:
        """Cut time into buckets of about equally many births and deaths; see ``first_fit_kernel``."""
        np = self._np
        events = np.sort(np.concatenate((self.birth, self.death)))
        count = max(1, min(LARGEST_BUCKETS, len(events) // EVENTS_IN_BUCKET))
        edge = np.unique(events[np.linspace(0, len(events) - 1, count + 1).astype(np.int64)])
        first = np.searchsorted(edge, self.birth, side="right") - 1
        last = np.searchsorted(edge, self.death, side="left") - 1
        from_start = (self.birth > edge[first]) | (self.death < edge[first + 1])
        to_end = (last != first) & (self.death < edge[last + 1])
        bucket = np.concatenate((first[from_start], last[to_end]))
        items = np.concatenate((np.flatnonzero(from_start), np.flatnonzero(to_end)))
        by_bucket = np.argsort(bucket, kind="stable")
        at = np.searchsorted(bucket[by_bucket], np.arange(len(edge)))
        return tuple(np.ascontiguousarray(a, dtype=np.int64) for a in (edge, first, last, at, items[by_bucket]))

    def run(
        self, order: Array, limit: int, deadline: float, tick: Callable[[], None], *, stack: bool = False
    ) -> list[int] | None:
        """Return offsets of a packing no higher than ``limit``, or ``None`` if the order leads to none in time.

        With ``stack``, what is left at the deadline is put one above the other over the rest.
        """
        np = self._np
        count = len(self.size)
        offsets = self.pin.copy()
        order = np.concatenate((order[self.pin[order] != FREE], order[self.pin[order] == FREE]))
        buckets = len(self._buckets[0]) - 1
        near = 2 * int(np.diff(self._buckets[3]).max()) + 1
        lists = 2 * buckets
        lengths = (lists * self._room, lists * self._room, lists, lists * self._hints)
        ranges = tuple(np.zeros(length, dtype=np.int64) for length in lengths)
        scratch = tuple(np.zeros(length, dtype=np.int64) for length in (near, near, buckets, buckets))
        items = (self.size, self.birth, self.death, self.alignment, self._smaller, self._larger, offsets)
        counts = np.zeros(COUNTS, dtype=np.int64)
        position = 0
        while position < count:
            stop = min(position + SLICE, count)
            reached = self._place(order, position, stop, limit, items, self._buckets, ranges, scratch, counts)
            tick()
            self.work += int(counts[STEPS])
            counts[STEPS] = 0
            if counts[OVERFLOW]:  # The item placed last is in some lists only; putting it in again changes nothing.
                counts[OVERFLOW] = 0
                low, high = (np.pad(part.reshape(lists, -1), ((0, 0), (0, 3 * self._room))) for part in ranges[:2])
                ranges = (low.reshape(-1), high.reshape(-1), *ranges[2:])
                self._room *= 4
                position = reached
                continue
            if reached < stop:
                return None
            if time.monotonic() > deadline and stop < count:
                return stacked(self.instance, [int(offset) for offset in offsets]) if stack else None
            position = stop
        return None if counts[HIGHEST] > limit else [int(offset) for offset in offsets]

    def given(self) -> Array:
        """Return the order of the problem."""
        return self._np.arange(len(self.size))

    def orders(self) -> Iterator[tuple[str, Array]]:
        """Yield named orders: those that most often win on large problems first."""
        np = self._np
        size, birth, death, span = self.size, self.birth, self.death, self.span
        yield "size", np.lexsort((birth, -span, -size))
        area = size.astype(np.float64) * span
        weight = size.astype(np.float64) * self.conflicts
        # The share of the bound that is alive at an item's heaviest moment: where that is large, room is scarce.
        if self._crowd is None:
            self._crowd = np.array(heaviest_moments(self.instance), dtype=np.int64)
        crowd = self._crowd
        bound = max(1, self.instance.bound)
        tenths = -(crowd * 1000 // bound)
        hundredths = -(crowd * 100 // bound)
        yield "conflicts x size", np.lexsort((birth, -size, -weight))
        yield "crowd in 1000, area", np.lexsort((birth, -size, -area, tenths))
        yield "area", np.lexsort((birth, -size, -area))
        yield "size, birth", np.lexsort((-span, birth, -size))
        yield "crowd in 100, size", np.lexsort((birth, -span, -size, hundredths))
        yield "size, conflicts", np.lexsort((birth, -self.conflicts, -size))
        yield "early death", np.lexsort((-size, birth, death))
        yield "birth", np.lexsort((-size, -death, birth))
        yield "crowd in 1000, size", np.lexsort((birth, -span, -size, tenths))
        yield "duration", np.lexsort((birth, -size, -span))
        yield "death", np.lexsort((-size, birth, -death))

    def sooner(self, order: Array, offsets: list[int], limit: int) -> Array:
        """Return an order in which what ended above ``limit`` comes twice as soon."""
        np = self._np
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        above = np.array(offsets, dtype=np.int64) + self.size > limit
        rank[above] //= 2
        after: Array = np.lexsort((~above, rank))
        return after


def large_first_fit(instance: Instance) -> LargeFirstFit | None:
    """Return compiled first fit for an instance, or ``None`` if it cannot be compiled or might overflow."""
    total = sum(instance.size) + max(instance.pin) + sum(instance.alignment)
    place = compiled_first_fit() if total < SAFE_TOTAL else None
    return LargeFirstFit(instance, place) if place is not None else None


def load_first_fit() -> float:
    """Load or compile first fit; return the seconds that took, which no time limit counts."""
    start = time.monotonic()
    (nothing,) = instances(Problem((Lifetime("warm up", 1, 0, 1),)))
    engine = large_first_fit(nothing)
    if engine is not None:
        engine.run(engine.given(), engine.ample, inf, lambda: None)
    return time.monotonic() - start


def large_start(instance: Instance, engine: LargeFirstFit, goal_nbytes: int, deadline: float) -> Best | None:
    """Return the better of first fit in the first order and in the given one, which is dropped where it loses.

    A limit that is up before the first is finished leaves the rest of it stacked.
    """
    deadline = max(deadline, time.monotonic() + LEAST_SECONDS)
    name, order = next(engine.orders())
    offsets = engine.run(order, engine.ample, deadline, lambda: None, stack=True)
    if offsets is None:
        return None
    part = Best(instance, offsets, f"first fit, {name}")
    if not part.done(goal_nbytes):
        given = engine.run(engine.given(), part.peak - 1, deadline, lambda: None)
        if given is not None:
            part.offer(given, "first fit, given order")
        if instance.ragged and not part.done(goal_nbytes):
            blocks = ragged_first_fit(instance, deadline, lambda: None)
            if blocks is not None:
                part.offer(blocks, "first fit, given order")
    return part


def large_portfolio(
    part: Best,
    engine: LargeFirstFit,
    goal_nbytes: int,
    time_limit: float,
    deadline: float,
    tick: Callable[[], None],
) -> None:
    """Try first fit in every order, then repair the best one, until at the goal or the work allowed is done.

    A repair moves what ended too high forward in the order (squeaky wheel optimisation: Joslin and Clements, JAIR
    1999) and starts over. The work allowed grows with the items and the time limit, so that a large problem with a
    small gap left does not take the whole limit, and does not depend on the clock unless the limit ends it.
    """
    allowed = engine.work + int((WORK + WORK_PER_ITEM * len(engine.size)) * time_limit / 10)
    best_order = engine.given()
    for name, order in engine.orders():
        if part.algorithm == f"first fit, {name}":
            best_order = order
            continue
        if part.done(goal_nbytes) or engine.work > allowed // 2 or time.monotonic() > deadline:
            break
        offsets = engine.run(order, part.peak - 1, deadline, tick)
        if offsets is not None:
            part.offer(offsets, f"first fit, {name}")
            best_order = order
    order, offsets = best_order, part.offsets
    goal = max(goal_nbytes // part.instance.unit, part.floor)
    while not part.done(goal_nbytes) and engine.work < allowed and time.monotonic() < deadline:
        order = engine.sooner(order, offsets, goal)
        repaired = engine.run(order, engine.ample, deadline, tick)
        if repaired is None:
            break
        offsets = repaired
        part.offer(offsets, "first fit, repaired")
