"""LayerNorm and RMSNorm over the last dimension, forward and backward, in one pair of kernels.

LayerNorm: ``y = x̂ · w + b``, ``x̂ = (x − mean) · rstd``, ``rstd = (Σ(x − mean)²/D + eps)^−½``; RMSNorm: mean 0, no bias
(Ba, Kiros, Hinton: "Layer normalization", 2016; Zhang, Sennrich: "Root mean square layer normalization", 2019).
Backward: ``∇x = rstd (g − mean(g) − x̂ mean(g x̂))``, ``g = ∇y · w`` (RMSNorm: without mean(g)); ``∇w = Σ ∇y x̂``,
``∇b = Σ ∇y``. Statistics and sums in float32. ``y`` may be ``x``; ``∇x`` may be ``∇y`` or ``x``.

The sums over rows have one order: every program adds its rows into its own part of a workspace, then the parts are
added. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, Setting, as_rows, ceil_div, row_setting, row_settings
from runtime.kernels.triton.registry import Configuration, Kernel, configurations
from runtime.kernels.triton.sums import launch_sum_parts

#: Parts the rows are divided into at most: two for each multiprocessor of a large chip.
MOST_PARTS = 256


@triton.jit
def norm_kernel(x, weight, bias, out, mean, rstd, rows, width, eps, x_stride, out_stride, CENTRED: tl.constexpr,
                WEIGHT: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """ROWS rows, whole in one tile or in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    lane = tl.arange(0, BLOCK)
    centre = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    if WHOLE:
        inside = present[:, None] & (lane < width)[None, :]
        value = tl.load(x + row[:, None] * x_stride + lane[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            centre = tl.sum(value, axis=1) / width
            value = tl.where(inside, value - centre[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
        value = value * scale[:, None]
        if WEIGHT:
            value = value * tl.load(weight + lane, mask=lane < width, other=0.0).to(tl.float32)[None, :]
        if BIAS:
            value = value + tl.load(bias + lane, mask=lane < width, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * out_stride + lane[None, :], value.to(out.dtype.element_ty), mask=inside)
    else:
        if CENTRED:
            for start in range(0, width, BLOCK):
                column = start + lane
                inside = present[:, None] & (column < width)[None, :]
                value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
                centre += tl.sum(value.to(tl.float32), axis=1)
            centre = centre / width
        for start in range(0, width, BLOCK):
            column = start + lane
            inside = present[:, None] & (column < width)[None, :]
            value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, value - centre[:, None], 0.0)
            squares += tl.sum(value * value, axis=1)
        scale = 1.0 / tl.sqrt(squares / width + eps)
        for start in range(0, width, BLOCK):
            column = start + lane
            inside = present[:, None] & (column < width)[None, :]
            value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value = (value - centre[:, None]) * scale[:, None]
            if WEIGHT:
                value = value * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
            if BIAS:
                value = value + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
            tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)
    if CENTRED:
        tl.store(mean + row, centre.to(mean.dtype.element_ty), mask=present)
    tl.store(rstd + row, scale.to(rstd.dtype.element_ty), mask=present)


@triton.jit
def _terms(grad, x, weight, row, column, inside, width, grad_stride, x_stride, centre, scale, WEIGHT: tl.constexpr):
    """``(∇y, x̂, ∇y · w)`` of a tile in float32, zero outside."""
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    normal = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (normal - centre[:, None]) * scale[:, None], 0.0)
    g = dy
    if WEIGHT:
        g = dy * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return dy, normal, g


@triton.jit
def norm_backward_kernel(grad, x, weight, mean, rstd, out, parts, rows, width, rows_each, grad_stride, x_stride,
                         out_stride, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, SUMS: tl.constexpr,
                         WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``rows_each`` rows, ROWS at a time. SUMS: ``Σ ∇y x̂`` and ``Σ ∇y`` of them go to ``parts[program, 0 and 1]``."""
    part = tl.program_id(0).to(tl.int64)
    first = part * rows_each
    last = tl.minimum(first + rows_each, rows)
    lane = tl.arange(0, BLOCK)
    to_weight = parts + part * 2 * width
    to_bias = to_weight + width
    weights = tl.zeros((BLOCK,), tl.float32)
    biases = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, rows_each, ROWS):
        row = first + begin + tl.arange(0, ROWS)
        present = row < last
        scale = tl.load(rstd + row, mask=present, other=0.0).to(tl.float32)
        centre = tl.zeros((ROWS,), tl.float32)
        if CENTRED:
            centre = tl.load(mean + row, mask=present, other=0.0).to(tl.float32)
        if WHOLE:
            inside = present[:, None] & (lane < width)[None, :]
            dy, normal, g = _terms(grad, x, weight, row, lane, inside, width, grad_stride, x_stride, centre, scale,
                                   WEIGHT)  # fmt: skip
            turned = tl.sum(g * normal, axis=1) / width
            value = g - normal * turned[:, None]
            if CENTRED:
                value = value - (tl.sum(g, axis=1) / width)[:, None]
            value = value * scale[:, None]
            tl.store(out + row[:, None] * out_stride + lane[None, :], value.to(out.dtype.element_ty), mask=inside)
            weights += tl.sum(dy * normal, axis=0)
            biases += tl.sum(dy, axis=0)
        else:
            plain = tl.zeros((ROWS,), tl.float32)
            turned = tl.zeros((ROWS,), tl.float32)
            for start in range(0, width, BLOCK):
                column = start + lane
                inside = present[:, None] & (column < width)[None, :]
                dy, normal, g = _terms(grad, x, weight, row, column, inside, width, grad_stride, x_stride, centre,
                                       scale, WEIGHT)  # fmt: skip
                plain += tl.sum(g, axis=1)
                turned += tl.sum(g * normal, axis=1)
            plain = plain / width
            turned = turned / width
            for start in range(0, width, BLOCK):
                column = start + lane
                inside = present[:, None] & (column < width)[None, :]
                dy, normal, g = _terms(grad, x, weight, row, column, inside, width, grad_stride, x_stride, centre,
                                       scale, WEIGHT)  # fmt: skip
                value = g - normal * turned[:, None]
                if CENTRED:
                    value = value - plain[:, None]
                value = value * scale[:, None]
                tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty),
                         mask=inside)  # fmt: skip
                if SUMS:
                    # Only this program touches its part, one lane always the same column.
                    kept = (column < width) & (column < width * begin)
                    weights = tl.load(to_weight + column, mask=kept, other=0.0) + tl.sum(dy * normal, axis=0)
                    tl.store(to_weight + column, weights, mask=column < width)
                    if CENTRED:
                        biases = tl.load(to_bias + column, mask=kept, other=0.0) + tl.sum(dy, axis=0)
                        tl.store(to_bias + column, biases, mask=column < width)
    if SUMS and WHOLE:
        tl.store(to_weight + lane, weights, mask=lane < width)
        if CENTRED:
            tl.store(to_bias + lane, biases, mask=lane < width)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> Launch | None:
    """Bind the forward: LayerNorm with ``mean``, RMSNorm without.

    Args:
        x, out: ``(…, width)``.
        weight, bias: ``(width,)``, dense; a bias only with a weight and a mean.
        mean, rstd: one number a row, dense; float32 or the dtype of x.

    ``None`` if x is empty, its strides are no rows, or there is a bias without weight.
    """
    source, target = as_rows(x), as_rows(out)
    if source is None or target is None or x.numel() == 0 or (bias is not None and (weight is None or mean is None)):
        return None
    rows, width, stride = source
    chosen = row_setting(
        width, CENTRED=int(mean is not None), WEIGHT=int(weight is not None), BIAS=int(bias is not None)
    )
    tensors = (x, x if weight is None else weight, x if bias is None else bias, out, rstd if mean is None else mean)
    numbers = (rows, width, float(eps), stride, target[2])
    return Launch(norm_kernel, (ceil_div(rows, chosen.constants["ROWS"]),), (*tensors, rstd, *numbers), chosen)


def launch_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    out: torch.Tensor,
    *,
    grad_weight: torch.Tensor | None = None,
    grad_bias: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> list[Launch]:
    """Bind the backward: the gradient of x, and those of weight and bias where they are given a place.

    Args:
        grad, x, out: ``(…, width)``; ``out`` may be either of the others.
        weight, mean, rstd: as of the forward.
        grad_weight, grad_bias: ``(width,)``, dense.
        parts: float32 workspace, two rows of ``width`` or more, for the gradients of weight and bias; of more than
            ``MOST_PARTS`` pairs the rest is not used.

    An empty list if x is empty or strides are no rows.
    """
    sources = [as_rows(tensor) for tensor in (grad, x, out)]
    if any(source is None for source in sources) or x.numel() == 0:
        return []
    rows, width, _ = sources[0] or (0, 0, 0)
    sums = grad_weight is not None or grad_bias is not None
    if sums and (parts is None or parts.numel() < 2 * width):
        raise ValueError("the gradients of weight and bias need a workspace of at least two rows")
    chosen = row_setting(width, CENTRED=int(mean is not None), WEIGHT=int(weight is not None), SUMS=int(sums))
    step = chosen.constants["ROWS"]
    most = ceil_div(rows, step) if parts is None or not sums else min(parts.numel() // (2 * width), MOST_PARTS)
    each = ceil_div(ceil_div(rows, most), step) * step
    count = ceil_div(rows, each)
    tensors = (grad, x, x if weight is None else weight, rstd if mean is None else mean, rstd, out)
    strides = (0 if source is None else source[2] for source in sources)
    workspace = rstd if parts is None else parts
    launches = [
        Launch(norm_backward_kernel, (count,), (*tensors, workspace, rows, width, each, *strides), chosen),
    ]
    for place, target in enumerate((grad_weight, grad_bias)):
        if target is not None and parts is not None:
            flat = parts.view(-1)[place * width :]
            launches.append(launch_sum_parts(flat, target, count, width, 2 * width))
    return launches


_FORWARD = "x:*T weight:*T bias:*T out:*T mean:*{0} rstd:*{0} rows:i64 width:i32 eps:fp32 x_stride:i64 out_stride:i64"
_BACKWARD = (
    "grad:*T x:*T weight:*T mean:*{0} rstd:*{0} out:*T parts:*fp32 rows:i64 width:i32 rows_each:i32 grad_stride:i64 "
    "x_stride:i64 out_stride:i64"
)


#: Weights may stay in float32 beside 16-bit rows, as autocast leaves them.
def _with_fp32_weight(spec: str, settings: tuple[Setting, ...]) -> tuple[Configuration, ...]:
    spec = spec.format("fp32").replace("weight:*T", "weight:*fp32")
    return configurations(spec, settings, ("fp16", "bf16"), " fp32 weight")


KERNELS = (
    Kernel(
        "norm",
        norm_kernel,
        configurations(
            _FORWARD.format("fp32"),
            row_settings(("CENTRED", "WEIGHT", "BIAS"), ((1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 0))),
        )
        + _with_fp32_weight(_FORWARD, row_settings(("CENTRED", "WEIGHT", "BIAS"), ((0, 1, 0),))),
        spill_nbytes=16,
    ),
    Kernel(
        "norm_backward",
        norm_backward_kernel,
        configurations(
            _BACKWARD.format("fp32"),
            row_settings(("CENTRED", "WEIGHT", "SUMS"), ((1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 0))),
        )
        + _with_fp32_weight(_BACKWARD, row_settings(("CENTRED", "WEIGHT", "SUMS"), ((0, 1, 1),))),
    ),
)
