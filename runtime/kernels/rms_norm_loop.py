"""The loops of `rms_norm` over the rows of one thread, for numba; imported only with it.

Sums are formed in float64, products in the dtype of ``lines`` (float32, or float64). Every row is first brought into
``lines``, so that what is written may lie on what was read, and the loops run in vector lanes all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from runtime.kernels.compiled import REORDERED
from runtime.kernels.half_bits import narrow, wide

_typed: Any = intrinsic
_FAST: Any = set(REORDERED)


@_typed
def double(_context: Any, _word: Any) -> Any:
    """The float64 whose bits are a word."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


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
