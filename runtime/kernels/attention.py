"""Attention without an attention matrix on a CPU: ``softmax(scale · q kᵀ + mask) v`` and its backward, tile by tile.

Matrix products go to BLAS through ``out=``; what lies between them is one compiled loop over the tile
(`attention_loops`). 16-bit operands are widened tile by tile; everything is accumulated in float32 (float64 operands in
float64) and rounded once. Operands are read with any strides; no output may alias an operand.

A row whose keys are all masked gives zeros, and its log-sum-exp is +∞, so that its weights vanish in the backward too.
A weight of zero contributes nothing, whatever the key and value hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from planner.flash import ATTENTION, ATTENTION_DELTA, Tiling, tiling
from planner.graph import Argument, Operation, Tensor
from runtime.errors import ArenaError
from runtime.kernels.aten import scalar
from runtime.kernels.attention_tiles import Dropout, Lane, add_product
from runtime.kernels.binding import Call, Context
from runtime.lanes import Section


@dataclass(frozen=True, slots=True)
class _Attention:
    """Operands and settings shared by the tiles of one attention.

    Attributes:
        q, k, v: ``(batch, heads, length, depth)``; k and v may have fewer heads.
        mask: broadcast to ``(batch, heads, rows, columns)``; boolean (true is seen) or added to the scores.
        offered: operands that products read where they lie, by name.
        zero, hidden: numbers as tensors, for a boolean mask.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    dropout: Dropout
    scale: torch.Tensor
    scale_number: float
    causal: bool
    tiles: Tiling
    offered: frozenset[str]
    zero: torch.Tensor
    hidden: torch.Tensor

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def masked(self) -> bool:
        return self.causal or self.mask is not None

    def columns(self, stop: int) -> range:
        """First columns of the tiles that rows before ``stop`` see."""
        return range(0, min(self.k.shape[2], stop) if self.causal else self.k.shape[2], self.tiles.columns)

    def queries(self, lane: Lane, batch: int, heads: slice, rows: slice) -> torch.Tensor:
        """``scale · q`` of a tile."""
        part = self.q[batch, heads, rows]
        tile = lane.view("q", *part.shape)
        if part.dtype == tile.dtype:
            return torch.mul(part, self.scale, out=tile)
        return torch.mul(tile.copy_(part), self.scale, out=tile)

    def part(self, lane: Lane, name: str, source: torch.Tensor, batch: int, heads: slice, rows: slice) -> torch.Tensor:
        """Rows of k, v or the incoming gradient, ready for a product."""
        return lane.widened(name, source[batch, heads, rows], as_it_lies=name in self.offered)

    def bias(self, lane: Lane, batch: int, heads: slice, rows: slice, columns: slice) -> None:
        """The mask of a tile as numbers to add."""
        if self.mask is None:
            return
        part = self.mask[batch, heads, rows, columns]
        tile = lane.view("bias", *part.shape)
        if part.dtype == torch.bool:
            torch.where(part, self.zero, self.hidden, out=tile)
        else:
            tile.copy_(part)


def _attention(operation: Operation, context: Context, first: int) -> _Attention | None:
    """The attention whose q, k and v are the arguments from ``first`` on; ``None`` if it has no elements."""
    tiles = tiling(operation, [describe(view) for view in context.views])
    if tiles is None:
        return None
    q, k, v = (context.tensor(argument) for argument in operation.arguments[first : first + 3])
    mask, seed = (_optional(context, argument) for argument in operation.arguments[-5:-3])
    probability, scale, causal = operation.arguments[-3:]
    if not isinstance(probability, (int, float)) or not isinstance(scale, (int, float)) or not 0 <= probability < 1:
        raise ArenaError(f"{operation.name}: dropout {probability!r} and scale {scale!r} must be numbers")
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    dtype = getattr(torch, tiles.dtype)
    copied = {name for name, _ in tiles.pieces}
    return _Attention(
        q,
        k,
        v,
        mask,
        Dropout.of(float(probability), seed),
        scalar(float(scale), dtype, context),
        float(scale),
        bool(causal),
        tiles,
        frozenset({"k", "v", "do"} - copied),
        scalar(0.0, dtype, context),
        scalar(-math.inf, dtype, context),
    )


