"""Which operation must come before which: reads after writes, writes after reads, writes after writes, random order."""

from __future__ import annotations

from planner.graph import Graph
from planner.operators import is_random
from planner.rewrite.layout import disjoint


def dependencies(graph: Graph) -> tuple[frozenset[int], ...]:
    """For each operation, the positions of those that must run before it.

    Accesses to one storage conflict unless both read or the views certainly share no byte, so the pieces of a
    concatenation may be written in any order. Random operations keep their order, as eager draws in that order.
    """
    written: dict[int, list[tuple[int, int]]] = {}
    read: dict[int, list[tuple[int, int]]] = {}
    before: list[frozenset[int]] = []
    last_random: int | None = None
    for position, operation in enumerate(graph.operations):
        needed: set[int] = set()
        for index in operation.reads:
            for writer, other in written.get(graph.tensors[index].storage, ()):
                if writer != position and not disjoint(graph.tensors[index], graph.tensors[other]):
                    needed.add(writer)
        for index in operation.writes:
            storage = graph.tensors[index].storage
            for earlier, other in written.get(storage, []) + read.get(storage, []):
                if earlier != position and not disjoint(graph.tensors[index], graph.tensors[other]):
                    needed.add(earlier)
        for index in operation.reads:
            read.setdefault(graph.tensors[index].storage, []).append((position, index))
        for index in operation.writes:
            written.setdefault(graph.tensors[index].storage, []).append((position, index))
        if is_random(operation.operator):
            if last_random is not None:
                needed.add(last_random)
            last_random = position
        before.append(frozenset(needed))
    return tuple(before)
