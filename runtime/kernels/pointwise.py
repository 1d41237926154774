"""``arenaplan.pointwise``: one loop compiled for the program, or ATen's calls on chunks that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from planner.graph import Operation, TensorRef
from planner.operators import pointwise_chunk
from planner.pointwise import Instruction, decode, registers
from runtime.errors import ArenaError
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context
from runtime.kernels.pointwise_source import Signature, compiled, kinds_of
from runtime.team import Loop

_ATEN = torch.ops.aten
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Elements from which a compiled loop is worth its compilation.
LEAST_NUMEL = 32768
_CALLS = {
    "add": _ATEN.add.out,
    "sub": _ATEN.sub.out,
    "mul": _ATEN.mul.out,
    "div": _ATEN.div.out,
    "neg": _ATEN.neg.out,
    "exp": _ATEN.exp.out,
    "tanh": _ATEN.tanh.out,
    "sigmoid": _ATEN.sigmoid.out,
    "sqrt": _ATEN.sqrt.out,
    "where": _ATEN.where.self_out,
}


def bind_pointwise(operation: Operation, context: Context) -> list[Call]:
    """The program of `planner.pointwise` at every element, in float32; the result may lie on any operand.

    Operands and results of 16 bits are rounded once, at the end.

    Raises:
        ArenaError: the program is not valid, or its tensors are not dense, of one shape, and of one dtype of 16 or 32
            bits (masks: boolean).
    """
    instructions, operands, output = checked_program(operation, context)
    if output.numel() == 0:
        return []
    looped = _looped(instructions, operands, output) if output.numel() >= LEAST_NUMEL else None
    return looped or _chunked(operation, context, instructions, operands, output)


def checked_program(
    operation: Operation, context: Context
) -> tuple[tuple[Instruction, ...], list[torch.Tensor | float], torch.Tensor]:
    """The program, its operands and its result; raises `ArenaError` unless it can run on them."""
    (output,) = context.outputs(operation)
    try:
        instructions = decode(operation.arguments)
    except ValueError as error:
        raise ArenaError(f"operation {operation.name}: {error}") from error
    operands: list[torch.Tensor | float] = []
    masks = {used[0] for name, used in instructions if name == "where"}
    for position, argument in enumerate(operation.arguments[1:]):
        operands.append(_operand(operation, context, argument, output, mask=position in masks))
    values = {used for name, item in instructions for used in (item[1:] if name == "where" else item)}
    if (
        output.dtype not in _FLOATS
        or not output.is_contiguous()
        or masks & values
        or max(masks, default=-1) >= len(operands)
    ):
        raise ArenaError(
            f"operation {operation.name}: a pointwise program works on dense tensors of one dtype and boolean masks"
        )
    return instructions, operands, output


def _operand(
    operation: Operation, context: Context, argument: object, output: torch.Tensor, *, mask: bool
) -> torch.Tensor | float:
    if isinstance(argument, (int, float)) and not mask:
        return float(argument)
    if isinstance(argument, TensorRef):
        view = context.views[argument.tensor]
        if view.shape == output.shape and view.is_contiguous() and view.dtype == (torch.bool if mask else output.dtype):
            return view
    raise ArenaError(f"operation {operation.name}: operand {argument!r} does not fit a pointwise program")


def _looped(
    instructions: tuple[Instruction, ...], operands: list[torch.Tensor | float], output: torch.Tensor
) -> list[Call] | None:
    """One call of the compiled loop, on all of ATen's threads."""
    if output.device.type != "cpu":
        return None
    tensors = [operand if isinstance(operand, torch.Tensor) else None for operand in operands]
    overwritten = [
        position
        for position, tensor in enumerate(tensors)
        if tensor is not None and tensor.data_ptr() == output.data_ptr()
    ]
    kinds = kinds_of([None if tensor is None else str(tensor.dtype).removeprefix("torch.") for tensor in tensors])
    dtype = str(output.dtype).removeprefix("torch.")
    function = compiled(Signature(instructions, kinds, overwritten[0] if overwritten else None, dtype))
    if function is None:
        return None
    words = torch.zeros(2 + len(operands), dtype=torch.int64)
    words[0], words[1] = output.numel(), output.data_ptr()
    for position, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            words[2 + position] = operand.data_ptr()
        else:
            words[2 + position] = int(torch.tensor(operand, dtype=torch.float32).view(torch.int32))
    return [Loop(function, words)]


def _chunked(
    operation: Operation,
    context: Context,
    instructions: tuple[Instruction, ...],
    operands: list[torch.Tensor | float],
    output: torch.Tensor,
) -> list[Call]:
    """ATen's out-forms, instruction by instruction, on one chunk of elements after the other."""
    places, count = registers(instructions, len(operands))
    scratch = context.views[operation.workspaces[0]] if operation.workspaces else None
    flat = [item.view(-1) if isinstance(item, torch.Tensor) else item for item in operands]
    numbers = [scalar(item, torch.float32, context) if isinstance(item, float) else None for item in flat]
    result = output.view(-1)
    calls: list[Call] = []
    chunk = pointwise_chunk(output.numel(), str(output.dtype).removeprefix("torch."))
    for start in range(0, output.numel(), chunk):
        size = min(chunk, output.numel() - start)
        values: list[torch.Tensor] = []
        rows = iter(range(count, len(scratch) if scratch is not None else 0))

        def wide(item: torch.Tensor, size: int = size, rows: Iterator[int] = rows) -> torch.Tensor:
            """The item, or where it is 16 bits wide a row of scratch in its place."""
            return item if item.itemsize != 2 or scratch is None else scratch[next(rows), :size]

        for item, number in zip(flat, numbers, strict=True):
            if number is not None:
                values.append(number)
            elif isinstance(item, torch.Tensor):
                part = item[start : start + size]
                values.append(wide(part))
                if values[-1] is not part:
                    calls.append(partial(values[-1].copy_, part))
        for (name, used), place in zip(instructions, places, strict=True):
            final = result[start : start + size]
            target = scratch[place, :size] if place >= 0 and scratch is not None else wide(final)
            calls.append(_call(name, [values[position] for position in used], target, context))
            values.append(target)
        if values[-1].dtype != output.dtype:
            calls.append(partial(result[start : start + size].copy_, values[-1]))
    return calls


def _call(name: str, values: list[torch.Tensor], target: torch.Tensor, context: Context) -> Call:
    if name != "where" and all(value.dim() == 0 for value in values):
        values = [value.expand(target.shape) for value in values]
    if name == "relu":
        return partial(_ATEN.clamp_min.Tensor_out, values[0], scalar(0, target.dtype, context), out=target)
    if name == "positive":
        return partial(_ATEN.threshold_backward.grad_input, values[1], values[0], 0, grad_input=target)
    return partial(_CALLS[name], *values, out=target)
