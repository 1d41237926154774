"""Which planned operations run as Triton kernels: an operator's binder gives its launches, or ``None`` for ATen's form.

A binder takes an operation only if every shape, dtype and stride is one its kernel is written for; what a kernel
would write must have the shape of the tensor it is given. The rest runs as on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from types import MappingProxyType

import torch

from planner.graph import Operation
from planner.operators import (
    CHECK_GRADIENTS,
    CROSS_ENTROPY_BACKWARD,
    DROPOUT,
    MATMUL,
    POINTWISE,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    UPDATE,
    base_name,
)
from runtime.errors import ArenaError
from runtime.kernels.binding import Call, Context
from runtime.kernels.dropout import checked_dropout
from runtime.kernels.matmul import merged_batches, single_product
from runtime.kernels.pointwise import checked_program
from runtime.kernels.rms_norm import checked_rms_norm, checked_rms_norm_backward
from runtime.kernels.triton import cross_entropy, dropout, embedding, matmul, norm, pointwise, softmax, sums, update
from runtime.kernels.triton.launch import Launch

TritonBinder = Callable[[Operation, Context], list[Call] | None]

#: Multiply-adds of one matrix from which the vendor's library is called once for each batch all the same.
VENDOR_WORK = 1 << 27
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _listed(launch: Launch | None) -> list[Call] | None:
    return None if launch is None else [launch]


def same_floats(*tensors: torch.Tensor | None) -> bool:
    """Whether all are of one of the dtypes kernels are compiled for."""
    given = [tensor for tensor in tensors if tensor is not None]
    return len({tensor.dtype for tensor in given}) == 1 and given[0].dtype in _FLOATS


def _optional(context: Context, argument: object) -> torch.Tensor | None:
    value = context.value(argument)  # type: ignore[arg-type]
    return value if isinstance(value, torch.Tensor) else None


def _last(axis: object, tensor: torch.Tensor) -> bool:
    return isinstance(axis, int) and axis % max(tensor.dim(), 1) == tensor.dim() - 1


def bind_softmax(operation: Operation, context: Context) -> list[Call] | None:
    """``aten._softmax`` over the last dimension, with eager's NaN for rows of −∞."""
    (out,) = context.outputs(operation)
    x = context.tensor(operation.arguments[0])
    if not same_floats(x, out) or x.shape != out.shape or not _last(operation.arguments[1], x):
        return None
    return _listed(softmax.launch(x, out, safe=False))


def bind_softmax_backward(operation: Operation, context: Context) -> list[Call] | None:
    """``aten._softmax_backward_data`` over the last dimension."""
    (out,) = context.outputs(operation)
    grad, probs = (context.tensor(argument) for argument in operation.arguments[:2])
    fits = same_floats(grad, probs, out) and grad.shape == probs.shape == out.shape
    if not fits or not _last(operation.arguments[2], grad):
        return None
    return _listed(softmax.launch_backward(grad, probs, out, safe=False))


def _width(shape: object) -> int:
    return prod(size for size in shape if isinstance(size, int)) if isinstance(shape, (list, tuple)) else 0


def _row_views(width: int, *tensors: torch.Tensor | None) -> list[torch.Tensor | None] | None:
    """Dense tensors as rows of ``width``."""
    if any(tensor is not None and (not tensor.is_contiguous() or tensor.numel() % width) for tensor in tensors):
        return None
    return [None if tensor is None else tensor.view(-1, width) for tensor in tensors]


def bind_layer_norm(operation: Operation, context: Context) -> list[Call] | None:
    """``aten.native_layer_norm`` on dense tensors."""
    out, mean, rstd = (None if index is None else context.views[index] for index in operation.outputs)
    x = context.tensor(operation.arguments[0])
    weight, bias = (_optional(context, argument) for argument in operation.arguments[2:4])
    width, eps = _width(operation.arguments[1]), operation.arguments[4]
    if out is None or mean is None or rstd is None or not width or not isinstance(eps, float):
        return None
    rows = x.numel() // width
    statistics = mean.dtype == rstd.dtype and mean.numel() == rstd.numel() == rows
    if not same_floats(x, weight, bias, out) or x.shape != out.shape or not statistics:
        return None
    if not mean.is_contiguous() or not rstd.is_contiguous() or mean.dtype not in (torch.float32, x.dtype):
        return None
    views = _row_views(width, x, out, weight, bias)
    if views is None or any(view is not None and view.shape[0] != 1 for view in views[2:]):
        return None
    scale, shift = (None if item is None else item.view(-1) for item in (weight, bias))
    return _listed(norm.launch(x.view(rows, width), scale, shift, out.view(rows, width), mean, rstd, eps))


