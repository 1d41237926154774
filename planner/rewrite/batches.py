"""Give matrix products the batch dimensions their operands have elsewhere: ``(B·N, …)`` becomes ``(B, N, …)``."""

from __future__ import annotations

from functools import partial

from planner.graph import Graph, Operation
from planner.operators import MATMUL
from planner.rewrite.program import Program


def split_batches(graph: Graph) -> Graph:
    """The graph with every such product's leading dimension split; one strided dimension can always be split."""
    program = Program(graph)
    changed = True
    while changed:
        changed = False
        for position, operation in enumerate(program.operations):
            batch = _finer_batch(program, operation)
            if batch is not None:
                program.operations[position] = operation.renumbered(partial(_split, program, batch))
                changed = True
    return program.close()


def _finer_batch(program: Program, operation: Operation) -> tuple[int, int] | None:
    """The split ``(B, N)`` that another tensor over one of the operands' storages already has."""
    if operation.operator != MATMUL or operation.outputs[0] is None:
        return None
    if len(program.tensors[operation.outputs[0]].shape) != 3:
        return None
    if any(len(program.tensors[index].shape) != 3 for index in operation.reads):
        return None
    for index in (*operation.writes, *operation.reads):
        tensor = program.tensors[index]
        for other in program.tensors:
            if (
                other.storage == tensor.storage
                and len(other.shape) == 4
                and sorted(other.shape[2:]) == sorted(tensor.shape[1:])
                and other.shape[0] * other.shape[1] == tensor.shape[0]
            ):
                return other.shape[:2]
    return None


def _split(program: Program, batch: tuple[int, int], index: int) -> int:
    tensor = program.tensors[index]
    shape = batch + tensor.shape[1:]
    strides = (tensor.strides[0] * batch[1], *tensor.strides)
    return program.view(tensor.name, tensor.storage, tensor.offset, shape, strides, tensor.dtype)
