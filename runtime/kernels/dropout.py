"""``arenaplan.dropout`` on a CPU: ``x · scale`` where kept, else 0, the mask made anew from a seed and counters.

The mask is that of the Triton kernel (`runtime.kernels.triton.philox`): the same seed drops the same elements on every
device. The result may be written onto x.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from planner.graph import Operation
from runtime.errors import ArenaError
from runtime.kernels.aten import scalar
from runtime.kernels.attention_tiles import Dropout
from runtime.kernels.binding import Call, Context
from runtime.kernels.compiled import array

_ATEN = torch.ops.aten


def checked_dropout(
    operation: Operation, context: Context
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float]:
    """``(x, out, seed, p, scale)``; raises `ArenaError` unless they fit each other."""
    (out,) = context.outputs(operation)
    x, seed = (context.tensor(argument) for argument in operation.arguments[:2])
    p, scale = operation.arguments[2:4]
    fits = x.shape == out.shape and x.dtype == out.dtype and x.is_contiguous() and out.is_contiguous()
    if not fits or not x.is_floating_point() or seed.dtype != torch.int64 or seed.numel() != 1:
        raise ArenaError(f"operation {operation.name}: dropout works on dense floats of one shape, and one int64 seed")
    if not isinstance(p, float) or not isinstance(scale, float) or not 0 <= p < 1:
        raise ArenaError(f"operation {operation.name}: a probability of {p!r} and a scale of {scale!r} are no dropout")
    return x, out, seed, p, scale


def bind_dropout(operation: Operation, context: Context) -> list[Call]:
    """Chunks of rows: their mask into the workspace, then the product, then zeros."""
    x, out, seed, p, scale = checked_dropout(operation, context)
    if out.numel() == 0:
        return []
    width = x.shape[-1] if x.dim() else 1
    source, target = x.view(-1, width), out.view(-1, width)
    dropped, words = (context.views[index] for index in operation.workspaces)
    factor, zero = (scalar(value, out.dtype, context) for value in (scale, 0))
    chosen = Dropout.of(p, seed)
    loop = _loop()
    calls: list[Call] = []
    step = dropped.shape[0]
    for first in range(0, len(source), step):
        part = slice(first, min(first + step, len(source)))
        flags = dropped[: part.stop - part.start]
        calls += [
            partial(_fill, loop, chosen, array(flags.view(torch.uint8)), array(words), first),
            partial(_ATEN.mul.out, source[part], factor, out=target[part]),
            partial(_ATEN.where.self_out, flags, zero, target[part], out=target[part]),
        ]
    return calls


def _fill(loop: Callable[..., Any], chosen: Dropout, flags: Any, words: Any, first: int) -> None:
    low, high = chosen.halves()
    loop(flags, words, low, high, first, chosen.threshold)


def _loop() -> Callable[..., Any]:
    from runtime.kernels.dropout_loop import drop_rows

    loop: Callable[..., Any] = drop_rows
    return loop