def bind_layer_norm_backward(operation: Operation, context: Context) -> list[Call] | None:
    """``aten.native_layer_norm_backward`` on dense tensors; the sums go through the operation's first workspace."""
    grad, x = (context.tensor(argument) for argument in operation.arguments[:2])
    mean, rstd, weight = (_optional(context, argument) for argument in operation.arguments[3:6])
    to_x, to_weight, to_bias = (None if index is None else context.views[index] for index in operation.outputs)
    width = _width(operation.arguments[2])
    if to_x is None or mean is None or rstd is None or not width or not operation.workspaces:
        return None
    parts = context.views[operation.workspaces[0]]
    fits = grad.shape == x.shape == to_x.shape and mean.numel() == rstd.numel() == x.numel() // width
    if not same_floats(grad, x, weight, to_x, to_weight, to_bias) or not fits or parts.dtype != torch.float32:
        return None
    if mean.dtype != rstd.dtype or not mean.is_contiguous() or not rstd.is_contiguous():
        return None
    views = _row_views(width, grad, x, to_x, weight, to_weight, to_bias)
    if views is None or any(view is not None and view.shape[0] != 1 for view in views[3:]):
        return None
    if not parts.is_contiguous() or parts.numel() < 2 * width or views[0] is None or views[1] is None:
        return None
    vectors = [None if item is None else item.view(-1) for item in views[3:]]
    flat = to_x.view(-1, width)
    sums = {"grad_weight": vectors[1], "grad_bias": vectors[2], "parts": parts.view(-1)}
    return list(norm.launch_backward(views[0], views[1], vectors[0], mean, rstd, flat, **sums)) or None


def bind_rms_norm(operation: Operation, context: Context) -> list[Call] | None:
    """``arenaplan.rms_norm``; operands of 16 or 32 bits, which may differ."""
    found = checked_rms_norm(operation, context)
    if found is None:
        return []
    rows, eps = found
    if rows.dtype != torch.float32:
        return None
    return _listed(norm.launch(rows.x, rows.weight, None, rows.out, None, rows.rstd, eps))


def bind_rms_norm_backward(operation: Operation, context: Context) -> list[Call] | None:
    """``arenaplan.rms_norm_backward``; the sums go through the operation's first workspace."""
    rows = checked_rms_norm_backward(operation, context)
    if rows is None or rows.given is None or rows.dtype != torch.float32:
        return None
    parts = rows.scratch[0].view(torch.float32)
    sums = {"grad_weight": rows.to_weight, "parts": parts if rows.to_weight is not None else None}
    return list(norm.launch_backward(rows.given, rows.x, rows.weight, None, rows.rstd, rows.out, **sums)) or None


def bind_index_add(operation: Operation, context: Context) -> list[Call] | None:
    """``aten.index_add_`` of whole rows: the backward of an embedding, without atomics."""
    table, index, source = (context.value(operation.arguments[position]) for position in (0, 2, 3))
    if not all(isinstance(item, torch.Tensor) for item in (table, index, source)):
        return None
    if operation.arguments[1] != 0 or operation.keywords or operation.outputs != operation.reads[:1]:
        return None
    return _index_add(table, index, source)  # type: ignore[arg-type]


