"""Dropout forward and backward: ``out = x · keep / (1 − p)``, the mask from a seed and a counter.

The backward is the forward on the gradient: the same seed and offset give the same mask, and nothing is stored.
Computed in float32, rounded once. ``out`` may be ``x``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, Setting, as_rows, ceil_div, row_tile, row_tiles
from runtime.kernels.triton.philox import counters_per_row, keep_words, threshold
from runtime.kernels.triton.registry import Kernel, configurations

#: Columns of the widest tile: the generator takes registers besides.
LONGEST = 1024


@triton.jit(do_not_specialize=["least", "offset"])
def dropout_kernel(
    x,
    out,
    seeds,
    offset,
    least,
    scale,
    rows,
    width,
    x_stride,
    out_stride,
    per_row,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of ROWS rows by BLOCK columns; ``seeds`` points to one int64."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column4 = tl.program_id(1).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    words = keep_words(tl.load(seeds), offset, row, column4, per_row, ROWS, BLOCK)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.where(words >= least, value * scale, 0.0)
    tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)


def setting(width: int) -> Setting:
    """The static choice for rows of ``width``."""
    return row_tile(width, LONGEST).setting()


def launch(
    x: torch.Tensor, out: torch.Tensor, seed: torch.Tensor, p: float, offset: int = 0, scale: float | None = None
) -> Launch | None:
    """Bind dropout of ``x`` (…, width) with probability ``0 ≤ p < 1``; ``seed`` is one int64 on the same device.

    What is kept is multiplied with ``scale``, 1 / (1 − p) unless given.

    ``None`` if there is nothing to do or the strides of ``x`` or ``out`` are no rows.
    """
    source, target = as_rows(x), as_rows(out)
    if source is None or target is None or x.numel() == 0:
        return None
    rows, width, stride = source
    chosen = setting(width)
    grid = (ceil_div(rows, chosen.constants["ROWS"]), ceil_div(width, chosen.constants["BLOCK"]))
    factor = 1.0 / (1.0 - p) if scale is None else scale
    numbers = (offset, threshold(p), factor, rows, width, stride, target[2], counters_per_row(width))
    return Launch(dropout_kernel, grid, (x, out, seed, *numbers), chosen)


KERNELS = (
    Kernel(
        "dropout",
        dropout_kernel,
        configurations(
            "x:*T out:*T seeds:*i64 offset:i64 least:i32 scale:fp32 rows:i64 width:i32 x_stride:i64 out_stride:i64 "
            "per_row:i32",
            (tile.setting() for tile in row_tiles(LONGEST)),
        ),
    ),
)
