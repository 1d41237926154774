"""Operators on elements whose ATen out-form is missing or allocates: the same function by another operator."""

from __future__ import annotations

from functools import partial

import torch

from planner.graph import Operation
from runtime.kernels.aten import bind_elementwise, scalar
from runtime.kernels.binding import Call, Context
from runtime.kernels.compiled import array, compilable, compiled


def bind_masked_fill(operation: Operation, context: Context) -> list[Call]:
    """``out[i] = value where mask[i] else self[i]``; the output may be self."""
    (output,) = context.outputs(operation)
    source, mask, value = (context.value(argument) for argument in operation.arguments[:3])
    if output.numel() == 0:
        return []
    if isinstance(value, torch.Tensor):
        return [partial(torch.ops.aten.where.self_out, mask, value, source, out=output)]
    value = scalar(value, output.dtype, context)  # type: ignore[arg-type]
    looped = _filled(source, mask, value, output)
    return looped or [partial(torch.ops.aten.where.self_out, mask, value, source, out=output)]


def _filled(source: object, mask: object, value: torch.Tensor, output: torch.Tensor) -> list[Call]:
    """The fill as a compiled loop, which ATen's is not: over dense tensors, with a mask for each element or row."""
    if not isinstance(source, torch.Tensor) or not isinstance(mask, torch.Tensor) or value.numel() != 1:
        return []
    dense = output.is_contiguous() and mask.is_contiguous() and source.shape == output.shape
    if not dense or not source.is_contiguous() or not compilable(source, output) or mask.dtype != torch.bool:
        return []
    same = source.data_ptr() == output.data_ptr()
    number, flags = array(value.reshape(1).to(output.dtype)), array(mask.view(-1))
    if same and output.dim() and mask.shape == (*output.shape[:-1], 1) and output.shape[-1] > 1:
        loop = compiled("fill_rows")
        return [] if loop is None else [partial(loop, flags, number, array(output.view(-1, output.shape[-1])))]
    if mask.shape != output.shape:
        return []
    loop = compiled("fill_in_place" if same else "fill_where")
    if loop is None:
        return []
    if same:
        kind = torch.int32 if output.dtype == torch.float32 else torch.int64
        bits = torch.cat([value.reshape(1).to(output.dtype).view(kind), torch.ones(1, dtype=kind)])
        flags = array(mask.view(torch.int8).view(-1))
        return [partial(loop, flags, array(bits), array(output.view(-1).view(kind)))]
    return [partial(loop, array(source.view(-1)), flags, number, array(output.view(-1)))]


def bind_relu(operation: Operation, context: Context) -> list[Call]:
    """``max(x, 0)``, as ATen computes it; the output may be the input."""
    (output,) = context.outputs(operation)
    zero = scalar(0, output.dtype, context)
    source = context.value(operation.arguments[0])
    return [partial(torch.ops.aten.clamp_min.Tensor_out, source, zero, out=output)] if output.numel() else []


def bind_rsub(operation: Operation, context: Context) -> list[Call]:
    """``other − alpha · self``; the output may be either."""
    (output,) = context.outputs(operation)
    source, other = (context.value(argument) for argument in operation.arguments[:2])
    if not isinstance(other, torch.Tensor):
        other = scalar(other, output.dtype, context)  # type: ignore[arg-type]
    alpha = dict(operation.keywords).get("alpha", 1)
    if len(operation.arguments) > 2:
        alpha = operation.arguments[2]
    return [partial(torch.ops.aten.sub.out, other, source, alpha=alpha, out=output)] if output.numel() else []


def bind_square(operation: Operation, context: Context) -> list[Call]:
    """``x · x``; the output may be the input."""
    (output,) = context.outputs(operation)
    source = context.value(operation.arguments[0])
    return [partial(torch.ops.aten.mul.out, source, source, out=output)] if output.numel() else []


def bind_power(operation: Operation, context: Context) -> list[Call]:
    """``x ** y``; a number raised to a tensor goes through a tensor of that number made once."""
    if not operation.operator.endswith(".Scalar"):
        return bind_elementwise(operation, context)
    (output,) = context.outputs(operation)
    base, exponent = (context.value(argument) for argument in operation.arguments)
    base = scalar(base, output.dtype, context)  # type: ignore[arg-type]
    return [partial(torch.ops.aten.pow.Tensor_Tensor_out, base, exponent, out=output)] if output.numel() else []


def bind_where(operation: Operation, context: Context) -> list[Call]:
    """``a where condition else b``; numbers are tensors made once; the output may be a or b."""
    (output,) = context.outputs(operation)
    condition = context.value(operation.arguments[0])
    chosen = [context.value(argument) for argument in operation.arguments[1:]]
    one, two = (
        item if isinstance(item, torch.Tensor) else scalar(item, output.dtype, context)  # type: ignore[arg-type]
        for item in chosen
    )
    return [partial(torch.ops.aten.where.self_out, condition, one, two, out=output)] if output.numel() else []
