"""One form for each kind of operator, so that later passes and facts need to know only that one."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Graph, Operation, TensorRef
from planner.operators import MATMUL, SOFTMAX_AXIS

_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})
_ADDED_PRODUCTS = frozenset({"aten.addmm.default", "aten.baddbmm.default"})


def canonical(graph: Graph) -> Graph:
    """Products of every spelling as ``arenaplan.matmul``; a softmax over the last dimension says so as ``-1``."""
    return replace(graph, operations=tuple(_canonical(graph, operation) for operation in graph.operations))


def _canonical(graph: Graph, operation: Operation) -> Operation:
    if operation.operator in _PRODUCTS and not operation.keywords:
        return replace(operation, operator=MATMUL)
    if operation.operator in _ADDED_PRODUCTS and not operation.keywords:
        bias, left, right = operation.arguments
        return replace(operation, operator=MATMUL, arguments=(left, right, bias))
    position = SOFTMAX_AXIS.get(operation.operator)
    first = operation.arguments[0] if operation.arguments else None
    if position is not None and isinstance(first, TensorRef):
        last = len(graph.tensors[first.tensor].shape) - 1
        if operation.arguments[position] == last and last >= 0:
            arguments = (*operation.arguments[:position], -1, *operation.arguments[position + 1 :])
            return replace(operation, arguments=arguments)
    return operation
