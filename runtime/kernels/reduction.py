"""``sum`` and ``mean``: accumulated as ATen does, in the dtype of the operand (float32 for 16-bit ones)."""

from __future__ import annotations

from functools import partial

import torch

from planner.graph import Operation
from planner.operators import base_name, parts, split_axis
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context


def bind_reduction(operation: Operation, context: Context) -> list[Call]:
    """``out = Σ source`` over the given dimensions, or all; ``mean`` divides once at the end.

    A large sum to one number is first done across one axis into the operation's workspace: ATen's own would do it in
    two passes through memory that it allocates. The output may alias nothing.
    """
    (output,) = context.outputs(operation)
    source = context.value(operation.arguments[0])
    if not isinstance(source, torch.Tensor) or output.numel() == 0:
        return []
    whole = operation.operator.split(".")[2] not in ("dim", "dim_IntList")
    dims = None if whole or len(operation.arguments) < 2 else context.value(operation.arguments[1])
    keep = bool(operation.arguments[2]) if not whole and len(operation.arguments) > 2 else False
    count = source.numel() / max(output.numel(), 1)
    calls: list[Call] = []
    if operation.workspaces:
        partial_sums = context.views[operation.workspaces[0]]
        axis = split_axis(tuple(source.shape))
        if axis is None:
            axis, source = 0, source.reshape(-1).view(parts(source.numel()), -1)
        others = [position for position in range(source.dim()) if position != axis]
        calls.append(partial(torch.ops.aten.sum.IntList_out, source, others, False, out=partial_sums))
        source, dims, output = partial_sums, [0], output.view(())
        keep = False
    calls.append(partial(torch.ops.aten.sum.IntList_out, source, dims, keep, out=output))
    if base_name(operation.operator) == "mean":
        calls.append(partial(torch.ops.aten.div.out, output, scalar(count, output.dtype, context), out=output))
    return calls
