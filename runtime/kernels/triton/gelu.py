"""Bias and GELU: ``out = gelu(x + bias)``, and its backward with the gradient of the bias.

``gelu(u) = u · Φ(u)``; the approximation ``tanh`` is ``u/2 · (1 + tanh(√(2/π) (u + 0.044715 u³)))`` (Hendrycks, Gimpel:
"Gaussian error linear units", 2016). In float32, rounded once. ``out`` may be ``x``; the gradient of x may be written
onto the incoming one or onto x. The bias's gradient is summed in a fixed order: parts of rows into a workspace, then
the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, RowTile, Setting, as_rows, ceil_div
from runtime.kernels.triton.registry import Kernel, configurations
from runtime.kernels.triton.sums import launch_sum_parts

#: Rows and columns of a tile.
TILE = RowTile(4, 256)
APPROXIMATIONS = {"none": 1, "tanh": 2}


@triton.jit
def _tanh(u):
    """By the exponential: 1 − 2 / (e²ᵘ + 1), which saturates at ±1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)


@triton.jit
def gelu(u, KIND: tl.constexpr):
    """``u`` (KIND 0), its GELU (1), or the approximation by tanh (2); float32."""
    if KIND == 1:
        u = 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))
    if KIND == 2:
        u = 0.5 * u * (1.0 + _tanh(0.7978845608028654 * (u + 0.044715 * u * u * u)))
    return u


@triton.jit
def _slope(u, KIND: tl.constexpr):
    """The derivative of `gelu`."""
    if KIND == 1:
        density = 0.3989422804014327 * tl.exp(-0.5 * u * u)
        slope = 0.5 * (1.0 + tl.erf(u * 0.7071067811865476)) + u * density
    else:
        t = _tanh(0.7978845608028654 * (u + 0.044715 * u * u * u))
        slope = 0.5 * (1.0 + t) + 0.5 * u * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * u * u)
    return slope


@triton.jit
def bias_gelu_kernel(x, bias, out, rows, width, x_stride, out_stride, BIAS: tl.constexpr, KIND: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One tile of ROWS by BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    u = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        u += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], gelu(u, KIND).to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward_kernel(grad, x, bias, out, parts, rows, width, rows_each, grad_stride, x_stride, out_stride,
                              BIAS: tl.constexpr, KIND: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr,
                              BLOCK: tl.constexpr):  # fmt: skip
    """``rows_each`` rows by BLOCK columns; SUMS: their column sums go to row ``program`` of ``parts``, float32."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = part * rows_each
    last = tl.minimum(first + rows_each, rows)
    total = tl.zeros((BLOCK,), tl.float32)
    added = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        added = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    for start in range(0, rows_each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < width)[None, :]
        g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        g = g * _slope(u + added[None, :], KIND)
        tl.store(out + row[:, None] * out_stride + column[None, :], g.to(out.dtype.element_ty), mask=inside)
        total += tl.sum(g, axis=0)
    if SUMS:
        tl.store(parts + part * width + column, total, mask=column < width)


def launch(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, approximate: str = "none") -> Launch | None:
    """Bind ``out = gelu(x + bias)`` for x ``(…, width)`` and bias ``(width,)``, dense.

    ``None`` if x is empty or strides are no rows.
    """
    source, target = as_rows(x), as_rows(out)
    if source is None or target is None or x.numel() == 0:
        return None
    rows, width, stride = source
    chosen = TILE.setting(BIAS=int(bias is not None), KIND=APPROXIMATIONS[approximate])
    grid = (ceil_div(rows, TILE.rows), ceil_div(width, TILE.block))
    return Launch(bias_gelu_kernel, grid, (x, x if bias is None else bias, out, rows, width, stride, target[2]), chosen)


def launch_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    grad_bias: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    approximate: str = "none",
) -> list[Launch]:
    """Bind the backward: the gradient of ``x``, and with ``grad_bias`` that of the bias.

    Args:
        grad, x, out: ``(…, width)``; ``out`` may be either of the others.
        bias, grad_bias: ``(width,)``, dense.
        parts: float32 workspace of one or more rows of ``width``, needed with ``grad_bias``.

    An empty list if x is empty or strides are no rows.
    """
    sources = [as_rows(tensor) for tensor in (grad, x, out)]
    if any(source is None for source in sources) or x.numel() == 0:
        return []
    rows, width, _ = sources[0] or (0, 0, 0)
    strides = [0 if source is None else source[2] for source in sources]
    if grad_bias is not None and parts is None:
        raise ValueError("the gradient of the bias needs a workspace")
    most = ceil_div(rows, TILE.rows) if parts is None else parts.numel() // width
    each = ceil_div(ceil_div(rows, most), TILE.rows) * TILE.rows
    count = ceil_div(rows, each)
    chosen = TILE.setting(BIAS=int(bias is not None), KIND=APPROXIMATIONS[approximate], SUMS=int(grad_bias is not None))
    tensors = (grad, x, x if bias is None else bias, out, x if parts is None else parts)
    grid = (count, ceil_div(width, TILE.block))
    launches = [Launch(bias_gelu_backward_kernel, grid, (*tensors, rows, width, each, *strides), chosen)]
    if grad_bias is not None and parts is not None:
        launches.append(launch_sum_parts(parts, grad_bias, count, width))
    return launches


def _settings(**choices: tuple[int, ...]) -> tuple[Setting, ...]:
    from itertools import product

    return tuple(TILE.setting(**dict(zip(choices, values, strict=True))) for values in product(*choices.values()))


KERNELS = (
    Kernel(
        "bias_gelu",
        bias_gelu_kernel,
        configurations(
            "x:*T bias:*T out:*T rows:i64 width:i32 x_stride:i64 out_stride:i64", _settings(BIAS=(0, 1), KIND=(1, 2))
        ),
    ),
    Kernel(
        "bias_gelu_backward",
        bias_gelu_backward_kernel,
        configurations(
            "grad:*T x:*T bias:*T out:*T parts:*fp32 rows:i64 width:i32 rows_each:i32 grad_stride:i64 x_stride:i64 "
            "out_stride:i64",
            _settings(BIAS=(0, 1), KIND=(1, 2), SUMS=(0, 1)),
        ),
    ),
)
