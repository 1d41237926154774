"""``arenaplan.arange``: ``out[i] = start + i · step``."""

from __future__ import annotations

from functools import partial

import torch

from planner.graph import Operation
from runtime.errors import UnknownOperatorError
from runtime.kernels.binding import Call, Context


def bind_arange(operation: Operation, context: Context) -> list[Call]:
    """One value for each element of the one-dimensional output, computed in its dtype."""
    (output,) = context.outputs(operation)
    start, step = operation.arguments
    if not isinstance(start, (int, float)) or not isinstance(step, (int, float)):
        raise UnknownOperatorError(operation.operator, operation.name)
    if output.numel() == 0:
        return []
    # Half a step short of the next value, so that rounding cannot add an element.
    end = start + step * output.numel() if isinstance(start + step, int) else start + step * (output.numel() - 0.5)
    return [partial(torch.ops.aten.arange.start_out, start, end, step, out=output)]
