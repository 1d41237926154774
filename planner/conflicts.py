"""The interval conflict graph: storages alive together may not overlap in memory.

The graph object is for analysis and small problems; it has an edge for each conflict, which may be quadratic. What
the colouring needs at scale, cliques, components and counts, comes from one sweep over births and deaths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from planner.problem import Lifetime, Problem

if TYPE_CHECKING:
    import networkx as nx


def conflict_graph(problem: Problem) -> nx.Graph[int]:
    """Return the graph: a node for each lifetime, by index, with its ``name`` and ``nbytes``; an edge a conflict."""
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    for index, lifetime in enumerate(problem.lifetimes):
        graph.add_node(index, name=lifetime.name, nbytes=lifetime.nbytes)
    graph.add_edges_from(conflicts(problem.lifetimes))
    return graph


def conflicts(lifetimes: Sequence[Lifetime]) -> Iterator[tuple[int, int]]:
    """Yield each pair of indices, smaller first, that are alive together; zero-byte storages conflict with nothing."""
    alive: dict[int, None] = {}
    for _, born, index in _events(lifetimes):
        if born:
            for other in alive:
                yield (other, index) if other < index else (index, other)
            alive[index] = None
        else:
            del alive[index]


def maximal_cliques(problem: Problem) -> list[tuple[int, ...]]:
    """Return the maximal sets of storages alive at one step, in order of time; indices ascend.

    An interval graph has at most as many as nodes (Fulkerson and Gross, Pacific J. Math. 1965): one wherever a
    birth is followed by a death.
    """
    cliques: list[tuple[int, ...]] = []
    alive: dict[int, None] = {}
    grown = False
    for _, born, index in _events(problem.lifetimes):
        if born:
            alive[index] = None
        else:
            if grown:
                cliques.append(tuple(sorted(alive)))
            del alive[index]
        grown = bool(born)
    return cliques


def independent_components(problem: Problem) -> list[tuple[int, ...]]:
    """Return groups of indices that share no step with each other, in order of time; indices ascend."""
    components: list[list[int]] = []
    alive = 0
    for _, born, index in _events(problem.lifetimes):
        if born:
            if not alive:
                components.append([])
            components[-1].append(index)
        alive += 1 if born else -1
    return [tuple(sorted(component)) for component in components]


def conflict_counts(problem: Problem) -> list[int]:
    """Return for each lifetime how many others it conflicts with, in ``n log n``.

    That is the births before its death less the deaths up to its birth.
    """
    lifetimes = [lifetime for lifetime in problem.lifetimes if lifetime.nbytes]
    births = sorted(lifetime.birth for lifetime in lifetimes)
    deaths = sorted(lifetime.death for lifetime in lifetimes)
    return [
        bisect_left(births, lifetime.death) - bisect_right(deaths, lifetime.birth) - 1 if lifetime.nbytes else 0
        for lifetime in problem.lifetimes
    ]


def _events(lifetimes: Sequence[Lifetime]) -> list[tuple[int, int, int]]:
    """Return (step, 1 for a birth or 0 for a death, index) in order; deaths come first, as lifetimes are half-open."""
    events = [(item.birth, 1, index) for index, item in enumerate(lifetimes) if item.nbytes]
    events += [(item.death, 0, index) for index, item in enumerate(lifetimes) if item.nbytes]
    return sorted(events)
