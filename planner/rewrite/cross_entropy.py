"""The backward of cross-entropy as one operator, which may overwrite the log-probabilities.

PyTorch writes the gradient of the log-probabilities, a matrix with one number a row, before it goes through
log-softmax: two matrices of (tokens × vocabulary) beside each other, where the peak of a language model's step usually
lies. The product of both is ``(softmax − one-hot) · scale`` by row, which needs neither.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Graph, Operation, TensorRef
from planner.operators import CROSS_ENTROPY_BACKWARD
from planner.rewrite.program import Program

_LOSS = "aten.nll_loss_backward.default"
_SOFTMAX = "aten._log_softmax_backward_data.default"
#: In 16 bits the two steps round once each, and the one would round differently.
_DTYPES = frozenset({"float32", "float64"})


def fuse_cross_entropy(graph: Graph) -> Graph:
    """The graph with every ``nll_loss_backward`` that only ``log_softmax``'s backward reads joined to it."""
    program = Program(graph)
    losses: dict[int | None, Operation] = {
        operation.outputs[0]: operation
        for operation in program.operations
        if operation.operator == _LOSS and operation.outputs[0] is not None
    }
    joined: dict[str, Operation] = {}
    dropped: set[str] = set()
    for operation in program.operations:
        loss = _joinable(program, operation, losses)
        if loss is not None:
            gradient, logarithms, target, _, reduction, ignored, total = loss.arguments
            arguments = (gradient, logarithms, target, total, reduction, ignored)
            joined[operation.name] = replace(operation, operator=CROSS_ENTROPY_BACKWARD, arguments=arguments)
            dropped.add(loss.name)
    program.operations = [joined.get(item.name, item) for item in program.operations if item.name not in dropped]
    return program.close()


def _joinable(program: Program, operation: Operation, losses: dict[int | None, Operation]) -> Operation | None:
    """The loss's backward whose result this backward of log-softmax alone reads, over the last of two dimensions."""
    if operation.operator != _SOFTMAX or not isinstance(operation.arguments[0], TensorRef):
        return None
    between = operation.arguments[0].tensor
    loss = losses.get(between)
    if loss is None or loss.arguments[3] is not None or operation.arguments[1] != loss.arguments[1]:
        return None
    storage = program.storage_of(between)
    tensor = program.tensors[between]
    alone = storage not in program.border and len(program.touching(storage)) == 2
    fits = len(tensor.shape) == 2 and operation.arguments[2] in (1, -1) and tensor.dtype in _DTYPES
    return loss if alone and fits else None
