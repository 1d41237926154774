"""SwiGLU: ``out = silu(a) · b`` with ``silu(a) = a / (1 + e⁻ᵃ)`` (Shazeer: "GLU variants improve transformer", 2020).

Backward: ``∇a = g · b · σ(a) (1 + a (1 − σ(a)))``, ``∇b = g · silu(a)``; each may be written onto the operand it
belongs to, or onto the incoming gradient. In float32, rounded once. ``out`` may be ``a`` or ``b``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, RowTile, as_rows, ceil_div
from runtime.kernels.triton.registry import Kernel, configurations

TILE = RowTile(4, 256)


@triton.jit
def swiglu_kernel(a, b, out, rows, width, a_stride, b_stride, out_stride, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """One tile of ROWS by BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    left = tl.load(a + row[:, None] * a_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + row[:, None] * b_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value = left / (1.0 + tl.exp(-left)) * right
    tl.store(out + row[:, None] * out_stride + column[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(grad, a, b, to_a, to_b, rows, width, grad_stride, a_stride, b_stride, to_a_stride,
                           to_b_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One tile of ROWS by BLOCK, read in full before any of it is written."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    g = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    left = tl.load(a + row[:, None] * a_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + row[:, None] * b_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-left))
    one = g * right * sigmoid * (1.0 + left * (1.0 - sigmoid))
    two = g * left * sigmoid
    tl.store(to_a + row[:, None] * to_a_stride + column[None, :], one.to(to_a.dtype.element_ty), mask=inside)
    tl.store(to_b + row[:, None] * to_b_stride + column[None, :], two.to(to_b.dtype.element_ty), mask=inside)


def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch | None:
    """Bind ``out = silu(a) · b``, all ``(…, width)``; the halves of one wider tensor will do.

    ``None`` if they are empty or strides are no rows.
    """
    return _bound(swiglu_kernel, (a, b, out))


def launch_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor
) -> Launch | None:
    """Bind the gradients of both operands; all ``(…, width)``, as in `launch`."""
    return _bound(swiglu_backward_kernel, (grad, a, b, to_a, to_b))


def _bound(kernel: object, tensors: tuple[torch.Tensor, ...]) -> Launch | None:
    shapes = [as_rows(tensor) for tensor in tensors]
    if any(shape is None for shape in shapes) or tensors[0].numel() == 0:
        return None
    rows, width, _ = shapes[0] or (0, 0, 0)
    strides = (0 if shape is None else shape[2] for shape in shapes)
    grid = (ceil_div(rows, TILE.rows), ceil_div(width, TILE.block))
    return Launch(kernel, grid, (*tensors, rows, width, *strides), TILE.setting())


KERNELS = (
    Kernel(
        "swiglu",
        swiglu_kernel,
        configurations(
            "a:*T b:*T out:*T rows:i64 width:i32 a_stride:i64 b_stride:i64 out_stride:i64", (TILE.setting(),)
        ),
    ),
    Kernel(
        "swiglu_backward",
        swiglu_backward_kernel,
        configurations(
            "grad:*T a:*T b:*T to_a:*T to_b:*T rows:i64 width:i32 grad_stride:i64 a_stride:i64 b_stride:i64 "
            "to_a_stride:i64 to_b_stride:i64",
            (TILE.setting(),),
        ),
    ),
)
