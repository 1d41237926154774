"""From a graph in its final order to lifetimes, and to the chains of storages that share bytes in place."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import FILLED_ROLES, Graph, Role, sections
from planner.inplace import overwritable, permanent_storages, result_storages
from planner.plan import padded
from planner.problem import Lifetime


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open steps ``[birth, death)`` during which a storage is needed, and whose bytes it takes over."""

    birth: int
    death: int
    in_place_of: int | None = None


def spans(graph: Graph, *, alignment: int = 256, donate: bool = True, in_place: bool = True) -> tuple[Span, ...]:
    """One span per storage.

    What the caller fills is alive from step 0; parameters, buffers, constants and parameter gradients stay for the
    whole pass; results stay to its end; everything else lives from its first use to its last.
    """
    end = max(len(graph.operations), 1)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, operation in enumerate(graph.operations):
        for index in operation.reads + operation.writes:
            touched = graph.tensors[index].storage
            first.setdefault(touched, step)
            last[touched] = step
    for begin, stop in sections(graph):
        # Lanes run at the same time: nothing may take a place that any of them still uses.
        for touched in {
            graph.tensors[index].storage
            for operation in graph.operations[begin:stop]
            for index in operation.reads + operation.writes
        }:
            first[touched], last[touched] = min(first[touched], begin), max(last[touched], stop - 1)
    results, permanent = result_storages(graph), permanent_storages(graph, donate=donate)
    found = []
    for index, storage in enumerate(graph.storages):
        whole = index in permanent
        birth = 0 if whole or storage.role in FILLED_ROLES else first.get(index, 0)
        death = end if whole or index in results else last.get(index, birth) + 1
        found.append(Span(birth, death))
    if in_place:
        _take_over(graph, found, alignment, results | permanent)
    return tuple(found)


def _take_over(graph: Graph, found: list[Span], alignment: int, kept: frozenset[int]) -> None:
    taken: set[int] = set()
    for step, operation in enumerate(graph.operations):
        for output, candidates in overwritable(graph, operation, alignment, kept):
            if found[output].birth != step or graph.storages[output].role is Role.PARAMETER_GRADIENT:
                continue
            for candidate in candidates:
                if found[candidate].death == step + 1 and candidate not in taken:
                    taken.add(candidate)
                    found[output] = Span(step, found[output].death, candidate)
                    break


def chains(found: tuple[Span, ...]) -> tuple[tuple[int, ...], ...]:
    """Storages grouped by shared bytes, in order of takeover; most groups have one member."""
    successor = {span.in_place_of: index for index, span in enumerate(found) if span.in_place_of is not None}
    result = []
    for index, span in enumerate(found):
        if span.in_place_of is None:
            chain = [index]
            while chain[-1] in successor:
                chain.append(successor[chain[-1]])
            result.append(tuple(chain))
    return tuple(result)


def lifetimes(graph: Graph, found: tuple[Span, ...], *, alignment: int = 256) -> tuple[Lifetime, ...]:
    """One `Lifetime` for each chain, in the order of `chains`, sizes padded to the alignment."""
    return tuple(
        Lifetime(
            name=graph.storages[chain[0]].name,
            nbytes=max(padded(graph.storages[index].nbytes, alignment) for index in chain),
            birth=found[chain[0]].birth,
            death=found[chain[-1]].death,
            alignment=alignment,
        )
        for chain in chains(found)
    )
