"""Softmax over the last dimension, forward and backward, the backward fused with dropout's and with the scale.

Forward: ``P = softmax(scale · x)``, columns that the mask or causality excludes left out. Backward, onto the incoming
gradient G or onto P: ``∇P = G · keep / (1 − p)``, ``out = scale · P · (∇P − Σ P ∇P)``. All in float32, rounded once.

``safe``: a row with no column left gives zeros, and a column of probability zero contributes nothing to the backward,
whatever lies in G there (NaN from a masked key). Otherwise both give what PyTorch's softmax gives, NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, as_rows, ceil_div, common_stride, row_setting, row_settings
from runtime.kernels.triton.philox import counters_per_row, keep_words, threshold
from runtime.kernels.triton.registry import Kernel, configurations

#: How a backward knows which elements dropout zeroed.
DROP_NONE, DROP_COUNTER, DROP_STORED = 0, 1, 2


@triton.jit
def _scores(x, mask, row, column, width, x_stride, scale, outer, inner, outer_stride, inner_stride, length,
            MASK: tl.constexpr, CAUSAL: tl.constexpr, rows):  # fmt: skip
    """``scale · x`` of a tile in float32, −∞ at columns that are outside or excluded, whatever lies there."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    if CAUSAL:
        inside = inside & (column[None, :] <= (row % length + (width - length))[:, None])
    if MASK:
        place = (row // outer) * outer_stride + (row % inner) * inner_stride
        excluded = tl.load(mask + place[:, None] + column[None, :], mask=inside, other=1)
        inside = inside & (excluded == 0)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, value * scale, float("-inf"))


