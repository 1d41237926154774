"""In place: an output takes over the bytes of an input that dies in the same step, where the operator allows it."""

from __future__ import annotations

from planner.graph import DONATED_ROLES, FILLED_ROLES, Graph, Operation, Role
from planner.operators import may_overwrite


def permanent_storages(graph: Graph, *, donate: bool) -> frozenset[int]:
    """Storages alive from the first step to the end: parameters, their gradients, constants, undonated inputs."""
    return frozenset(
        index
        for index, storage in enumerate(graph.storages)
        if storage.role is Role.PARAMETER_GRADIENT
        or (storage.role in FILLED_ROLES and (not donate or storage.role not in DONATED_ROLES))
    )


def permanent_order(graph: Graph, *, donate: bool) -> tuple[int, ...]:
    """Permanent storages in the order they lie in: states, then parameter gradients, then the rest."""
    permanent = permanent_storages(graph, donate=donate)
    ports = graph.states + graph.gradients
    named = [graph.tensors[port.tensor].storage for port in ports if port.tensor is not None]
    return tuple(dict.fromkeys([index for index in named if index in permanent] + sorted(permanent)))


def result_storages(graph: Graph) -> frozenset[int]:
    """Storages somebody reads after the last step."""
    return frozenset(graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None)


def overwritable(
    graph: Graph, operation: Operation, alignment: int, kept: frozenset[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """``(output storage, input storages it may be written onto)`` by the operator's facts alone, lifetimes aside.

    Both tensors must be the whole of their storages, and the storages equal in padded size. ``kept`` are storages
    that outlive the last step, which nothing may overwrite.
    """
    found = []
    touched = [graph.tensors[index].storage for index in operation.reads + operation.writes]
    for output in operation.outputs:
        if output is None or not _is_whole(graph, output):
            continue
        target = graph.tensors[output].storage
        if touched.count(target) != 1 or graph.storages[target].role in FILLED_ROLES:
            continue
        candidates = tuple(
            graph.tensors[index].storage
            for index in operation.reads
            if _is_whole(graph, index)
            and touched.count(graph.tensors[index].storage) == 1
            and _padded(graph, output, alignment) == _padded(graph, index, alignment)
            and graph.tensors[index].storage not in kept
            and may_overwrite(operation, graph.tensors[output], graph.tensors[index], index)
        )
        if candidates:
            found.append((target, candidates))
    return tuple(found)


def _padded(graph: Graph, tensor: int, alignment: int) -> int:
    nbytes = graph.storages[graph.tensors[tensor].storage].nbytes
    return -(-nbytes // alignment) * alignment


def _is_whole(graph: Graph, index: int) -> bool:
    tensor = graph.tensors[index]
    return (
        tensor.offset == 0
        and tensor.numel > 0
        and tensor.numel * tensor.itemsize == tensor.end == graph.storages[tensor.storage].nbytes
    )
