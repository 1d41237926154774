"""Dense operands made explicit: where a kernel takes contiguous tensors only, a planned copy makes them so."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import Graph, Operation, Role, TensorRef, dense_strides, substitute
from planner.operators import COPY, MATMUL, needs_dense
from planner.rewrite.program import Program


def dense_operands(graph: Graph) -> Graph:
    """The graph in which such operators read and write contiguous tensors; other results are copied to their place."""
    program = Program(graph)
    operations: list[Operation] = []
    for operation in program.operations:
        if operation.operator == MATMUL:
            operations += _densified(program, operation, [i for i in operation.reads if not _is_matrix(program, i)])
        elif needs_dense(operation.operator):
            loose = [i for i in operation.reads + operation.writes if not program.tensors[i].is_contiguous]
            operations += _densified(program, operation, loose)
        else:
            operations.append(operation)
    program.operations = operations
    return program.close()


def _is_matrix(program: Program, index: int) -> bool:
    """Whether BLAS can read the operand as it lies: one element behind the other along rows or columns, none twice."""
    tensor = program.tensors[index]
    if len(tensor.shape) < 2 or tensor.numel == 0:
        return True
    (rows, columns), (down, along) = tensor.shape[-2:], tensor.strides[-2:]
    by_rows = (along == 1 or columns == 1) and (down >= columns or rows == 1)
    return by_rows or ((down == 1 or rows == 1) and (along >= rows or columns == 1))


def _densified(program: Program, operation: Operation, loose: list[int]) -> list[Operation]:
    before: list[Operation] = []
    after: list[Operation] = []
    twins: dict[int, int] = {}
    for index in loose:
        tensor = program.tensors[index]
        if index in twins:
            continue
        storage = program.new_storage(f"{tensor.name}.dense", tensor.numel * tensor.itemsize, Role.TEMPORARY)
        strides = dense_strides(tensor.shape)
        twins[index] = program.view(f"{tensor.name}.dense", storage, 0, tensor.shape, strides, tensor.dtype)
        number = len(before) + len(after)
        if index in operation.reads:
            before.append(_copy(operation, index, twins[index], f"dense{number}"))
        if index in operation.writes:
            after.append(_copy(operation, twins[index], index, f"spread{number}"))
    if not twins:
        return [operation]
    changed = replace(
        operation,
        arguments=tuple(
            substitute(argument, lambda index: twins.get(index, index)) for argument in operation.arguments
        ),
        outputs=tuple(None if index is None else twins.get(index, index) for index in operation.outputs),
    )
    return [*before, changed, *after]


def _copy(operation: Operation, source: int, destination: int, suffix: str) -> Operation:
    name = f"{operation.name}.{suffix}"
    arguments = (TensorRef(source),)
    return Operation(name, COPY, arguments, (), (destination,), source=operation.source, module=operation.module)