def describe(tensor: torch.Tensor) -> Tensor:
    """A view's geometry as the planner knows it, its place aside."""
    name = str(tensor.dtype).removeprefix("torch.")
    return Tensor("", 0, 0, tuple(tensor.shape), tuple(tensor.stride()), name)


def _optional(context: Context, argument: Argument) -> torch.Tensor | None:
    return None if argument is None else context.tensor(argument)


def _lanes(operation: Operation, context: Context, tiles: Tiling) -> list[Lane]:
    if not operation.workspaces:
        raise ArenaError(f"{operation.name} ({operation.operator}) has no workspace")
    scratch = context.views[operation.workspaces[0]]
    if scratch.dim() != 2 or scratch.shape[1] < tiles.numel or str(scratch.dtype) != f"torch.{tiles.dtype}":
        raise ArenaError(f"{operation.name} ({operation.operator}): its workspace does not fit its tiles")
    return [Lane(flat, tiles) for flat in scratch]


def _on_device(operation: Operation, context: Context) -> list[Call]:
    """The operation's launches on a GPU.

    Raises:
        ArenaError: the kernels do not take these operands.
    """
    from runtime.kernels.triton import attention_launch

    values: list[Any] = [context.value(argument) for argument in operation.arguments]
    outputs: list[Any] = [None if index is None else context.views[index] for index in operation.outputs]
    launches: tuple[Call | None, ...] | None = None
    if all(output is not None for output in outputs):
        if operation.operator == ATTENTION:
            launches = (attention_launch.launch(*values[:3], *outputs, *values[3:]),)
        elif operation.operator == ATTENTION_DELTA:
            launches = (attention_launch.launch_delta(*values, *outputs),)
        else:
            given = [*values[:6], tuple(outputs), *values[6:]]
            launches = attention_launch.launch_backward(*given)
    found = [launch for launch in launches or () if launch is not None]
    if not found:
        cause = "heads of at most 128 elements lying one behind the other, in float16, bfloat16 or float32"
        raise ArenaError(
            f'{operation.name} ({operation.operator}): on a GPU it takes {cause}; trace with attention="math"'
        )
    return found


# -- forward ----------------------------------------------------------------------------------------------------


def bind_attention(operation: Operation, context: Context) -> list[Call]:
    """``out = softmax(scale · q kᵀ + mask) v`` with dropped weights, and ``lse``, each row's log-sum-exp."""
    out, lse = (None if index is None else context.views[index] for index in operation.outputs)
    if out is None or lse is None:
        raise ArenaError(f"{operation.name} ({operation.operator}) must have two results")
    if out.device.type != "cpu":
        return _on_device(operation, context)
    found = _attention(operation, context, 0)
    if found is None:
        return [out.zero_, partial(lse.fill_, math.inf)]
    batch, heads, length, _ = found.q.shape
    tasks = [
        (b, slice(h, min(h + found.tiles.heads, heads)), slice(i, min(i + found.tiles.rows, length)))
        for b in range(batch)
        for h in range(0, heads, found.tiles.heads)
        for i in range(0, length, found.tiles.rows)
    ]
    lanes = _lanes(operation, context, found.tiles)
    return [
        Section([[partial(_forward, found, lane, tasks[k :: len(lanes)], out, lse)] for k, lane in enumerate(lanes)])
    ]


