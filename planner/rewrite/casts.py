"""Casts made explicit: where ATen would convert an operand into memory of its own, a planned copy does it before."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from planner.graph import ITEMSIZE, Argument, Graph, Operation, Role, TensorRef, dense_strides
from planner.operators import COPY, base_name, is_elementwise
from planner.rewrite.program import Program

#: Operands that are masks: they keep their dtype beside operands of another.
_MASKS = {"where": 0, "masked_fill": 1}
#: Operators that take the dtype of their result for the sums they form.
_REDUCTIONS = frozenset({"sum", "mean", "cumsum", "prod", "linalg_vector_norm"})
#: Operators whose result is true or false, whatever they compare.
_FLAGS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"})


def add_casts(graph: Graph) -> Graph:
    """The graph in which operators on elements, and sums, have operands and results of one dtype (masks aside)."""
    program = Program(graph)
    operations: list[Operation] = []
    for operation in program.operations:
        operations += _cast(program, operation)
    program.operations = operations
    return program.close()


def _cast(program: Program, operation: Operation) -> list[Operation]:
    name = base_name(operation.operator)
    elementwise = is_elementwise(operation.operator)
    output = operation.outputs[0] if len(operation.outputs) == 1 else None
    if not operation.operator.startswith("aten.") or not (elementwise or name in _REDUCTIONS) or output is None:
        return [operation]
    if any(program.tensors[index].dtype.startswith("complex") for index in (*operation.reads, output)):
        return [operation]
    result = program.tensors[output]
    wanted = _common_dtype(program, operation) if elementwise else result.dtype
    if elementwise and not _is_number(wanted) and _is_number(result.dtype):
        wanted = result.dtype
    before: list[Operation] = []
    after: list[Operation] = []
    arguments = list(operation.arguments)
    for position, argument in enumerate(arguments):
        if not isinstance(argument, TensorRef) or position == _MASKS.get(name):
            continue
        if program.tensors[argument.tensor].dtype != wanted and (elementwise or position == 0):
            narrow, small, twin = _twin(program, argument.tensor, wanted)
            before.append(_copy(operation, narrow, small, f"cast{position}"))
            arguments[position] = TensorRef(twin)
    changed = replace(operation, arguments=tuple(arguments))
    if elementwise and name not in _FLAGS and result.dtype != wanted:
        _, _, computed = _twin(program, output, wanted)
        after.append(_copy(operation, computed, output, "cast"))
        changed = replace(changed, outputs=(computed,))
    return [*before, changed, *after]


def _common_dtype(program: Program, operation: Operation) -> str:
    """The dtype ATen computes in: its promotion of all tensors and numbers among the operands, masks aside."""
    skipped = _MASKS.get(base_name(operation.operator))
    operands: list[torch.Tensor | float | int | bool | complex] = []
    for position, argument in enumerate(operation.arguments):
        if position == skipped:
            continue
        if isinstance(argument, TensorRef):
            tensor = program.tensors[argument.tensor]
            operands.append(torch.empty([1] * len(tensor.shape), dtype=getattr(torch, tensor.dtype), device="meta"))
        elif isinstance(argument, (bool, int, float)):
            operands.append(argument)
    if not operands:
        return program.tensors[operation.outputs[0] or 0].dtype
    common = _promoted(operands)
    return str(common).removeprefix("torch.")


def _promoted(operands: list[torch.Tensor | float | int | bool | complex]) -> torch.dtype:
    """``torch.result_type`` of any number of operands: tensors with dimensions outrank those without, then numbers."""
    ranked: list[list[torch.dtype]] = [[], [], []]
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            ranked[0 if operand.dim() else 1].append(operand.dtype)
        else:
            ranked[2].append(torch.result_type(torch.empty((), dtype=torch.bool, device="meta"), operand))
    common: torch.dtype | None = None
    for dtypes in ranked:
        if not dtypes:
            continue
        level = dtypes[0]
        for dtype in dtypes[1:]:
            level = torch.promote_types(level, dtype)
        if common is None or _category(level) > _category(common):
            common = level if common is None else torch.promote_types(common, level)
    return common or torch.get_default_dtype()


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _is_number(dtype: str) -> bool:
    """Whether a dtype holds fractions."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _twin(program: Program, index: int, dtype: str) -> tuple[int, int, int]:
    """The original and a new dense tensor in another dtype, both without repetition, and the new one repeated alike."""
    tensor = program.tensors[index]
    shape = tuple(
        min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    strides = dense_strides(shape)
    storage = program.new_storage(f"{tensor.name}.{dtype}", prod(shape) * ITEMSIZE[dtype], Role.TEMPORARY)
    narrow = program.view(tensor.name, tensor.storage, tensor.offset, shape, tensor.strides, tensor.dtype)
    small = program.view(f"{tensor.name}.{dtype}", storage, 0, shape, strides, dtype)
    repeated = tuple(0 if old == 0 else new for old, new in zip(tensor.strides, strides, strict=True))
    return narrow, small, program.view(f"{tensor.name}.{dtype}", storage, 0, tensor.shape, repeated, dtype)


def _copy(operation: Operation, source: int, destination: int, suffix: str) -> Operation:
    arguments: tuple[Argument, ...] = (TensorRef(source),)
    name = f"{operation.name}.{suffix}"
    return Operation(name, COPY, arguments, (), (destination,), source=operation.source, module=operation.module)
