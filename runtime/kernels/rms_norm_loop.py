"""The loops of `rms_norm` over the rows of one thread, for numba; imported only with it.

Sums are formed in float64, products in the dtype of ``lines`` (float32, or float64). Every row is first brought into
``lines``, so that what is written may lie on what was read, and the loops run in vector lanes all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from runtime.kernels.compiled import REORDERED

_typed: Any = intrinsic
_FAST: Any = set(REORDERED)
_FLOAT, _HALF, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)


@_typed
def double(_context: Any, _word: Any) -> Any:
    """The float64 whose bits are a word."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@_typed
def _from_half(_context: Any, _bits: Any) -> Any:
    """The float32 of a float16 given as an int16."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALF), _FLOAT)

    return types.float32(types.int16), generate


@_typed
def _to_half(_context: Any, _value: Any) -> Any:
    """A float32 rounded to float16, as an int16."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _HALF), _I16)

    return types.int16(types.float32), generate


@_typed
def _from_brain(_context: Any, _bits: Any) -> Any:
    """The float32 of a bfloat16 given as a uint16."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        wide = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(types.uint16), generate


@_typed
def _to_brain(_context: Any, _value: Any) -> Any:
    """A float32 rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16))
        chosen = builder.select(
            builder.fcmp_unordered("uno", arguments[0], arguments[0]), ir.Constant(_I32, 0x7FC0), rounded
        )
        return builder.trunc(chosen, _I16)

    return types.uint16(types.float32), generate


def wide(value: Any) -> Any:
    """A stored number as one that is computed with."""


def narrow(like: Any, value: Any) -> Any:
    """A number rounded to how ``like`` is stored."""


@overload(wide, inline="always", strict=False)
def _wide(value: Any) -> Any:
    if value == types.int16:
        return lambda value: _from_half(value)  # noqa: PLW0108 - an intrinsic is no implementation by itself
    if value == types.uint16:
        return lambda value: _from_brain(value)  # noqa: PLW0108
    return lambda value: value


@overload(narrow, inline="always", strict=False)
def _narrow(like: Any, value: Any) -> Any:  # noqa: ARG001 - numba matches arguments by name
    if like == types.int16:
        return lambda like, value: _to_half(np.float32(value))  # noqa: ARG005
    if like == types.uint16:
        return lambda like, value: _to_brain(np.float32(value))  # noqa: ARG005
    if like == types.float32:
        return lambda like, value: np.float32(value)  # noqa: ARG005
    return lambda like, value: value  # noqa: ARG005


@njit(fastmath=_FAST, error_model="numpy")
def forward(me: Any, team: Any, x: Any, weight: Any, y: Any, rstd: Any, lines: Any, parts: int, eps: float,
            weighted: bool) -> None:  # fmt: skip
    """``rstd = (mean x² + eps)^−½``, ``y = x · rstd · weight``; parts of rows are dealt to the team in turn."""
    rows, width = x.shape
    each = (rows + parts - 1) // parts
    for part in range(me, parts, team):
        line = lines[part]
        for i in range(part * each, min((part + 1) * each, rows)):
            squares = 0.0
            for j in range(width):
                line[j] = wide(x[i, j])
            for j in range(width):
                squares += np.float64(line[j]) * np.float64(line[j])
            rstd[i] = 1.0 / np.sqrt(squares / width + eps)
            scale = rstd[i]
            if weighted:
                for j in range(width):
                    line[j] = line[j] * scale * wide(weight[j])
            else:
                for j in range(width):
                    line[j] = line[j] * scale
            for j in range(width):
                y[i, j] = narrow(y[i, j], line[j])


@njit(fastmath=_FAST, error_model="numpy")
def backward(me: Any, team: Any, dy: Any, x: Any, weight: Any, rstd: Any, dx: Any, sums: Any, lines: Any, others: Any,
             parts: int, weighted: bool, summed: bool) -> None:  # fmt: skip
    """``dx = rstd · (g − n · mean(g · n))``, ``g = dy · weight``, ``n = x · rstd``; ``sums[part] = Σ dy · n``."""
    rows, width = x.shape
    each = (rows + parts - 1) // parts
    for part in range(me, parts, team):
        n, g, total = lines[part], others[part], sums[part]
        for j in range(width):
            total[j] = 0.0
        for i in range(part * each, min((part + 1) * each, rows)):
            scale = rstd[i]
            for j in range(width):
                n[j] = wide(x[i, j]) * scale
            for j in range(width):
                g[j] = wide(dy[i, j])
            if summed:
                for j in range(width):
                    total[j] += np.float64(g[j]) * np.float64(n[j])
            if weighted:
                for j in range(width):
                    g[j] = g[j] * wide(weight[j])
            turned = 0.0
            for j in range(width):
                turned += np.float64(g[j]) * np.float64(n[j])
            mean = n.dtype.type(turned / width)
            for j in range(width):
                g[j] = (g[j] - n[j] * mean) * scale
            for j in range(width):
                dx[i, j] = narrow(dx[i, j], g[j])
