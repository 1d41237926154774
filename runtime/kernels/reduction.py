"""``sum``, ``mean``, ``amax``, ``amin`` and vector norms, accumulated as ATen does: 16-bit operands in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner.graph import Operation
from planner.operators import base_name, parts, split_axis
from runtime.kernels.aten import bind_aten, scalar
from runtime.kernels.binding import Call, Context

_ATEN = torch.ops.aten

#: How each reduces over dimensions into a given tensor.
_OVER: dict[str, Callable[..., Any]] = {
    "sum": _ATEN.sum.IntList_out,
    "mean": _ATEN.sum.IntList_out,
    "amax": _ATEN.amax.out,
    "amin": _ATEN.amin.out,
}


def bind_reduction(operation: Operation, context: Context) -> list[Call]:
    """``out = Σ source``, or its largest or smallest, over the given dimensions, or all; ``mean`` divides at the end.

    A large reduction to one number is first done across one axis into the operation's workspace: ATen's own would do
    it in two passes through memory that it allocates. The output may alias nothing.
    """
    (output,) = context.outputs(operation)
    name = base_name(operation.operator)
    source = context.value(operation.arguments[0])
    if not isinstance(source, torch.Tensor) or output.numel() == 0:
        return []
    over = _OVER[name]
    summed = name in ("sum", "mean")
    whole = summed and operation.operator.split(".")[2] not in ("dim", "dim_IntList")
    dims = None if whole or len(operation.arguments) < 2 else context.value(operation.arguments[1])
    keep = bool(operation.arguments[2]) if not whole and len(operation.arguments) > 2 else False
    count = source.numel() / max(output.numel(), 1)
    calls: list[Call] = []
    if operation.workspaces:
        first = context.views[operation.workspaces[0]]
        source, others = _across(source)
        calls.append(partial(over, source, others, False, out=first))
        source, dims, output, keep = first, [0], output.view(()), False
    calls.append(partial(over, source, dims if summed or dims else [], keep, out=output))
    if name == "mean":
        calls.append(partial(_ATEN.div.out, output, scalar(count, output.dtype, context), out=output))
    return calls


def bind_norm(operation: Operation, context: Context) -> list[Call]:
    """The vector norm; a large one to one number is the norm of the norms across one axis, in the workspace."""
    source = context.value(operation.arguments[0])
    if not operation.workspaces or not isinstance(source, torch.Tensor):
        return bind_aten(operation, context)
    (output,) = context.outputs(operation)
    first = context.views[operation.workspaces[0]]
    order = operation.arguments[1] if len(operation.arguments) > 1 else 2
    source, others = _across(source)
    return [
        partial(_ATEN.linalg_vector_norm.out, source, order, others, False, out=first),
        partial(_ATEN.linalg_vector_norm.out, first, order, [0], False, out=output.view(())),
    ]


def _across(source: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The operand and the dimensions to reduce first; one with a single dimension is cut into equal parts."""
    axis = split_axis(tuple(source.shape))
    if axis is None:
        return source.reshape(-1).view(parts(source.numel()), -1), [1]
    return source, [position for position in range(source.dim()) if position != axis]
