"""Cross-entropy of logits and class indices, its backward in place on the logits.

Forward: ``loss[i] = log Σⱼ e^x[i,j] − x[i, t[i]]``, and the logarithm kept for the backward; rows whose target is
``ignore_index`` give 0. The rows' losses are then added in one order and, for a mean, divided by the rows counted.
The backward takes logits with that logarithm, or log-probabilities, as the planner's own operator keeps them.
Backward: ``∇x[i, j] = (e^(x[i,j] − lse[i]) − [j = t[i]]) · ∇loss``, onto x. In float32. A target outside the classes
gives NaN, and no memory outside the logits is touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import LONGEST_ROW, Launch, Setting, as_rows, row_tile
from runtime.kernels.triton.registry import Kernel, configurations

#: Rows whose losses are read at a time by the one program that adds them.
SUM_BLOCK = 1024
#: How rows are reduced; PyTorch's numbers.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_BLOCKS = (1024, LONGEST_ROW)


@triton.jit
def cross_entropy_kernel(x, targets, losses, lse, width, x_stride, ignored, BLOCK: tl.constexpr):
    """One row, read in chunks of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    line = x + row * x_stride
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    picked = tl.zeros((1,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(line + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(value, axis=0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - level) + tl.sum(tl.exp(value - level), axis=0)
        picked += tl.sum(tl.where(column == target, value, 0.0), axis=0)
        peak = higher
    level = tl.where(peak == float("-inf"), 0.0, peak)
    logarithm = level + tl.log(total)
    loss = logarithm - picked
    loss = tl.where((target < 0) | (target >= width), float("nan"), loss)
    loss = tl.where(target == ignored, 0.0, loss)
    place = row + tl.arange(0, 1)
    tl.store(lse + place, logarithm)
    tl.store(losses + place, loss)


@triton.jit
def cross_entropy_sum_kernel(losses, targets, out, counted, rows, ignored, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the sum of the rows' losses, or their mean over rows not ignored; ``counted`` gets that number."""
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        total += tl.load(losses + row, mask=row < rows, other=0.0)
        target = tl.load(targets + row, mask=row < rows, other=0)
        count += tl.where((row < rows) & (target != ignored), 1.0, 0.0)
    result = tl.sum(total, axis=0)
    number = tl.sum(count, axis=0)
    if MEAN:
        result = result / number
    tl.store(out, result.to(out.dtype.element_ty))
    tl.store(counted, number.to(counted.dtype.element_ty))


@triton.jit
def cross_entropy_backward_kernel(x, targets, lse, grad, counted, out, width, x_stride, out_stride, ignored,
                                  LOGITS: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row by BLOCK columns; ``grad`` points to one number, or without reduction to one a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    place = row if REDUCTION == 0 else row * 0
    scale = tl.load(grad + place).to(tl.float32)
    if REDUCTION == 1:
        scale = scale / tl.load(counted).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
    if LOGITS:
        value = value - tl.load(lse + row)
    share = tl.exp(value)
    share = tl.where(column == target, share - 1.0, share) * scale
    share = tl.where((target < 0) | (target >= width), float("nan"), share)
    share = tl.where(target == ignored, 0.0, share)
    tl.store(out + row * out_stride + column, share.to(out.dtype.element_ty), mask=column < width)


def _setting(width: int) -> Setting:
    tile = row_tile(_BLOCKS[0] if width <= _BLOCKS[0] else _BLOCKS[1])
    return Setting({"BLOCK": tile.block}, tile.num_warps)


def _backward_setting(logits: int, reduction: int) -> Setting:
    return Setting({"LOGITS": logits, "REDUCTION": reduction, "BLOCK": _BLOCKS[0]}, 4)


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    counted: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> list[Launch]:
    """Bind the loss of ``logits`` (rows, classes) and int64 ``targets`` (rows).

    Args:
        losses, lse: float32, one number a row; ``lse`` is kept for the backward.
        out, counted: one number each: the loss, and the rows that were not ignored.
        reduction: ``"mean"`` or ``"sum"``.

    An empty list if there are no classes or strides are no rows.
    """
    source = as_rows(logits)
    if source is None or logits.dim() != 2 or not logits.shape[1]:
        return []
    rows, width, stride = logits.shape[0], logits.shape[1], source[2]
    chosen = _setting(width)
    total = Setting({"MEAN": int(reduction == "mean"), "BLOCK": SUM_BLOCK}, 4)
    first = Launch(cross_entropy_kernel, (rows,), (logits, targets, losses, lse, width, stride, ignore_index), chosen)
    second = Launch(cross_entropy_sum_kernel, (1,), (losses, targets, out, counted, rows, ignore_index), total)
    return [first, second] if rows else [second]


def launch_backward(
    x: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor | None,
    grad: torch.Tensor,
    counted: torch.Tensor,
    out: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Launch | None:
    """Bind the gradient of the logits from ``grad``, the gradient of the loss; ``out`` may be ``x``.

    Args:
        x: logits (rows, classes) with ``lse`` of the forward, or log-probabilities without.
        grad: one number, or one a row for the reduction ``"none"``.
        counted: what a mean divides by, one number.

    ``None`` if x is empty or strides are no rows.
    """
    source, target = as_rows(x), as_rows(out)
    if source is None or target is None or x.numel() == 0:
        return None
    rows, width, stride = source
    chosen = _backward_setting(int(lse is not None), REDUCTIONS[reduction])
    grid = (rows, -(-width // chosen.constants["BLOCK"]))
    tensors = (x, targets, grad if lse is None else lse, grad, counted, out)
    return Launch(cross_entropy_backward_kernel, grid, (*tensors, width, stride, target[2], ignore_index), chosen)


KERNELS = (
    Kernel(
        "cross_entropy",
        cross_entropy_kernel,
        configurations(
            "x:*T targets:*i64 losses:*fp32 lse:*fp32 width:i32 x_stride:i64 ignored:i64",
            tuple(_setting(width) for width in _BLOCKS),
        ),
    ),
    Kernel(
        "cross_entropy_sum",
        cross_entropy_sum_kernel,
        configurations(
            "losses:*fp32 targets:*i64 out:*T counted:*T rows:i32 ignored:i64",
            tuple(Setting({"MEAN": mean, "BLOCK": SUM_BLOCK}, 4) for mean in (0, 1)),
        ),
    ),
    Kernel(
        "cross_entropy_backward",
        cross_entropy_backward_kernel,
        configurations(
            "x:*T targets:*i64 lse:*fp32 grad:*T counted:*T out:*T width:i32 x_stride:i64 out_stride:i64 ignored:i64",
            tuple(_backward_setting(logits, reduction) for logits in (0, 1) for reduction in REDUCTIONS.values()),
        ),
    ),
)