@triton.jit(do_not_specialize=["length", "outer", "inner"])
def softmax_kernel(
    x,
    out,
    mask,
    rows,
    width,
    x_stride,
    out_stride,
    scale,
    outer,
    inner,
    outer_stride,
    inner_stride,
    length,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SAFE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows, held whole in one tile (WHOLE) or read twice in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        value = _scores(x, mask, row, lane, width, x_stride, scale, outer, inner, outer_stride, inner_stride, length,
                        MASK, CAUSAL, rows)  # fmt: skip
        peak = tl.max(value, axis=1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        power = tl.exp(value - peak[:, None])
        total = tl.sum(power, axis=1)
        if SAFE:
            total = tl.where(total == 0.0, 1.0, total)
        tl.store(
            out + row[:, None] * out_stride + lane[None, :],
            (power / total[:, None]).to(out.dtype.element_ty),
            mask=present & (lane < width)[None, :],
        )
    else:
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, BLOCK):
            value = _scores(x, mask, row, start + lane, width, x_stride, scale, outer, inner, outer_stride,
                            inner_stride, length, MASK, CAUSAL, rows)  # fmt: skip
            higher = tl.maximum(peak, tl.max(value, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(peak - level) + tl.sum(tl.exp(value - level[:, None]), axis=1)
            peak = higher
        level = tl.where(peak == float("-inf"), 0.0, peak)
        if SAFE:
            total = tl.where(total == 0.0, 1.0, total)
        for start in range(0, width, BLOCK):
            column = start + lane
            value = _scores(x, mask, row, column, width, x_stride, scale, outer, inner, outer_stride, inner_stride,
                            length, MASK, CAUSAL, rows)  # fmt: skip
            tl.store(
                out + row[:, None] * out_stride + column[None, :],
                (tl.exp(value - level[:, None]) / total[:, None]).to(out.dtype.element_ty),
                mask=present & (column < width)[None, :],
            )


@triton.jit
def _gradients(grad, probs, dropped, seeds, offset, least, keep_scale, row, start, rows, width, grad_stride,
               probs_stride, dropped_stride, per_row, DROP: tl.constexpr, SAFE: tl.constexpr, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """``(P, ∇P)`` of a tile in float32, zero outside."""
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    p = tl.load(probs + row[:, None] * probs_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if DROP == 1:
        column4 = start // 4 + tl.arange(0, BLOCK // 4)
        words = keep_words(tl.load(seeds), offset, row, column4, per_row, ROWS, BLOCK)
        g = tl.where(words >= least, g * keep_scale, 0.0)
    if DROP == 2:
        zeroed = tl.load(dropped + row[:, None] * dropped_stride + column[None, :], mask=inside, other=1)
        g = tl.where(zeroed == 0, g * keep_scale, 0.0)
    if SAFE:
        g = tl.where(p == 0.0, 0.0, g)
    return p, g


@triton.jit(do_not_specialize=["offset", "least"])
def softmax_backward_kernel(
    grad,
    probs,
    out,
    dropped,
    seeds,
    offset,
    least,
    keep_scale,
    scale,
    rows,
    width,
    grad_stride,
    probs_stride,
    out_stride,
    dropped_stride,
    per_row,
    DROP: tl.constexpr,
    SAFE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows; every element is read before ``out`` is written there, so ``out`` may be ``grad`` or ``probs``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        p, g = _gradients(grad, probs, dropped, seeds, offset, least, keep_scale, row, 0, rows, width, grad_stride,
                          probs_stride, dropped_stride, per_row, DROP, SAFE, ROWS, BLOCK)  # fmt: skip
        inner = tl.sum(p * g, axis=1)
        value = p * (g - inner[:, None]) * scale
        tl.store(
            out + row[:, None] * out_stride + lane[None, :],
            value.to(out.dtype.element_ty),
            mask=present & (lane < width)[None, :],
        )
    else:
        inner = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, BLOCK):
            p, g = _gradients(grad, probs, dropped, seeds, offset, least, keep_scale, row, start, rows, width,
                              grad_stride, probs_stride, dropped_stride, per_row, DROP, SAFE, ROWS, BLOCK)  # fmt: skip
            inner += tl.sum(p * g, axis=1)
        for start in range(0, width, BLOCK):
            p, g = _gradients(grad, probs, dropped, seeds, offset, least, keep_scale, row, start, rows, width,
                              grad_stride, probs_stride, dropped_stride, per_row, DROP, SAFE, ROWS, BLOCK)  # fmt: skip
            column = start + lane
            tl.store(
                out + row[:, None] * out_stride + column[None, :],
                (p * (g - inner[:, None]) * scale).to(out.dtype.element_ty),
                mask=present & (column < width)[None, :],
            )


@dataclass(frozen=True, slots=True)
class RowMask:
    """A boolean mask of excluded columns for rows flattened from (…, length, width).

    Row ``r`` reads the mask at ``(r // outer) · outer_stride + (r % inner) · inner_stride``, its columns dense.
    """

    tensor: torch.Tensor
    outer: int
    inner: int
    outer_stride: int
    inner_stride: int


def row_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> RowMask | None:
    """The mask broadcast to ``shape``, or ``None`` if it varies over more than one leading dimension in its own way."""
    if mask.dtype != torch.bool or len(shape) < 2:
        return None
    full = mask.expand(shape)
    *lead, inner_stride, last = full.stride()
    if shape[-1] > 1 and last != 1:
        return None
    inner = shape[-2]
    sizes = [(size, stride) for size, stride in zip(shape[:-2], lead, strict=True) if size != 1]
    repeated = inner
    while sizes and sizes[-1][1] == 0:
        repeated *= sizes.pop()[0]
    if not sizes:
        return RowMask(full, repeated, inner, 0, inner_stride)
    outer_stride = common_stride(sizes)
    return None if outer_stride is None else RowMask(full, repeated, inner, outer_stride, inner_stride)


def launch(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    safe: bool = True,
) -> Launch | None:
    """Bind ``out = softmax(scale · x)`` over the last dimension; ``out`` may be ``x``.

    Args:
        x, out: ``(…, width)``, rows of one stride.
        mask: boolean, broadcast to ``x``, true where a column is excluded.
        causal: exclude columns after the row, for ``x`` of ``(…, length, width)``; the last row sees every column.
            Not together with a mask.
        safe: see the module; with a mask or causality always.

    ``None`` if the tensors are empty or their strides or the mask are not of this form.
    """
    source, target = as_rows(x), as_rows(out)
    if source is None or target is None or x.numel() == 0 or (causal and (mask is not None or x.dim() < 2)):
        return None
    found = None if mask is None else row_mask(mask, tuple(x.shape))
    if mask is not None and found is None:
        return None
    rows, width, stride = source
    places = (1, 1, 0, 0) if found is None else (found.outer, found.inner, found.outer_stride, found.inner_stride)
    length = x.shape[-2] if causal else 1
    masked = found is not None
    chosen = row_setting(width, MASK=int(masked), CAUSAL=int(causal), SAFE=int(safe or causal or masked))
    tensors = (x, out, x if found is None else found.tensor)
    numbers = (rows, width, stride, target[2], float(scale), *places, length)
    return Launch(softmax_kernel, (ceil_div(rows, chosen.constants["ROWS"]),), (*tensors, *numbers), chosen)


def launch_backward(
    grad: torch.Tensor,
    probs: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
    offset: int = 0,
    dropped: torch.Tensor | None = None,
    keep_scale: float | None = None,
    safe: bool = True,
) -> Launch | None:
    """Bind the backward of ``dropout(softmax(scale · x))`` from the gradient of the dropped probabilities.

    Args:
        grad, probs, out: ``(…, width)``; ``out`` may be either of the others.
        scale: of the scores, multiplied onto the result.
        p, seed, offset: dropout by counter, as in `dropout.launch`.
        dropped: or a stored boolean mask of zeroed elements, of the same shape.
        keep_scale: what kept elements were multiplied with; 1 / (1 − p) unless given.
        safe: see the module; with dropout always.

    ``None`` if the tensors are empty or their strides not of this form.
    """
    sources = [as_rows(tensor) for tensor in (grad, probs, out)]
    mask = None if dropped is None else as_rows(dropped)
    if any(item is None for item in sources) or grad.numel() == 0 or (dropped is not None and mask is None):
        return None
    rows, width, _ = sources[0] or (0, 0, 0)
    strides = [0 if item is None else item[2] for item in (*sources, mask)]
    drop = DROP_STORED if dropped is not None else DROP_COUNTER if seed is not None else DROP_NONE
    kept = 1.0 / (1.0 - p) if keep_scale is None else keep_scale
    chosen = row_setting(width, DROP=drop, SAFE=int(safe or drop != DROP_NONE))
    tensors = (grad, probs, out, probs if dropped is None else dropped, probs if seed is None else seed)
    numbers = (offset, threshold(p), kept, float(scale), rows, width, *strides, counters_per_row(width))
    return Launch(softmax_backward_kernel, (ceil_div(rows, chosen.constants["ROWS"]),), (*tensors, *numbers), chosen)


KERNELS = (
    Kernel(
        "softmax",
        softmax_kernel,
        configurations(
            "x:*T out:*T mask:*i1 rows:i64 width:i32 x_stride:i64 out_stride:i64 scale:fp32 outer:i32 inner:i32 "
            "outer_stride:i64 inner_stride:i64 length:i32",
            row_settings(
                ("MASK", "CAUSAL", "SAFE"),
                ((0, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)),
            ),
        ),
    ),
    Kernel(
        "softmax_backward",
        softmax_backward_kernel,
        configurations(
            "grad:*T probs:*T out:*T dropped:*i1 seeds:*i64 offset:i64 least:i32 keep_scale:fp32 scale:fp32 rows:i64 "
            "width:i32 grad_stride:i64 probs_stride:i64 out_stride:i64 dropped_stride:i64 per_row:i32",
            row_settings(("DROP", "SAFE"), ((DROP_NONE, 0), (DROP_NONE, 1), (DROP_COUNTER, 1), (DROP_STORED, 1))),
        ),
        spill_nbytes=32,
    ),
)