def _forward(
    found: _Attention, lane: Lane, tasks: list[tuple[int, slice, slice]], out: torch.Tensor, lse: torch.Tensor
) -> None:
    from runtime.kernels import attention_loops

    seed = found.dropout.halves()
    lowest = torch.finfo(lse.dtype).min
    for batch, heads, rows in tasks:
        q = found.queries(lane, batch, heads, rows)
        count, size = q.shape[:2]
        kept = _key_heads(heads, found.groups)
        statistics = (count, size)
        most, total = lane.view("most", *statistics), lane.view("total", *statistics)
        result = lane.view("out", count, size, found.v.shape[3])
        most.fill_(lowest)
        total.zero_()
        result.zero_()
        for j in found.columns(rows.stop):
            columns = slice(j, min(j + found.tiles.columns, found.k.shape[2]))
            k = found.part(lane, "k", found.k, batch, kept, columns)
            v = found.part(lane, "v", found.v, batch, kept, columns)
            shape = (count, size, columns.stop - j)
            scores = lane.view("scores", *shape)
            torch.bmm(q, k.transpose(1, 2), out=scores)
            found.bias(lane, batch, heads, rows, columns)
            biased = found.mask is not None
            attention_loops.softmax_tile(
                lane.array("scores", *shape),
                lane.array("bias" if biased else "scores", *shape),
                biased,
                found.causal,
                lane.array("most", *statistics),
                lane.array("total", *statistics),
                lane.array("out", *result.shape),
                lane.words,
                seed,
                found.dropout.threshold,
                batch * found.q.shape[1] + heads.start,
                rows.start,
                j,
                found.q.shape[2],
                found.k.shape[2],
            )
            add_product(lane, result, scores, v, masked=found.masked)
        attention_loops.finish_rows(
            lane.array("out", *result.shape),
            lane.array("most", *statistics),
            lane.array("total", *statistics),
            found.dropout.factor,
        )
        out[batch, heads, rows].copy_(result)
        lse[batch, heads, rows].copy_(most)


