"""Restarts of the decision search: decide at the lowest target first, raise it only as long as nothing is found.

Depth-first search has heavy tails (Gomes, Selman and Kautz, AAAI 1998): one order of the items is stuck where the
next walks through. So each try gets its own order, and few get many nodes, as Luby, Sinclair and Zuckerman (1993)
advise for running times that are not known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.colouring.backend import Backend
from planner.colouring.instance import Instance
from planner.colouring.orders import heaviest_moments
from planner.colouring.search import Layout, Search
from planner.colouring.search_kernel import EXHAUSTED, PAUSED, SOLVED

FIRST_NODES = 3000
"""Nodes of the shortest try: most that succeed at all do so in fewer."""

FIXED_ORDERS, FIXED_NODES = 7, (2500, 10_000)
"""How many orders are tried without noise, and the nodes each gets in its first try and its second."""

OFFSET_WEIGHT = 1024
"""Offsets count this much more than numbers, so that a small share of the number can be expressed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tries at one target came to: ``SOLVED``, ``EXHAUSTED`` (no packing exists) or ``PAUSED`` (unknown)."""

    outcome: int
    offsets: list[int] | None = None


class Decider:
    """Decides targets of one instance; each call goes on in the sequence of tries where the last stopped."""

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.backend = backend
        self.layout = layout
        self._orders = _restarts(layout.instance)
        self._attempt = 0

    def decide(self, target: int, nodes: int, deadline: float, tick: Callable[[], None]) -> Verdict:
        """Try orders until ``nodes`` nodes are spent, by less than as many more, or until ``deadline`` (monotonic)."""
        left = nodes
        while left > 0:
            self._attempt += 1
            order, share = next(self._orders)
            weights = OFFSET_WEIGHT, int(share * OFFSET_WEIGHT * target / len(order))
            search = Search(self.layout, order, weights, target, self.backend)
            allowance = min(nodes, _allowance(self._attempt))
            outcome = PAUSED
            while outcome == PAUSED and search.nodes < allowance:
                if time.monotonic() > deadline:
                    return Verdict(PAUSED)
                outcome = search.advance(min(self.backend.slice_nodes, allowance - search.nodes))
                tick()
            if outcome == SOLVED:
                return Verdict(SOLVED, search.offsets())
            if outcome == EXHAUSTED:
                return Verdict(EXHAUSTED)
            left -= max(search.nodes, 1)
        return Verdict(PAUSED)


def _allowance(attempt: int) -> int:
    """Return the nodes of the ``attempt``-th try (from 1): every sixth has eight times as many, and so on.

    Before that come the fixed orders, with few nodes, then with more.
    """
    if attempt <= len(FIXED_NODES) * FIXED_ORDERS:
        return FIXED_NODES[(attempt - 1) // FIXED_ORDERS]
    attempt -= len(FIXED_NODES) * FIXED_ORDERS
    nodes = FIRST_NODES
    while attempt % 6 == 0:
        nodes *= 8
        attempt //= 6
    return nodes


def _restarts(instance: Instance) -> Iterator[tuple[list[int], float]]:
    """Yield orders of the items, and what share of the target their place in it may weigh against offsets.

    The items of the heaviest moments come first, long or large ones before others; noise tells the tries apart.
    """
    noise = random.Random(2)
    items = range(len(instance))
    heaviest = heaviest_moments(instance)
    area = [size * span for size, span in zip(instance.size, instance.span, strict=True)]
    grain = max(1, max(heaviest) * 3 // 100)
    size, span = instance.size, instance.span
    width = [end - start for start, end in zip(instance.start, instance.end, strict=True)]
    bulk = [high * wide for high, wide in zip(size, width, strict=True)]
    fixed = (
        sorted(items, key=lambda item: (-heaviest[item], -span[item], -area[item])),
        sorted(items, key=lambda item: (-heaviest[item], -width[item], -bulk[item])),
        sorted(items, key=lambda item: (-bulk[item], -heaviest[item], -width[item])),
        sorted(items, key=lambda item: (-heaviest[item], -area[item], -span[item])),
        sorted(items, key=lambda item: (-width[item], -heaviest[item], -bulk[item])),
        sorted(items, key=lambda item: (-heaviest[item] // grain, -area[item], -span[item])),
        sorted(items, key=lambda item: (instance.start[item], -span[item], -area[item])),
    )
    for _ in FIXED_NODES:
        for order in fixed:
            yield order, 0.0
    attempt = 0
    while True:
        spread = (0.02, 0.05, 0.1, 0.2)[attempt // 4 % 4]
        share = (0.0, 0.003)[attempt // 16 % 2]
        jitter = [noise.lognormvariate(0.0, spread) for _ in items]
        kind = attempt % 4
        if kind == 0:
            order = sorted(items, key=lambda item: (-heaviest[item], -span[item] * jitter[item]))
        elif kind == 1:
            order = sorted(items, key=lambda item: (-(heaviest[item] // grain), -area[item] * jitter[item]))
        elif kind == 2:
            order = sorted(items, key=lambda item: (-heaviest[item], -width[item] * jitter[item]))
        else:
            order = sorted(items, key=lambda item: (-heaviest[item], -area[item] * jitter[item]))
        yield order, share
        attempt += 1
