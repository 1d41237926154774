"""In place: an output takes over the bytes of an input that dies in the same step, where the operator allows it."""

from __future__ import annotations

from planner.graph import RESULT_ROLES, FILLED_ROLES, DONATED_ROLES, Graph, Operation
from planner.operators import may_overwrite


def overwritable(graph: Graph, operation: Operation, alignment: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """``(output storage, input storages it may be written onto)`` by the operator's facts alone, lifetimes aside.

    Both tensors must be the whole of their storages, and the storages equal in padded size.
    """
    found = []
    touched = [graph.tensors[index].storage for index in operation.reads + operation.writes]
    for output in operation.outputs:
        if output is None or not _is_whole(graph, output, alignment):
            continue
        target = graph.tensors[output].storage
        if touched.count(target) != 1 or graph.storages[target].role in FILLED_ROLES:
            continue
        candidates = tuple(
            graph.tensors[index].storage
            for index in operation.reads
            if _is_whole(graph, index, alignment)
            and touched.count(graph.tensors[index].storage) == 1
            and _padded(graph, output, alignment) == _padded(graph, index, alignment)
            and _may_be_lost(graph, graph.tensors[index].storage)
            and may_overwrite(operation, graph.tensors[output], graph.tensors[index], index)
        )
        if candidates:
            found.append((target, candidates))
    return tuple(found)


def _padded(graph: Graph, tensor: int, alignment: int) -> int:
    nbytes = graph.storages[graph.tensors[tensor].storage].nbytes
    return -(-nbytes // alignment) * alignment


def _is_whole(graph: Graph, index: int, alignment: int) -> bool:
    tensor = graph.tensors[index]
    return tensor.offset == 0 and tensor.numel > 0 and tensor.numel * tensor.itemsize == tensor.end == graph.storages[tensor.storage].nbytes


def _may_be_lost(graph: Graph, storage: int) -> bool:
    role = graph.storages[storage].role
    return role not in RESULT_ROLES and (role not in FILLED_ROLES or role in DONATED_ROLES)
