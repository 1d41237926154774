"""Attention without an attention matrix: ``softmax(scale · q kᵀ + mask) v``, its row sums and its three gradients.

FlashAttention-2 (Dao, 2023). Tiles of scores are formed and reduced in float32; 16-bit operands meet on the matrix
units and are added up in float32; results are rounded once. The backward is two kernels, one for the keys and values
and one for the queries, so that no sum depends on an order of arrival. Dropout as `runtime.kernels.triton.philox` on
the weights as rows of one matrix.

A row whose keys are all masked gives zeros and the log-sum-exp +∞. A weight of zero contributes nothing, whatever key
and value hold; a value that is not finite makes NaN of the rows that give it weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.triton.philox import keep_words


@triton.jit
def _head(base, batch, head, by_batch, by_head, UNIT: tl.constexpr):
    """Where a head's matrix begins. Strides come divided by UNIT, so that the compiler knows UNIT divides them."""
    return base + batch * by_batch * UNIT + head * by_head * UNIT


@triton.jit
def _places(base, row, lane, stride, UNIT: tl.constexpr):
    """Addresses of a tile; the row's offset is formed in 64 bits."""
    return base + row.to(tl.int64)[:, None] * stride * UNIT + lane[None, :]


@triton.jit
def _inside(row, lane, rows, lanes, UNIT: tl.constexpr):
    """Which elements of a tile are in a matrix of ``rows`` by ``lanes · UNIT``."""
    return (row < rows)[:, None] & (lane < lanes * UNIT)[None, :]


@triton.jit
def _tile(base, row, lane, rows, lanes, stride, UNIT: tl.constexpr):
    """Rows of a matrix, zero outside it."""
    return tl.load(_places(base, row, lane, stride, UNIT), mask=_inside(row, lane, rows, lanes, UNIT), other=0.0)


@triton.jit
def _product(left, right, total, WIDEN: tl.constexpr):
    """``total + left · right`` in float32. ``WIDEN`` is for Triton's interpreter, whose bfloat16 products are wrong."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc=total, input_precision="ieee")


@triton.jit
def _scores(q, k, mask, kind, row, column, rows, columns, reach, scale, mask_row,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """``scale · q kᵀ + mask`` of a tile, −∞ where a key is outside, masked or beyond ``reach`` of its row.

    ``kind`` of mask: 0 none, 1 boolean, 2 numbers in the operands' dtype; its columns are dense.
    """
    value = _product(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN) * scale
    seen = (row < rows)[:, None] & (column < columns)[None, :] & (column[None, :] <= (row + reach)[:, None])
    value = tl.where(seen, value, float("-inf"))
    if MASK:
        # Branches hand on numbers, not booleans: Triton moves those between layouts as whole bytes only.
        offset = row.to(tl.int64)[:, None] * mask_row + column[None, :]
        if kind == 1:
            given = tl.load(mask + offset, mask=seen, other=0)
            value = tl.where(given != 0, value, float("-inf"))
        if kind == 2:
            added = tl.load(mask.to(tl.pointer_type(q.dtype), bitcast=True) + offset, mask=seen, other=0.0)
            added = added.to(tl.float32)
            value = tl.where(added == float("-inf"), float("-inf"), value + added)
    return value


@triton.jit
def _kept(seeds, least, row, first_column, per_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of a tile dropout keeps; ``row`` counts the rows of all heads."""
    words = keep_words(
        tl.load(seeds), 0, row, first_column // 4 + tl.arange(0, BLOCK_N // 4), per_row, BLOCK_M, BLOCK_N
    )
    return words >= least


@triton.jit
def _add_weighted(total, weights, values, hidden, WIDEN: tl.constexpr):
    """``total + weights · values``; with ``hidden`` weights a value that is not finite is taken out first."""
    if hidden:
        wide = values.to(tl.float32)
        odd = tl.where(tl.abs(wide) < float("inf"), 0.0, 1.0)
        if tl.max(tl.max(odd, axis=1), axis=0) > 0.0:
            given = tl.minimum(tl.abs(weights) * 1e38, 1.0)
            reached = _product(given.to(values.dtype), odd.to(values.dtype), tl.zeros_like(total), WIDEN)
            total = tl.where(reached > 0.0, float("nan"), total)
            values = tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(values.dtype)
    return _product(weights.to(values.dtype), values, total, WIDEN)


