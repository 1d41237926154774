"""The conflict graph, its cliques, components and counts, against the definition."""

from __future__ import annotations

import random

import networkx as nx

from planner.conflicts import conflict_counts, conflict_graph, independent_components, maximal_cliques
from planner.problem import Lifetime, Problem


def _random(seed: int) -> Problem:
    draw = random.Random(seed)
    lifetimes = []
    for index in range(draw.randint(0, 30)):
        birth = draw.randrange(40)
        lifetimes.append(Lifetime(str(index), draw.choice((0, 1, 5)), birth, birth + draw.randint(1, 6)))
    return Problem(tuple(lifetimes))


def test_a_graph_has_an_edge_for_each_pair_alive_together() -> None:
    for seed in range(40):
        problem = _random(seed)
        graph = conflict_graph(problem)
        for i, a in enumerate(problem.lifetimes):
            for j, b in enumerate(problem.lifetimes):
                together = i != j and a.nbytes and b.nbytes and a.birth < b.death and b.birth < a.death
                assert graph.has_edge(i, j) == bool(together)


def test_cliques_components_and_counts_agree_with_networkx() -> None:
    for seed in range(40):
        problem = _random(seed)
        bytes_only = [i for i, item in enumerate(problem.lifetimes) if item.nbytes]
        graph = conflict_graph(problem).subgraph(bytes_only)
        assert {frozenset(clique) for clique in maximal_cliques(problem)} == {
            frozenset(clique) for clique in nx.find_cliques(graph)
        }
        components = independent_components(problem)
        assert {frozenset(part) for part in components} == {frozenset(part) for part in nx.connected_components(graph)}
        births = [min(problem.lifetimes[i].birth for i in part) for part in components]
        assert births == sorted(births)
        counts = conflict_counts(problem)
        assert all(counts[i] == graph.degree[i] for i in bytes_only)


def test_a_node_knows_its_name_and_size() -> None:
    graph = conflict_graph(Problem((Lifetime("a", 7, 0, 1),)))
    assert graph.nodes[0] == {"name": "a", "nbytes": 7}
