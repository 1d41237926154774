"""Batched products over two batch strides: ``out[i, j] = act(A[i, j] · B[i, j] + bias)``, no head split ever copied.

Every operand has its own strides for both batch dimensions, rows and columns, so that (B, L, N, d) heads are read and
written where they lie. 16-bit operands go to the matrix units, float32 ones are multiplied in float32 (no TF32);
accumulation is in float32, bias and GELU are applied there, and the result is rounded once. ``out`` aliases nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.gelu import gelu
from runtime.kernels.triton.launch import INTERPRETED, Launch, Setting, ceil_div
from runtime.kernels.triton.registry import Configuration, Kernel, configurations

#: Activations of the epilogue.
ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def matmul_kernel(
    a,
    b,
    out,
    bias,
    before,
    rows,
    columns,
    depth,
    batch,
    a_outer,
    a_batch,
    a_row,
    a_depth,
    b_outer,
    b_batch,
    b_depth,
    b_column,
    out_outer,
    out_batch,
    out_row,
    out_column,
    bias_outer,
    bias_batch,
    bias_row,
    bias_column,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BEFORE: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of ROWS by COLUMNS of one matrix; ``before`` gets the value before the activation."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    matrix = program // (row_tiles * column_tiles)
    tile = program % (row_tiles * column_tiles)
    outer = matrix // batch
    inner = matrix % batch
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH).to(tl.int64)
    a_place = a + outer * a_outer + inner * a_batch + row[:, None] * a_row + k[None, :] * a_depth
    b_place = b + outer * b_outer + inner * b_batch + k[:, None] * b_depth + column[None, :] * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        left = tl.load(a_place, mask=(row < rows)[:, None] & (start + k < depth)[None, :], other=0.0)
        right = tl.load(b_place, mask=(start + k < depth)[:, None] & (column < columns)[None, :], other=0.0)
        if CAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        a_place += DEPTH * a_depth
        b_place += DEPTH * b_depth
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if BIAS:
        place = bias + outer * bias_outer + inner * bias_batch + row[:, None] * bias_row
        total += tl.load(place + column[None, :] * bias_column, mask=inside, other=0.0).to(tl.float32)
    offset = outer * out_outer + inner * out_batch + row[:, None] * out_row + column[None, :] * out_column
    if BEFORE:
        # What the backward will read is what the activation is applied to: the rounded value.
        rounded = total.to(out.dtype.element_ty)
        tl.store(before + offset, rounded, mask=inside)
        total = rounded.to(tl.float32)
    total = gelu(total, ACTIVATION)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


#: Rows, columns, depth, warps and stages of the tiles, smallest first.
_TILES_HALF = ((64, 64, 32, 4, 3), (128, 128, 32, 8, 3))
_TILES_FLOAT = ((32, 32, 32, 4, 2), (64, 64, 16, 8, 2))
_PLAIN, _BIASED, _GELU, _GELU_TANH = (0, 0, 0), (1, 0, 0), (1, 1, 1), (1, 2, 1)


def _setting(tile: tuple[int, ...], bias: int, activation: int, before: int, cast: int = 0) -> Setting:
    rows, columns, depth, warps, stages = tile
    constants = {"BIAS": bias, "ACTIVATION": activation, "BEFORE": before, "CAST": cast}
    return Setting({**constants, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, warps, stages)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    before: torch.Tensor | None = None,
) -> Launch | None:
    """Bind ``out = act(a @ b + bias)`` over at most two batch dimensions.

    Args:
        a, b, out: ``(…, rows, depth)``, ``(…, depth, columns)`` and ``(…, rows, columns)``, of any strides.
        bias: broadcast to ``out``.
        activation: ``"none"``, or with a bias and ``before`` ``"gelu"`` or ``"gelu_tanh"``.
        before: gets the value before the activation; strides as ``out``.

    ``None`` if there is nothing to write, the dtypes differ or are not of 16 or 32 bits, or there are more batch
    dimensions.
    """
    same = a.dtype == b.dtype == out.dtype and out.dtype in (torch.float16, torch.bfloat16, torch.float32)
    if not same or out.numel() == 0 or not 2 <= out.dim() <= 4:
        return None
    if (activation != "none") != (before is not None) or (before is not None and bias is None):
        raise ValueError("an activation comes with a bias and a place for the value before it, or not at all")
    if before is not None and before.stride() != out.stride():
        raise ValueError("the value before the activation must be laid out as the result")
    rows, columns = out.shape[-2:]
    lead = out.shape[:-2]
    full = [tensor.expand(*lead, *tensor.shape[-2:]) for tensor in (a, b)] + [out]
    full.append(out if bias is None else bias.expand(out.shape))
    strides = [stride for tensor in full for stride in ((0,) * (4 - tensor.dim()) + tensor.stride())]
    tiles = _TILES_FLOAT if out.dtype == torch.float32 else _TILES_HALF
    tile = tiles[-1] if rows >= tiles[-1][0] and columns >= tiles[-1][1] else tiles[0]
    cast = int(INTERPRETED and out.dtype == torch.bfloat16)
    chosen = _setting(tile, int(bias is not None), ACTIVATIONS[activation], int(before is not None), cast)
    count = ceil_div(rows, tile[0]) * ceil_div(columns, tile[1]) * lead.numel()
    tensors = (a, b, out, out if bias is None else bias, out if before is None else before)
    batch = lead[-1] if lead else 1
    return Launch(matmul_kernel, (count,), (*tensors, rows, columns, a.shape[-1], batch, *strides), chosen)


_SIGNATURE = (
    "a:*T b:*T out:*T bias:*T before:*T rows:i32%16 columns:i32%16 depth:i32%16 batch:i32 a_outer:i64%16 "
    "a_batch:i64%16 a_row:i64%16 a_depth:i64%16 b_outer:i64%16 b_batch:i64%16 b_depth:i64%16 b_column:i64%16 "
    "out_outer:i64%16 out_batch:i64%16 out_row:i64%16 out_column:=1 bias_outer:i64 bias_batch:i64 bias_row:i64 "
    "bias_column:=1"
)
#: The products that models make, A·B, A·Bᵀ and Aᵀ·B: the dense dimension of either operand, and the epilogues.
_LAYOUTS = {
    "A·B": (("a_depth", "b_column"), (_PLAIN, _BIASED)),
    "Aᵀ·B": (("a_row", "b_column"), (_PLAIN,)),
    "A·Bᵀ": (("a_depth", "b_depth"), (_PLAIN, _BIASED, _GELU, _GELU_TANH)),
}


def _configurations() -> Iterator[Configuration]:
    for layout, (dense, epilogues) in _LAYOUTS.items():
        spec = _SIGNATURE
        for name in dense:
            spec = spec.replace(f"{name}:i64%16", f"{name}:=1")
        for tiles, dtypes in ((_TILES_HALF, ("fp16", "bf16")), (_TILES_FLOAT, ("fp32",))):
            settings = tuple(_setting(tile, *epilogue) for epilogue in epilogues for tile in tiles)
            yield from configurations(spec, settings, dtypes, f" {layout}")


KERNELS = (Kernel("matmul", matmul_kernel, tuple(_configurations()), matrix=True, spill_nbytes=32),)
