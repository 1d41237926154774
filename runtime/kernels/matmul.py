"""``arenaplan.matmul``: ``out[..., m, n] = A[..., m, k] · B[..., k, n] (+ bias)`` over strided batches.

float32 and float64 go to BLAS through ``out=``, which takes any row stride: no head split or merge is ever copied.
Accumulation is in the dtype of the operands. 16-bit operands on a CPU are multiplied in float32 tiles: ATen's own
16-bit product packs its operands into memory it allocates on every call. The output may alias no operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from planner.graph import Operation
from planner.operators import HALF_TILE
from runtime.kernels.binding import Call, Context

#: Multiply-adds from which a matrix is worth a BLAS call of its own; below, matrices go in batches.
SINGLE_MATRIX_WORK = 1 << 20


def bind_matmul(operation: Operation, context: Context) -> list[Call]:
    """Bind the product; the way it is cut into BLAS calls depends on one matrix's size only, never on the batch."""
    (out,) = context.outputs(operation)
    left, right = (context.value(argument) for argument in operation.arguments[:2])
    bias = context.value(operation.arguments[2]) if len(operation.arguments) > 2 else None
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or out.numel() == 0:
        return []
    added = bias.expand(out.shape) if isinstance(bias, torch.Tensor) else None
    if out.device.type == "cpu" and out.dtype in (torch.float16, torch.bfloat16):
        return _half(left, right, added, out, context)
    work = out.shape[-2] * out.shape[-1] * left.shape[-1]
    calls: list[Call] = []
    if work >= SINGLE_MATRIX_WORK or out.dim() == 2:
        return [
            single_product(left[index], right[index], None if added is None else added[index], out[index])
            for index in _indices(out.shape[:-2])
        ]
    for a, b, c, o in merged_batches(left, right, added, out):
        calls.append(partial(torch.bmm, a, b, out=o) if c is None else partial(torch.baddbmm, c, a, b, out=o))
    return calls


def single_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, o: torch.Tensor) -> Call:
    """``o = a · b (+ c)`` of matrices, by BLAS."""
    return partial(torch.mm, a, b, out=o) if c is None else partial(torch.addmm, c, a, b, out=o)


def _indices(shape: torch.Size) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in shape))


def merged_batches(
    left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """Three-dimensional operands that together cover the batch: as many dimensions merged as strides allow."""
    operands = [tensor for tensor in (left, right, added, out) if tensor is not None]
    inner = out.dim() - 3
    while inner > 0 and all(_mergeable(tensor, inner) for tensor in operands):
        inner -= 1
    for index in _indices(out.shape[:inner]):
        parts = [_flat(tensor[index]) for tensor in operands]
        if added is None:
            yield parts[0], parts[1], None, parts[2]
        else:
            yield parts[0], parts[1], parts[2], parts[3]


def _mergeable(tensor: torch.Tensor, axis: int) -> bool:
    """Whether dimensions ``axis - 1`` and ``axis`` are one strided dimension."""
    if tensor.shape[axis] == 1 or tensor.shape[axis - 1] == 1:
        return True
    return tensor.stride(axis - 1) == tensor.stride(axis) * tensor.shape[axis]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All batch dimensions as one, without a copy."""
    if tensor.dim() == 3:
        return tensor
    batch = tensor.shape[:-2]
    strides = [stride for size, stride in zip(batch, tensor.stride()[:-2], strict=True) if size != 1]
    return tensor.as_strided(
        (batch.numel(), *tensor.shape[-2:]),
        (strides[-1] if strides else 0, *tensor.stride()[-2:]),
        tensor.storage_offset(),
    )


def _half(
    left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor, context: Context
) -> list[Call]:
    """Tiles of at most HALF_TILE rows, columns and depth, widened to float32, accumulated there, rounded once."""
    calls: list[Call] = []
    rows, columns, depth = out.shape[-2], out.shape[-1], left.shape[-1]
    for index in _indices(out.shape[:-2]):
        for i in range(0, rows, HALF_TILE):
            for j in range(0, columns, HALF_TILE):
                o = out[index][i : i + HALF_TILE, j : j + HALF_TILE]
                c = _scratch(context, 2, o.shape)
                if added is None:
                    calls.append(c.zero_)
                else:
                    calls.append(partial(c.copy_, added[index][i : i + HALF_TILE, j : j + HALF_TILE]))
                for k in range(0, depth, HALF_TILE):
                    a16 = left[index][i : i + HALF_TILE, k : k + HALF_TILE]
                    b16 = right[index][k : k + HALF_TILE, j : j + HALF_TILE]
                    a, b = _scratch(context, 0, a16.shape), _scratch(context, 1, b16.shape)
                    calls += [partial(a.copy_, a16), partial(b.copy_, b16), partial(torch.addmm, c, a, b, out=c)]
                calls.append(partial(o.copy_, c))
    return calls


def _scratch(context: Context, slot: int, shape: torch.Size) -> torch.Tensor:
    """A float32 matrix in the runtime's scratch, one slot for each operand."""
    held = context.scratch.get(slot)
    if held is None or held.numel() < shape.numel():
        held = context.scratch[slot] = torch.empty(shape.numel())
    return held[: shape.numel()].view(shape)
