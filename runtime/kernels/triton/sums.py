"""Deterministic column sums: of parts in a float32 workspace, and of a whole matrix, such as a bias's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, Setting, ceil_div
from runtime.kernels.triton.registry import Kernel, configurations

#: Parts read at a time, and columns of a program.
SETTING = Setting({"PARTS": 16, "BLOCK": 64}, 4)
#: The same for a whole matrix: few columns, so that a narrow one keeps many programs busy.
MATRIX = Setting({"PARTS": 128, "BLOCK": 16}, 4)


@triton.jit
def sum_parts_kernel(parts, out, count, width, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``out[j] = Σᵢ parts[i · stride + j]`` over ``count`` parts in float32, BLOCK columns to a program."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, PARTS):
        part = (start + tl.arange(0, PARTS)).to(tl.int64)
        inside = (part < count)[:, None] & (column < width)[None, :]
        read = tl.load(parts + part[:, None] * stride + column[None, :], mask=inside, other=0.0)
        total += tl.sum(read.to(tl.float32), axis=0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < width)


def launch_sum_parts(
    parts: torch.Tensor, out: torch.Tensor, count: int, width: int, stride: int | None = None
) -> Launch:
    """Bind the sum of ``count`` rows of ``width``, ``stride`` elements apart, into the dense ``out``."""
    grid = (ceil_div(width, SETTING.constants["BLOCK"]),)
    return Launch(sum_parts_kernel, grid, (parts, out, count, width, width if stride is None else stride), SETTING)


def launch_columns(source: torch.Tensor, out: torch.Tensor) -> Launch:
    """Bind the sum of the rows of a dense (rows, width) matrix into ``out``, dense, of ``width`` elements.

    ATen's own goes through memory that it allocates where there are many rows.
    """
    count, width = source.shape
    grid = (ceil_div(width, MATRIX.constants["BLOCK"]),)
    return Launch(sum_parts_kernel, grid, (source, out, count, width, width), MATRIX)


KERNELS = (
    Kernel(
        "sum_parts",
        sum_parts_kernel,
        configurations("parts:*fp32 out:*T count:i32 width:i32 stride:i64", (SETTING,)),
    ),
    Kernel(
        "column_sums",
        sum_parts_kernel,
        configurations("parts:*T out:*T count:i32 width:i32 stride:i64", (MATRIX,)),
    ),
)
