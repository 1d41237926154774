"""``index_add_``: rows added at given places; 16-bit rows are summed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner.graph import Operation
from runtime.kernels.aten import bind_aten
from runtime.kernels.binding import Call, Context
from runtime.kernels.compiled import array, compilable, compiled


def bind_index_add(operation: Operation, context: Context) -> list[Call]:
    """``self[index[i]] += source[i]`` along a dimension, in order of i; ``self`` may alias nothing."""
    target, source = (context.value(operation.arguments[position]) for position in (0, 3))
    axis, index = operation.arguments[1], context.value(operation.arguments[2])
    alpha = dict(operation.keywords).get("alpha", 1)
    if not operation.workspaces:
        loop = compiled("add_rows") if axis == 0 and alpha == 1 else None
        if loop is None or not _rows(target, source, index):
            return bind_aten(operation, context)
        arrays = [array(tensor) for tensor in (target, index, source) if isinstance(tensor, torch.Tensor)]
        return [partial(_checked, loop, operation, arrays)]
    wide, added = (context.views[scratch] for scratch in operation.workspaces)
    if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
        return bind_aten(operation, context)
    return [
        partial(wide.copy_, target),
        partial(added.copy_, source),
        partial(torch.ops.aten.index_add_.default, wide, axis, index, added, alpha=alpha),
        partial(target.copy_, wide),
    ]


def _rows(*tensors: object) -> bool:
    """Whether target and source are matrices a compiled loop can add, and the index one of their rows."""
    target, source, index = tensors
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    return (
        compilable(target, source)  # type: ignore[arg-type]
        and target.dim() == source.dim() == 2  # type: ignore[attr-defined]
        and index.dtype in (torch.int32, torch.int64)  # type: ignore[attr-defined]
    )


def _checked(loop: Callable[..., Any], operation: Operation, arrays: list[Any]) -> None:
    if not loop(*arrays):
        raise IndexError(f"{operation.name}: an index is out of range of the {len(arrays[0])} rows it names")
