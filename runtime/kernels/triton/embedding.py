"""Rows of a gradient added into a table: ``table[t[i]] += source[i]``, the backward of an embedding.

No atomics and no sorting: the program of token i goes on only if no earlier token names the same row, and then adds all
that do, in order, in float32. The result is rounded once and the same on every launch. An index outside the table is
passed over. Tokens of ``padding`` add nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.triton.launch import Launch, Setting, as_rows, ceil_div
from runtime.kernels.triton.registry import Kernel, configurations

#: Tokens compared at a time, and columns of a program.
TOKENS, BLOCK = 1024, 256
SETTING = Setting({"TOKENS": TOKENS, "BLOCK": BLOCK}, 4)


@triton.jit
def embedding_backward_kernel(source, indices, table, count, width, entries, padding, source_stride, table_stride,
                              TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Token ``program_id(0)`` and every later one of its row, BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, TOKENS).to(tl.int64)
    mine = tl.load(indices + token)
    earlier = 0
    for start in range(0, token, TOKENS):
        other = tl.load(indices + start + lane, mask=start + lane < token, other=-1)
        earlier += tl.sum((other == mine).to(tl.int32), axis=0)
    usable = (mine >= 0) & (mine < entries) & (mine != padding)
    if (earlier == 0) & usable:
        place = table + mine * table_stride + column
        total = tl.load(place, mask=column < width, other=0.0).to(tl.float32)
        for start in range(token, count, TOKENS):
            place_of = start + lane
            other = tl.load(indices + place_of, mask=place_of < count, other=-1)
            waiting = tl.where(other == mine, place_of, count)
            following = tl.min(waiting, axis=0)
            while following < count:
                row = source + following * source_stride + column
                total += tl.load(row, mask=column < width, other=0.0).to(tl.float32)
                waiting = tl.where(waiting == following, count, waiting)
                following = tl.min(waiting, axis=0)
        tl.store(place, total.to(table.dtype.element_ty), mask=column < width)


def launch(source: torch.Tensor, indices: torch.Tensor, table: torch.Tensor, *, padding: int = -1) -> Launch | None:
    """Bind ``table[indices[i]] += source[i]`` for ``source`` (tokens, width), int64 or int32 ``indices`` (tokens).

    ``None`` if there is nothing to add or strides are no rows; ``table`` is (entries, width) and aliases nothing.
    """
    rows, target = as_rows(source), as_rows(table)
    if rows is None or target is None or source.dim() != 2 or table.dim() != 2 or source.numel() == 0:
        return None
    if not indices.is_contiguous() or not table.numel():
        return None
    count, width, stride = rows
    grid = (count, ceil_div(width, BLOCK))
    numbers = (count, width, target[0], padding, stride, target[2])
    return Launch(embedding_backward_kernel, grid, (source, indices, table, *numbers), SETTING)


KERNELS = (
    Kernel(
        "embedding_backward",
        embedding_backward_kernel,
        configurations(
            "source:*T indices:*i64 table:*T count:i64 width:i32 entries:i64 padding:i64 source_stride:i64 "
            "table_stride:i64",
            (SETTING,),
        ),
    ),
)
