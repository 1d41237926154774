"""``index_add_``: rows added at given places; 16-bit rows are summed in float32 and rounded once."""

from __future__ import annotations

from functools import partial

import torch

from planner.graph import Operation
from runtime.kernels.aten import bind_aten
from runtime.kernels.binding import Call, Context


def bind_index_add(operation: Operation, context: Context) -> list[Call]:
    """``self[index[i]] += source[i]`` along a dimension, in order of i; ``self`` may alias nothing."""
    if not operation.workspaces:
        return bind_aten(operation, context)
    target, source = (context.value(operation.arguments[position]) for position in (0, 3))
    axis, index = operation.arguments[1], context.value(operation.arguments[2])
    alpha = dict(operation.keywords).get("alpha", 1)
    wide, added = (context.views[scratch] for scratch in operation.workspaces)
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
        return bind_aten(operation, context)
    return [
        partial(wide.copy_, target),
        partial(added.copy_, source),
        partial(torch.ops.aten.index_add_.default, wide, axis, index, added, alpha=alpha),
        partial(target.copy_, wide),
    ]
