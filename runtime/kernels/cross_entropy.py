"""``arenaplan.cross_entropy_backward``: from log-probabilities to the gradient of the logits, in place."""

from __future__ import annotations

from functools import partial

import torch

from planner.graph import Operation
from runtime.errors import ArenaError
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context

_ATEN = torch.ops.aten
_NONE, _MEAN = 0, 1


def bind_cross_entropy_backward(operation: Operation, context: Context) -> list[Call]:
    """``∇logits[i, j] = (exp(logp[i, j]) − [j = target i]) · scale i``; 0 in rows whose target is ignored.

    ``scale`` is the incoming gradient, for the mean divided by the total weight. The output may be ``logp``. Operands:
    gradient (0-d, or one a row without reduction), ``logp`` (rows, classes), target (rows), total weight (0-d),
    reduction (0 none, 1 mean, 2 sum), and the target to ignore.
    """
    (output,) = context.outputs(operation)
    gradient, logarithms, target, total = (context.tensor(argument) for argument in operation.arguments[:4])
    reduction, ignored = operation.arguments[4:6]
    if not isinstance(ignored, int) or output.shape != logarithms.shape or target.shape != output.shape[:1]:
        raise ArenaError(f"operation {operation.name}: a loss of {tuple(output.shape)} does not fit its targets")
    if output.numel() == 0:
        return []
    scale, counted, place = (context.views[index] for index in operation.workspaces)
    calls: list[Call] = [partial(_ATEN.ne.Tensor_out, target, scalar(ignored, target.dtype, context), out=counted)]
    if reduction == _NONE:
        calls.append(partial(scale.copy_, gradient))
    elif reduction == _MEAN:
        calls.append(partial(_ATEN.div.out, gradient.expand(scale.shape), total, out=scale))
    else:
        calls.append(partial(scale.copy_, gradient.expand(scale.shape)))
    column = scale.unsqueeze(1)
    zero, first = scalar(0, scale.dtype, context), scalar(0, target.dtype, context)
    return [
        *calls,
        partial(_ATEN.where.self_out, counted, scale, zero, out=scale),
        partial(_ATEN.where.self_out, counted, target, first, out=place),
        partial(_ATEN.exp.out, logarithms, out=output),
        partial(_ATEN.mul.out, output, column, out=output),
        partial(_ATEN.neg.out, scale, out=scale),
        partial(output.scatter_add_, 1, place.unsqueeze(1), column),
    ]
