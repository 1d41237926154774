"""Attention without an attention matrix: its three operators, and the scratch one tile of it is computed in.

The algorithm is that of Dao, FlashAttention-2 (2023): rows of scores are made a tile at a time, with a running maximum
and sum; the backward makes them again from the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from planner.graph import Operation, Tensor, TensorRef

#: ``(q, k, v, mask, seed, dropout, scale, causal)`` → ``(out, lse)``.
ATTENTION = "arenaplan.attention"
#: ``(grad_out, out)`` → the row sums of their product, in the accumulation dtype.
ATTENTION_DELTA = "arenaplan.attention_delta"
#: ``(grad_out, q, k, v, lse, delta, mask, seed, dropout, scale, causal)`` → ``(grad_q, grad_k, grad_v)``.
ATTENTION_BACKWARD = "arenaplan.attention_backward"

FUSED = frozenset({ATTENTION, ATTENTION_DELTA, ATTENTION_BACKWARD})

#: Queries and keys of one tile of scores, largest first.
TILES = (256, 128)
#: Tiles computed at a time at most, each with scratch of its own.
MOST_LANES = 16
#: A smaller tile is taken where scratch for so many lanes of the larger one would not fit.
ENOUGH_LANES = 4
#: Heads of one tile at most.
MOST_HEADS = 64

_ITEMSIZE = {"float64": 8, "float32": 4}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How an attention is cut into tiles, and the scratch a lane of them needs.

    Attributes:
        lanes: tiles computed side by side.
        heads: query heads of one tile.
        rows, columns: queries and keys of one tile.
        dtype: of the scratch, and of everything accumulated.
        pieces: name and shape of each dense piece of a lane's scratch.
    """

    lanes: int
    heads: int
    rows: int
    columns: int
    dtype: str
    pieces: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        """Elements of one lane's scratch; every piece starts at a multiple of 16 of them."""
        return sum(_padded(prod(shape)) for _, shape in self.pieces)

    def offsets(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """First element and shape of each piece."""
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        start = 0
        for name, shape in self.pieces:
            found[name] = start, shape
            start += _padded(prod(shape))
        return found


def tiling(operation: Operation, tensors: Sequence[Tensor]) -> Tiling | None:
    """The tiles of an attention or its backward; ``None`` for one without elements, and for other operators."""
    backward = operation.operator == ATTENTION_BACKWARD
    if not backward and operation.operator != ATTENTION:
        return None
    operands = [_tensor(argument, tensors) for argument in operation.arguments]
    q, k, v = operands[1:4] if backward else operands[:3]
    mask = operands[6] if backward else operands[3]
    if q is None or k is None or v is None or 0 in (q.numel, k.numel, v.numel):
        return None
    outputs = [None if index is None else tensors[index] for index in operation.outputs]
    for tile in TILES:
        whole, tasks = _tiles(operation, q, k, v, mask, operands[0], outputs[0], tile)
        # No more scratch than fills the memory of q: it is a part of what the pass adds.
        most = q.numel * q.itemsize // (whole.numel * _ITEMSIZE[whole.dtype])
        if most >= min(tasks, ENOUGH_LANES):
            break
    return replace(whole, lanes=max(min(tasks, most, MOST_LANES), 1))


def _tiles(
    operation: Operation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    incoming: Tensor | None,
    grad_q: Tensor | None,
    tile: int,
) -> tuple[Tiling, int]:
    """One lane with tiles of that size, and the number of pieces of work that lanes can share."""
    backward = operation.operator == ATTENTION_BACKWARD
    batch, count, length, depth = q.shape
    kept, width = k.shape[2], v.shape[3]
    groups = count // k.shape[1]
    rows, columns = min(tile, length), min(tile, kept)
    heads = max(min(k.shape[1], tile * tile // (rows * columns), MOST_HEADS), 1) if groups == 1 else 1
    dtype = "float64" if q.dtype == "float64" else "float32"
    masked = bool(operation.arguments[-1]) or mask is not None
    pieces = [("q", (heads, rows, depth)), ("scores", (heads, rows, columns)), ("words", (columns + 4,))]
    pieces += [("sums", (heads, columns)), ("sum", (1,))]
    if mask is not None:
        pieces.append(("bias", (heads, rows, columns)))
    if masked:
        pieces.append(("clean", (heads, columns, depth if backward else width)))
    if not readable(k, dtype):
        pieces.append(("k", (heads, columns, depth)))
    if not readable(v, dtype):
        pieces.append(("v", (heads, columns, width)))
    if backward:
        pieces += [("dp", (heads, rows, columns)), ("dk", (heads, columns, depth)), ("dv", (heads, columns, width))]
        pieces += [("lse", (heads, rows)), ("delta", (heads, rows))]
        if incoming is None or not readable(incoming, dtype):
            pieces.append(("do", (heads, rows, width)))
        if grad_q is not None and not readable(grad_q, dtype):
            pieces.append(("dq", (heads * groups, length, depth)))
        tasks = batch * -(-k.shape[1] // heads)
    else:
        pieces += [("out", (heads, rows, width)), ("most", (heads, rows)), ("total", (heads, rows))]
        tasks = batch * -(-count // heads) * -(-length // rows)
    return Tiling(1, heads, rows, columns, dtype, tuple(pieces)), tasks


def _tensor(argument: object, tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[argument.tensor] if isinstance(argument, TensorRef) else None


def readable(tensor: Tensor, dtype: str) -> bool:
    """Whether a matrix product in ``dtype`` reads and writes the tensor where it lies."""
    return tensor.dtype == dtype and (tensor.strides[-1] == 1 and tensor.strides[-2] >= tensor.shape[-1])


def _padded(numel: int) -> int:
    return -(-numel // 16) * 16