def _index_add(table: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> list[Call] | None:
    rows = table.dim() == source.dim() == 2 and index.dim() == 1 and source.shape == (len(index), table.shape[-1])
    if not rows or not same_floats(table, source) or index.dtype not in (torch.int32, torch.int64):
        return None
    return _listed(embedding.launch(source, index, table))


def bind_sum(operation: Operation, context: Context) -> list[Call] | None:
    """``aten.sum`` over the first dimensions of a dense tensor, but not all: the gradient of a bias."""
    (out,) = context.outputs(operation)
    x = context.tensor(operation.arguments[0])
    dims = context.value(operation.arguments[1]) if len(operation.arguments) > 1 else None
    if not isinstance(dims, list) or operation.workspaces or not same_floats(x, out) or 0 in x.shape:
        return None
    taken = sorted(axis % max(x.dim(), 1) for axis in dims if isinstance(axis, int))
    if taken != list(range(len(dims))) or not 0 < len(taken) < x.dim():
        return None
    width = prod(x.shape[len(taken) :])
    if not x.is_contiguous() or not out.is_contiguous() or out.numel() != width:
        return None
    return [sums.launch_columns(x.view(-1, width), out.view(-1))]


def bind_cross_entropy_backward(operation: Operation, context: Context) -> list[Call] | None:
    """``arenaplan.cross_entropy_backward`` from log-probabilities, which it may overwrite."""
    (out,) = context.outputs(operation)
    grad, logarithms, target, total = (context.tensor(argument) for argument in operation.arguments[:4])
    reduction, ignored = operation.arguments[4:6]
    names = {number: name for name, number in cross_entropy.REDUCTIONS.items()}
    fits = out.dim() == 2 and out.shape == logarithms.shape and target.shape == out.shape[:1]
    if not fits or not same_floats(out, logarithms, grad, total) or target.dtype != torch.int64:
        return None
    each = reduction == cross_entropy.REDUCTIONS["none"]
    if grad.numel() != (len(target) if each else 1) or total.numel() != 1 or not isinstance(ignored, int):
        return None
    if (
        not isinstance(reduction, int)
        or reduction not in names
        or not target.is_contiguous()
        or not grad.is_contiguous()
    ):
        return None
    return _listed(
        cross_entropy.launch_backward(
            logarithms, target, None, grad, total, out, reduction=names[reduction], ignore_index=ignored
        )
    )


def bind_matmul(operation: Operation, context: Context) -> list[Call]:
    """``arenaplan.matmul``: one call of the vendor's library where the batch is one strided dimension, else one launch.

    Heads split from or merged into a projection have two batch strides, for which the library needs several calls.
    """
    (out,) = context.outputs(operation)
    left, right = (context.tensor(argument) for argument in operation.arguments[:2])
    bias = _optional(context, operation.arguments[2]) if len(operation.arguments) > 2 else None
    if out.numel() == 0:
        return []
    if left.shape[-1] != right.shape[-2] or out.shape[-2:] != (left.shape[-2], right.shape[-1]):
        raise ArenaError(f"operation {operation.name}: {tuple(left.shape)} · {tuple(right.shape)} ≠ {tuple(out.shape)}")
    left, right = left.expand(*out.shape[:-2], *left.shape[-2:]), right.expand(*out.shape[:-2], *right.shape[-2:])
    added = None if bias is None else bias.expand(out.shape)
    if left.shape[-1] == 0:
        return [partial(out.zero_)] if added is None else [partial(out.copy_, added)]
    if out.dim() == 2:
        return [single_product(left, right, added, out)]
    batches = list(merged_batches(left, right, added, out))
    large = out.shape[-2] * out.shape[-1] * left.shape[-1] >= VENDOR_WORK
    if len(batches) > 1 and not large and out.dim() <= 4 and same_floats(left, right, out):
        launch = matmul.launch(left, right, out, bias=added)
        if launch is not None:
            return [launch]
    return [
        partial(torch.bmm, a, b, out=o) if c is None else partial(torch.baddbmm, c, a, b, out=o)
        for a, b, c, o in batches
    ]


def bind_pointwise(operation: Operation, context: Context) -> list[Call]:
    """``arenaplan.pointwise`` as one launch."""
    instructions, operands, out = checked_program(operation, context)
    launch = pointwise.launch(instructions, operands, out)
    return [] if launch is None else [launch]


def bind_dropout(operation: Operation, context: Context) -> list[Call] | None:
    """``arenaplan.dropout``, its mask made from the seed in the arena."""
    x, out, seed, p, scale = checked_dropout(operation, context)
    if not same_floats(x, out):
        return None
    return _listed(dropout.launch(x, out, seed, p, scale=scale))


#: This project's own operators.
TABLE: Mapping[str, TritonBinder] = MappingProxyType(
    {
        DROPOUT: bind_dropout,
        POINTWISE: bind_pointwise,
        CROSS_ENTROPY_BACKWARD: bind_cross_entropy_backward,
        MATMUL: bind_matmul,
        CHECK_GRADIENTS: update.bind_check,
        UPDATE: update.bind_update,
        RMS_NORM: bind_rms_norm,
        RMS_NORM_BACKWARD: bind_rms_norm_backward,
    }
)
#: ATen's, by base name.
ATEN_TABLE: Mapping[str, TritonBinder] = MappingProxyType(
    {
        "_softmax": bind_softmax,
        "_softmax_backward_data": bind_softmax_backward,
        "index_add": bind_index_add,
        "native_layer_norm": bind_layer_norm,
        "native_layer_norm_backward": bind_layer_norm_backward,
        "sum": bind_sum,
    }
)


def bind_triton(operation: Operation, context: Context) -> list[Call] | None:
    """The launches of an operation's kernel, or ``None`` if it has none for these tensors."""
    binder = TABLE.get(operation.operator)
    if binder is None and operation.operator.startswith("aten."):
        binder = ATEN_TABLE.get(base_name(operation.operator))
    return None if binder is None else binder(operation, context)