@triton.jit(do_not_specialize=["least", "reach", "kind"])
def attention_kernel(
    q, k, v, out, lse, mask, seeds,
    scale, keep_scale, least, heads, groups, rows, columns, depth, width, reach, per_row,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    kind, mask_batch, mask_head, mask_row,
    MASK: tl.constexpr, DROP: tl.constexpr, WIDEN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one head over all its keys, BLOCK_N at a time."""
    blocks = tl.cdiv(rows, BLOCK_M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_M
    batch, head = pair // heads, pair % heads
    row = start + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)
    k = _head(k, batch, head // groups, k_batch, k_head, UNIT)
    v = _head(v, batch, head // groups, v_batch, v_head, UNIT)
    mask += (batch * mask_batch + head * mask_head) * tl.where(kind == 1, 1, q.dtype.element_ty.primitive_bitwidth // 8)
    queries = _tile(_head(q, batch, head, q_batch, q_head, UNIT), row, lane, rows, depth, q_row, UNIT)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, tl.minimum(columns, start + BLOCK_M + reach), BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        keys = _tile(k, column, lane, columns, depth, k_row, UNIT)
        values = _tile(v, column, lane, columns, width, v_row, UNIT)
        score = _scores(queries, keys, mask, kind, row, column, rows, columns, reach, scale, mask_row,
                        BLOCK_M, BLOCK_N, MASK, WIDEN)  # fmt: skip
        higher = tl.maximum(most, tl.max(score, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - level[:, None])
        shrink = tl.exp(most - level)
        total = total * shrink + tl.sum(weight, axis=1)
        most = higher
        if DROP:  # noqa: SIM102 - decided when compiling, the other as it runs
            if least > 0:
                kept = _kept(seeds, least, pair * rows + row, first, per_row, BLOCK_M, BLOCK_N)
                weight = tl.where(kept, weight, 0.0)
        hidden = (kind > 0) | (first + BLOCK_N > start + reach + 1)
        result = _add_weighted(result * shrink[:, None], weight, values, hidden, WIDEN)
    empty = total == 0.0
    result = result * (keep_scale / tl.where(empty, 1.0, total))[:, None]
    statistic = tl.where(empty, float("inf"), most + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse + pair * rows + row, statistic, mask=row < rows)
    place = _places(_head(out, batch, head, out_batch, out_head, UNIT), row, lane, out_row, UNIT)
    tl.store(place, result.to(out.dtype.element_ty), mask=_inside(row, lane, rows, width, UNIT))


@triton.jit
def attention_delta_kernel(
    grad, out, delta, heads, rows, width, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row sums of ``grad · out``, BLOCK_M rows of one head."""
    blocks = tl.cdiv(rows, BLOCK_M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head = pair // heads, pair % heads
    lane = tl.arange(0, BLOCK_D)
    one = _tile(_head(grad, batch, head, grad_batch, grad_head, UNIT), row, lane, rows, width, grad_row, UNIT).to(
        tl.float32
    )
    two = _tile(_head(out, batch, head, out_batch, out_head, UNIT), row, lane, rows, width, out_row, UNIT).to(
        tl.float32
    )
    tl.store(delta + pair * rows + row, tl.sum(one * two, axis=1), mask=row < rows)


@triton.jit
def _gradients(score, dp, lse, delta, seeds, least, keep_scale, row, first_column, per_row,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """Weights after dropout (not scaled) and the gradient of the scores; a weight of zero has gradient zero."""
    weight = tl.exp(score - lse[:, None])
    dropped = weight
    if DROP:  # noqa: SIM102 - decided when compiling, the other as it runs
        if least > 0:
            kept = _kept(seeds, least, row, first_column, per_row, BLOCK_M, BLOCK_N)
            dropped = tl.where(kept, weight, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
    return dropped, tl.where(weight == 0.0, 0.0, weight * (dp - delta[:, None]))


@triton.jit(do_not_specialize=["least", "reach", "kind"])
def attention_keys_kernel(
    grad, q, k, v, lse, delta, grad_k, grad_v, mask, seeds,
    scale, keep_scale, least, heads, groups, rows, columns, depth, width, reach, per_row,
    grad_batch, grad_head, grad_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row, kind, mask_batch, mask_head, mask_row,
    MASK: tl.constexpr, DROP: tl.constexpr, WIDEN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_N keys and values of one head, over all rows of the query heads that share it."""
    blocks = tl.cdiv(columns, BLOCK_N)
    key_pair = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_N
    key_heads = heads // groups
    batch, key_head = key_pair // key_heads, key_pair % key_heads
    column = first + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_D)
    item = tl.where(kind == 1, 1, q.dtype.element_ty.primitive_bitwidth // 8)
    keys = _tile(_head(k, batch, key_head, k_batch, k_head, UNIT), column, lane, columns, depth, k_row, UNIT)
    values = _tile(_head(v, batch, key_head, v_batch, v_head, UNIT), column, lane, columns, width, v_row, UNIT)
    to_keys = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    to_values = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = tl.maximum(first - reach, 0) // BLOCK_M * BLOCK_M
    for group in range(groups):
        head = key_head * groups + group
        pair = batch * heads + head
        for start in range(begin, rows, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            queries = _tile(_head(q, batch, head, q_batch, q_head, UNIT), row, lane, rows, depth, q_row, UNIT)
            incoming = _tile(
                _head(grad, batch, head, grad_batch, grad_head, UNIT), row, lane, rows, width, grad_row, UNIT
            )
            level = tl.load(lse + pair * rows + row, mask=row < rows, other=float("inf"))
            summed = tl.load(delta + pair * rows + row, mask=row < rows, other=0.0)
            score = _scores(queries, keys, mask + (batch * mask_batch + head * mask_head) * item, kind, row,
                            column, rows, columns, reach, scale, mask_row, BLOCK_M, BLOCK_N, MASK, WIDEN)  # fmt: skip
            dp = _product(incoming, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
            weight, ds = _gradients(score, dp, level, summed, seeds, least, keep_scale, pair * rows + row, first,
                                    per_row, BLOCK_M, BLOCK_N, DROP)  # fmt: skip
            to_values = _product(tl.trans(weight.to(incoming.dtype)), incoming, to_values, WIDEN)
            to_keys = _product(tl.trans(ds.to(queries.dtype)), queries, to_keys, WIDEN)
    place = _places(_head(grad_k, batch, key_head, gk_batch, gk_head, UNIT), column, lane, gk_row, UNIT)
    tl.store(place, (to_keys * scale).to(grad_k.dtype.element_ty), mask=_inside(column, lane, columns, depth, UNIT))
    place = _places(_head(grad_v, batch, key_head, gv_batch, gv_head, UNIT), column, lane, gv_row, UNIT)
    tl.store(
        place, (to_values * keep_scale).to(grad_v.dtype.element_ty), mask=_inside(column, lane, columns, width, UNIT)
    )


@triton.jit(do_not_specialize=["least", "reach", "kind"])
def attention_queries_kernel(
    grad, q, k, v, lse, delta, grad_q, mask, seeds,
    scale, keep_scale, least, heads, groups, rows, columns, depth, width, reach, per_row,
    grad_batch, grad_head, grad_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    gq_batch, gq_head, gq_row, kind, mask_batch, mask_head, mask_row,
    MASK: tl.constexpr, DROP: tl.constexpr, WIDEN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_M queries of one head over all its keys."""
    blocks = tl.cdiv(rows, BLOCK_M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_M
    batch, head = pair // heads, pair % heads
    row = start + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)
    k = _head(k, batch, head // groups, k_batch, k_head, UNIT)
    v = _head(v, batch, head // groups, v_batch, v_head, UNIT)
    mask += (batch * mask_batch + head * mask_head) * tl.where(kind == 1, 1, q.dtype.element_ty.primitive_bitwidth // 8)
    queries = _tile(_head(q, batch, head, q_batch, q_head, UNIT), row, lane, rows, depth, q_row, UNIT)
    incoming = _tile(_head(grad, batch, head, grad_batch, grad_head, UNIT), row, lane, rows, width, grad_row, UNIT)
    level = tl.load(lse + pair * rows + row, mask=row < rows, other=float("inf"))
    summed = tl.load(delta + pair * rows + row, mask=row < rows, other=0.0)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, tl.minimum(columns, start + BLOCK_M + reach), BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        keys = _tile(k, column, lane, columns, depth, k_row, UNIT)
        values = _tile(v, column, lane, columns, width, v_row, UNIT)
        score = _scores(queries, keys, mask, kind, row, column, rows, columns, reach, scale, mask_row,
                        BLOCK_M, BLOCK_N, MASK, WIDEN)  # fmt: skip
        dp = _product(incoming, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
        _, ds = _gradients(score, dp, level, summed, seeds, least, keep_scale, pair * rows + row, first, per_row,
                           BLOCK_M, BLOCK_N, DROP)  # fmt: skip
        hidden = (kind > 0) | (first + BLOCK_N > start + reach + 1)
        result = _add_weighted(result, ds, keys, hidden, WIDEN)
    place = _places(_head(grad_q, batch, head, gq_batch, gq_head, UNIT), row, lane, gq_row, UNIT)
    tl.store(
        place,
        (result * scale).to(grad_q.dtype.element_ty),
        mask=_inside(row, lane, rows, depth, UNIT),
    )