def _key_heads(heads: slice, groups: int) -> slice:
    """The key heads that a run of query heads shares."""
    return heads if groups == 1 else slice(heads.start // groups, heads.start // groups + 1)


# -- backward ---------------------------------------------------------------------------------------------------


def bind_attention_delta(operation: Operation, context: Context) -> list[Call]:
    """``delta = Σ grad_out · out`` over the last dimension, in the accumulation dtype."""
    incoming, out = (context.tensor(argument) for argument in operation.arguments)
    (delta,) = context.outputs(operation)
    if out.device.type != "cpu":
        return _on_device(operation, context)
    if out.numel() == 0:
        return [delta.zero_]
    scratch = context.views[operation.workspaces[0]]
    batch, heads, length, width = out.shape
    step = scratch.shape[1] // max(heads * width, 1)
    calls: list[Call] = []
    for b in range(batch):
        for i in range(0, length, max(step, 1)):
            rows = slice(i, min(i + max(step, 1), length))
            shape = (heads, rows.stop - i, width)
            one, two = (plane[: math.prod(shape)].view(shape) for plane in scratch)
            parts = [incoming[b, :, rows], out[b, :, rows]]
            for position, place in enumerate((one, two)):
                if parts[position].dtype != place.dtype:
                    calls.append(partial(place.copy_, parts[position]))
                    parts[position] = place
            calls.append(partial(torch.mul, parts[0], parts[1], out=one))
            calls.append(partial(torch.sum, one, -1, out=delta[b, :, rows]))
    return calls


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the backward has besides the attention itself; a gradient nobody uses is ``None``."""

    incoming: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    grad_q: torch.Tensor | None
    grad_k: torch.Tensor | None
    grad_v: torch.Tensor | None


def bind_attention_backward(operation: Operation, context: Context) -> list[Call]:
    """With P the weights, D the dropped ones, ∇D = ∇out vᵀ: ∇v = Dᵀ ∇out, ∇S = P (∇P − delta), ∇q = scale ∇S k, ….

    One lane works on all of a head's tiles, key block by key block, so every sum has a fixed order.
    """
    grads = [None if index is None else context.views[index] for index in operation.outputs]
    if context.tensor(operation.arguments[0]).device.type != "cpu":
        return _on_device(operation, context)
    found = _attention(operation, context, 1)
    if found is None:
        return [grad.zero_ for grad in grads if grad is not None]
    lse, delta = (context.tensor(argument) for argument in operation.arguments[4:6])
    given = _Backward(context.tensor(operation.arguments[0]), lse, delta, *grads)
    heads = found.k.shape[1]
    tasks = [
        (b, slice(h, min(h + found.tiles.heads, heads)))
        for b in range(found.q.shape[0])
        for h in range(0, heads, found.tiles.heads)
    ]
    lanes = _lanes(operation, context, found.tiles)
    return [Section([[partial(_backward, found, given, lane, tasks[k :: len(lanes)])] for k, lane in enumerate(lanes)])]


def _backward(found: _Attention, given: _Backward, lane: Lane, tasks: list[tuple[int, slice]]) -> None:
    length, kept = found.q.shape[2], found.k.shape[2]
    tiles, groups = found.tiles, found.groups
    seed = found.dropout.halves()
    for batch, kv_heads in tasks:
        # Query heads that share a key head come one after the other, each a tile of one head.
        runs = [kv_heads] if groups == 1 else [slice(h, h + 1) for h in _query_heads(kv_heads, groups)]
        totals = [_query_total(given.grad_q, lane, batch, heads, number, groups) for number, heads in enumerate(runs)]
        for j in range(0, kept, tiles.columns):
            columns = slice(j, min(j + tiles.columns, kept))
            k = found.part(lane, "k", found.k, batch, kv_heads, columns)
            v = found.part(lane, "v", found.v, batch, kv_heads, columns)
            dk, dv = lane.view("dk", *k.shape).zero_(), lane.view("dv", *v.shape).zero_()
            first = j // tiles.rows * tiles.rows if found.causal else 0
            for heads, total in zip(runs, totals, strict=True):
                for i in range(first, length, tiles.rows):
                    rows = slice(i, min(i + tiles.rows, length))
                    _backward_tile(found, given, lane, (batch, heads, rows, columns), (k, v, dk, dv), seed, total)
            for grad, value in ((given.grad_k, dk), (given.grad_v, dv)):
                if grad is not None:
                    grad[batch, kv_heads, columns].copy_(value)
        if given.grad_q is not None:
            for heads, total in zip(runs, totals, strict=True):
                target = given.grad_q[batch, heads]
                if total is not None and total.data_ptr() != target.data_ptr():
                    target.copy_(total)


def _query_heads(kv_heads: slice, groups: int) -> range:
    return range(kv_heads.start * groups, kv_heads.stop * groups)


def _query_total(
    grad: torch.Tensor | None, lane: Lane, batch: int, heads: slice, number: int, groups: int
) -> torch.Tensor | None:
    """Where the gradient of q is added up, zeroed: in its own place, or in the lane's scratch."""
    if grad is None:
        return None
    part = grad[batch, heads]
    if not lane.has("dq"):
        return part.zero_()
    count, length, depth = part.shape
    whole = lane.view("dq", count if groups == 1 else groups, length, depth)
    return whole[number : number + count].zero_()


def _backward_tile(
    found: _Attention,
    given: _Backward,
    lane: Lane,
    place: tuple[int, slice, slice, slice],
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    seed: tuple[int, int],
    total: torch.Tensor | None,
) -> None:
    """Add what one tile of scores contributes to the three gradients."""
    from runtime.kernels import attention_loops

    batch, heads, rows, columns = place
    k, v, dk, dv = keys
    q = found.queries(lane, batch, heads, rows)
    incoming = found.part(lane, "do", given.incoming, batch, heads, rows)
    shape = (q.shape[0], q.shape[1], k.shape[1])
    scores, dp = lane.view("scores", *shape), lane.view("dp", *shape)
    torch.bmm(q, k.transpose(1, 2), out=scores)
    torch.bmm(incoming, v.transpose(1, 2), out=dp)
    found.bias(lane, batch, heads, rows, columns)
    lane.view("lse", *shape[:2]).copy_(given.lse[batch, heads, rows])
    lane.view("delta", *shape[:2]).copy_(given.delta[batch, heads, rows])
    biased = found.mask is not None
    attention_loops.softmax_backward_tile(
        lane.array("scores", *shape),
        lane.array("dp", *shape),
        lane.array("bias" if biased else "scores", *shape),
        biased,
        found.causal,
        lane.array("lse", *shape[:2]),
        lane.array("delta", *shape[:2]),
        lane.words,
        seed,
        found.dropout.threshold,
        found.dropout.factor,
        batch * found.q.shape[1] + heads.start,
        rows.start,
        columns.start,
        found.q.shape[2],
        found.k.shape[2],
    )
    if given.grad_v is not None:
        torch.baddbmm(dv, scores.transpose(1, 2), incoming, out=dv)
    if given.grad_k is not None:
        torch.baddbmm(dk, dp.transpose(1, 2), q, out=dk)
    if total is not None:
        add_product(lane, total[:, rows], dp, k, masked=found.masked, alpha=found.scale_number)
