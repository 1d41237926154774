"""Candidate orders: the traced one, a greedy one, and on small graphs the one of least peak."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.graph import Graph
from planner.schedule.dependencies import dependencies
from planner.schedule.model import MemoryModel, State, memory_model, peak_of

#: States the exact search may expand; attention backwards need a few hundred.
EXPANSIONS = 4_000
#: Operations beyond which the exact search is not tried.
EXACT_OPERATIONS = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step number for each operation.

    Attributes:
        name: how it was found.
        order: ``order[step]`` is the operation's position in the graph.
        peak_nbytes: its peak live bytes by the memory model.
    """

    name: str
    order: tuple[int, ...]
    peak_nbytes: int

    def apply(self, graph: Graph) -> Graph:
        """The graph with its operations in this order."""
        return replace(graph, operations=tuple(graph.operations[position] for position in self.order))


def schedules(graph: Graph, *, alignment: int = 256, donate: bool = True) -> tuple[Schedule, ...]:
    """Orders to try, the traced one first; every one respects `dependencies`."""
    before = dependencies(graph)
    model = memory_model(graph, alignment, donate)
    orders = {"traced": tuple(range(len(graph.operations))), "greedy": _greedy(model, before)}
    if len(graph.operations) <= EXACT_OPERATIONS:
        exact = _least_peak(model, before)
        if exact is not None:
            orders["least peak"] = exact
    return tuple(Schedule(name, order, peak_of(model, order)) for name, order in orders.items())


def _greedy(model: MemoryModel, before: tuple[frozenset[int], ...]) -> tuple[int, ...]:
    """List scheduling: of the ready operations, the one that leaves least alive (ties: least during, index)."""
    state = State(model)
    after: list[list[int]] = [[] for _ in before]
    waiting = [len(items) for items in before]
    for position, items in enumerate(before):
        for item in items:
            after[item].append(position)
    ready = [position for position, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        best = min(ready, key=lambda position: (state.cost(position)[1], state.cost(position)[0], position))
        ready.remove(best)
        order.append(best)
        state.run(best)
        for position in after[best]:
            waiting[position] -= 1
            if not waiting[position]:
                ready.append(position)
    return tuple(order)


def _least_peak(model: MemoryModel, before: tuple[frozenset[int], ...]) -> tuple[int, ...] | None:
    """An order of least peak: Dijkstra over sets of finished operations, the cost of a path being its peak.

    Operations that neither raise the peak nor leave more alive are run at once: doing them early never hurts.
    Returns ``None`` if the budget of expansions runs out.
    """
    count = len(before)
    needs = [sum(1 << item for item in items) for items in before]
    full = (1 << count) - 1
    start_peak = State(model).live_nbytes
    heap: list[tuple[int, int, int, tuple[int, ...]]] = [(start_peak, 0, 0, ())]
    best = {0: start_peak}
    for _ in range(EXPANSIONS):
        if not heap:
            return None
        peak, _, done, order = heapq.heappop(heap)
        if done == full:
            return order
        if best.get(done, peak) < peak:
            continue
        state = State(model)
        for position in order:
            state.run(position)
        order, done = _run_free(state, needs, order, done, peak)
        if done == full:
            return order
        for position in _ready(needs, done, count):
            during, _ = state.cost(position)
            reached = max(peak, during)
            then = done | 1 << position
            if reached < best.get(then, reached + 1):
                best[then] = reached
                heapq.heappush(heap, (reached, -then.bit_count(), then, (*order, position)))
    return None


def _ready(needs: list[int], done: int, count: int) -> Iterator[int]:
    for position in range(count):
        if not done >> position & 1 and needs[position] & ~done == 0:
            yield position


def _run_free(
    state: State, needs: list[int], order: tuple[int, ...], done: int, peak: int
) -> tuple[tuple[int, ...], int]:
    progress = True
    while progress:
        progress = False
        for position in _ready(needs, done, len(needs)):
            during, after = state.cost(position)
            if during <= peak and after <= state.live_nbytes:
                state.run(position)
                order = (*order, position)
                done |= 1 << position
                progress = True
    return order, done
