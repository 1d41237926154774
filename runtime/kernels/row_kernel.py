"""Loops over rows that ATen would need many passes, or memory of its own, for. Plain Python, so numba can compile it.

Sums are formed in float64. A row's result is complete in ``row`` before any of it is written, so results may lie on the
operands they are computed from.
"""

from __future__ import annotations

from typing import Any


def normalise_rows(x: Any, weight: Any, bias: Any, y: Any, mean: Any, rstd: Any, eps: float) -> None:
    """``y = (x − mean) · rstd · weight + bias`` by row; ``y`` may be ``x``."""
    rows, width = x.shape
    for i in range(rows):
        total = 0.0
        for j in range(width):
            total += x[i, j]
        m = total / width
        squares = 0.0
        for j in range(width):
            d = x[i, j] - m
            squares += d * d
        r = 1.0 / (squares / width + eps) ** 0.5
        mean[i] = m
        rstd[i] = r
        narrow_m, narrow_r = mean[i], rstd[i]
        for j in range(width):
            y[i, j] = (x[i, j] - narrow_m) * narrow_r * weight[j] + bias[j]


def normalise_rows_backward(
    dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, dx: Any, sums: Any, row: Any, write: bool
) -> None:
    """``dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))``, ``g = dy · weight``; ``sums`` gets ``Σ dy · x̂`` and ``Σ dy``.

    ``dx`` may be ``dy`` or ``x``; it is left alone unless ``write``.
    """
    rows, width = x.shape
    for j in range(width):
        sums[0, j] = 0.0
        sums[1, j] = 0.0
    for i in range(rows):
        m, r = mean[i], rstd[i]
        for j in range(width):
            sums[0, j] += dy[i, j] * ((x[i, j] - m) * r)
        for j in range(width):
            sums[1, j] += dy[i, j]
        if not write:
            continue
        plain = 0.0
        turned = 0.0
        for j in range(width):
            g = dy[i, j] * weight[j]
            plain += g
            turned += g * ((x[i, j] - m) * r)
        row[0] = plain / width
        row[1] = turned / width
        a, b = row[0], row[1]
        for j in range(width):
            row[j] = r * (dy[i, j] * weight[j] - a - (x[i, j] - m) * r * b)
        for j in range(width):
            dx[i, j] = row[j]


def add_rows(target: Any, index: Any, source: Any) -> bool:
    """``target[index[i]] += source[i]`` in order of ``i``; false, and nothing more done, at an index out of range."""
    rows, width = source.shape
    for i in range(rows):
        k = index[i]
        if k < 0 or k >= target.shape[0]:
            return False
        for j in range(width):
            target[k, j] += source[i, j]
    return True


def fill_where(x: Any, mask: Any, value: Any, out: Any) -> None:
    """``out[i] = value where mask[i] else x[i]`` over flat arrays that do not overlap."""
    for i in range(x.shape[0]):
        out[i] = value[0] if mask[i] else x[i]


def fill_in_place(mask: Any, bits: Any, out: Any) -> None:
    """``out[i] = bits where mask[i]``, over flat arrays of integers: no branch, so that it runs in vector lanes.

    ``mask`` holds bytes of 0 or 1, ``bits`` one integer of the kind of ``out``.
    """
    one = bits[1]
    value = bits[0]
    for i in range(out.shape[0]):
        kept = mask[i] - one
        out[i] = (out[i] & kept) | (value & ~kept)


def fill_rows(mask: Any, value: Any, out: Any) -> None:
    """``out[i, :] = value where mask[i]``."""
    for i in range(out.shape[0]):
        if mask[i]:
            for j in range(out.shape[1]):
                out[i, j] = value[0]
