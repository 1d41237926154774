"""``arenaplan.copy`` (with broadcast and cast) and ``arenaplan.fill``."""

from __future__ import annotations

from functools import partial

from planner.graph import Operation
from runtime.kernels.binding import Call, Context


def bind_copy(operation: Operation, context: Context) -> list[Call]:
    """``out[i] = source[i]``; source and output may differ in strides and dtype, and must not overlap."""
    (output,) = context.outputs(operation)
    source = context.tensor(operation.arguments[0])
    return [partial(output.copy_, source)] if output.numel() else []


def bind_fill(operation: Operation, context: Context) -> list[Call]:
    """``out[i] = value``."""
    (output,) = context.outputs(operation)
    return [partial(output.fill_, operation.arguments[0])] if output.numel() else []
