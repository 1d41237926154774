"""The compiled loops of attention on a CPU: softmax of a tile of scores, its backward, and dropout's random words.

Dropout is counter-based: whether a weight is kept depends on the seed and its own position alone, so nothing is stored
and the backward finds the same mask. It is the mask of the Triton kernels (`runtime.kernels.triton.philox`) for the
weights as rows of one matrix: Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), element
``(row, column)`` takes word ``column % 4`` of the counter ``row · ⌈columns / 4⌉ + column // 4``, kept if the upper 31
bits are at least p · 2³¹.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from planner.loops import compiled_loop

#: Multipliers and key increments of Philox4x32 (Salmon et al., 2011, table 2).
PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_A, _B = np.uint64(PHILOX[0]), np.uint64(PHILOX[1])
_KEY_A, _KEY_B = np.uint32(PHILOX[2]), np.uint32(PHILOX[3])
_LOG2E = np.float32(1.4426950408889634)
#: ln 2 in two parts, the first with so few digits that its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)
#: Below this, exp is less than the smallest normal float32 and taken as 0.
_LEAST = np.float32(-87.33654)
_C = tuple(np.float32(1 / math.factorial(k)) for k in range(8))
_C7, _C6, _C5, _C4, _C3, _C2 = _C[7], _C[6], _C[5], _C[4], _C[3], _C[2]
_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)


def _same_bits(source: Any, target: Any, kind: Any) -> Any:
    """A compiled function that takes a number's 32 bits for those of another type."""

    def reinterpret(_context: Any, _value: Any) -> Any:
        def code(_codegen: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return target(source), code

    return intrinsic(reinterpret)


_float_of_bits = _same_bits(types.int32, types.float32, ir.FloatType())
_bits_of_float = _same_bits(types.float32, types.int32, ir.IntType(32))


def _exponential(x: Any) -> Any:
    return math.exp(x)


@overload(_exponential, inline="never")
def _overload_exponential(x: Any) -> Any:
    if x == types.float32:
        return _narrow_exponential
    return _wide_exponential


def _wide_exponential(x: Any) -> Any:
    return math.exp(x)


def _narrow_exponential(x: Any) -> Any:
    """The exponential of a float32 that is at most 88: 2ⁿ times the Taylor polynomial of what is left."""
    n = np.floor(x * _LOG2E + _HALF)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _ONE
    p = p * r + _ONE
    value = p * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return _ZERO if x < _LEAST else value


@compiled_loop(nogil=True)
def random_words(words: Any, low: Any, high: Any, counter: Any, groups: int) -> None:
    """``words[4 g + w] = word w`` of the counter ``counter + g``, for ``groups`` of them; 31 bits each."""
    for g in range(groups):
        place = np.uint64(counter) + np.uint64(g)
        c0 = np.uint32(place)
        c1 = np.uint32(place >> np.uint64(32))
        c2 = np.uint32(0)
        c3 = np.uint32(0)
        k0 = np.uint32(low)
        k1 = np.uint32(high)
        for _ in range(ROUNDS):
            one = _A * np.uint64(c0)
            two = _B * np.uint64(c2)
            c0 = np.uint32(two >> np.uint64(32)) ^ c1 ^ k0
            c2 = np.uint32(one >> np.uint64(32)) ^ c3 ^ k1
            c1 = np.uint32(two)
            c3 = np.uint32(one)
            k0 = np.uint32(k0 + _KEY_A)
            k1 = np.uint32(k1 + _KEY_B)
        words[4 * g] = c0 >> np.uint32(1)
        words[4 * g + 1] = c1 >> np.uint32(1)
        words[4 * g + 2] = c2 >> np.uint32(1)
        words[4 * g + 3] = c3 >> np.uint32(1)


def _largest(row: Any) -> Any:
    return row.max()


@overload(_largest)
def _overload_largest(row: Any) -> Any:
    return _narrow_largest if row.dtype == types.float32 else _wide_largest


def _wide_largest(row: Any) -> Any:
    most = row.dtype.type(-np.inf)
    for j in range(row.shape[0]):
        most = max(row[j], most)
    return most


def _narrow_largest(row: Any) -> Any:
    """The largest element by the order of the bits as integers, whose maximum runs in vector lanes."""
    most = np.int32(-2147483648)
    for j in range(row.shape[0]):
        bits = _bits_of_float(row[j])
        most = max(most, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return _float_of_bits(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled_loop(nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _exponentials(row: Any, most: Any) -> Any:
    """``row = exp(row − most)``; their sum."""
    total = most * 0
    for j in range(row.shape[0]):
        p = _exponential(row[j] - most)
        row[j] = p
        total += p
    return total


@compiled_loop(nogil=True)
def _add_bias(row: Any, bias: Any) -> None:
    """``row += bias``, and −∞ where the bias is −∞, whatever the row holds there."""
    for j in range(row.shape[0]):
        b = bias[j]
        row[j] = b if b == -np.inf else row[j] + b


@compiled_loop(nogil=True)
def _keep(row: Any, words: Any, threshold: Any) -> None:
    for j in range(row.shape[0]):
        row[j] = row[j] if words[j] >= threshold else 0


@compiled_loop(nogil=True)
def softmax_tile(
    scores: Any,
    bias: Any,
    biased: bool,
    causal: bool,
    most: Any,
    total: Any,
    out: Any,
    words: Any,
    seed: tuple[int, int],
    threshold: int,
    head: int,
    first_row: int,
    first_column: int,
    length: int,
    all_columns: int,
) -> None:
    """Scores of a tile to unnormalised weights, dropped ones 0; ``most``, ``total`` and ``out`` follow the maximum.

    The tile starts at ``(first_row, first_column)`` of ``head``, a matrix of ``length`` by ``all_columns``.
    ``scores``, ``bias``: (heads, rows, columns); ``most``, ``total``: (heads, rows); ``out``: (heads, rows, width).
    """
    heads, rows, columns = scores.shape
    limit = np.uint32(threshold)
    per_row = (all_columns + 3) // 4
    for g in range(heads):
        for i in range(rows):
            seen = min(max(first_row + i - first_column + 1, 0), columns) if causal else columns
            row = scores[g, i, :seen]
            scores[g, i, seen:] = 0
            if seen == 0:
                continue
            if biased:
                _add_bias(row, bias[g, i, :seen])
            old = most[g, i]
            largest = _largest(row)
            new = max(old, largest)
            summed = _exponentials(row, new)
            if new != old:
                shrink = _exponential(old - new)
                total[g, i] = total[g, i] * shrink
                for c in range(out.shape[2]):
                    out[g, i, c] *= shrink
                most[g, i] = new
            total[g, i] += summed
            if threshold > 0:
                counter = ((head + g) * length + first_row + i) * per_row + first_column // 4
                random_words(words, seed[0], seed[1], counter, (seen + 3) // 4)
                _keep(row, words, limit)


@compiled_loop(nogil=True, fastmath={"contract"})
def _gradients(row: Any, dp: Any, lse: Any, delta: Any) -> None:
    for j in range(row.shape[0]):
        p = _exponential(row[j] - lse)
        row[j] = p
        dp[j] = 0 if p == 0 else p * (dp[j] - delta)


@compiled_loop(nogil=True, fastmath={"contract"})
def _dropped_gradients(row: Any, dp: Any, lse: Any, delta: Any, words: Any, threshold: Any, factor: Any) -> None:
    for j in range(row.shape[0]):
        p = _exponential(row[j] - lse)
        kept = words[j] >= threshold
        g = dp[j] * factor if kept else dp.dtype.type(0)
        row[j] = p * factor if kept else row.dtype.type(0)
        dp[j] = 0 if p == 0 else p * (g - delta)


@compiled_loop(nogil=True)
def softmax_backward_tile(
    scores: Any,
    dp: Any,
    bias: Any,
    biased: bool,
    causal: bool,
    lse: Any,
    delta: Any,
    words: Any,
    seed: tuple[int, int],
    threshold: int,
    factor: float,
    head: int,
    first_row: int,
    first_column: int,
    length: int,
    all_columns: int,
) -> None:
    """Scores to (dropped) weights, and the weights' gradients to the scores' gradients; a weight of 0 has gradient 0.

    The tile lies as in `softmax_tile`. ``scores``, ``dp``, ``bias``: (heads, rows, columns); ``lse``, ``delta``:
    (heads, rows).
    """
    heads, rows, columns = scores.shape
    limit = np.uint32(threshold)
    per_row = (all_columns + 3) // 4
    wide = scores.dtype.type(factor)
    for g in range(heads):
        for i in range(rows):
            seen = min(max(first_row + i - first_column + 1, 0), columns) if causal else columns
            row = scores[g, i, :seen]
            gradient = dp[g, i, :seen]
            scores[g, i, seen:] = 0
            dp[g, i, seen:] = 0
            if biased:
                _add_bias(row, bias[g, i, :seen])
            if threshold > 0:
                counter = ((head + g) * length + first_row + i) * per_row + first_column // 4
                random_words(words, seed[0], seed[1], counter, (seen + 3) // 4)
                _dropped_gradients(row, gradient, lse[g, i], delta[g, i], words, limit, wide)
            else:
                _gradients(row, gradient, lse[g, i], delta[g, i])


@compiled_loop(nogil=True)
def take_nonfinite(total: Any, weights: Any, values: Any, clean: Any, alpha: float) -> None:
    """``clean = values`` without its NaN and infinities, whose products with weights other than 0 go to ``total``.

    ``total``: (heads, rows, width); ``weights``: (heads, rows, columns); ``values``, ``clean``: (heads, columns,
    width).
    """
    heads, columns, width = values.shape
    for g in range(heads):
        for j in range(columns):
            for c in range(width):
                value = values[g, j, c]
                if np.isfinite(value):
                    clean[g, j, c] = value
                    continue
                for i in range(weights.shape[1]):
                    if weights[g, i, j] != 0:
                        total[g, i, c] += alpha * weights[g, i, j] * value
                clean[g, j, c] = 0


@compiled_loop(nogil=True)
def finish_rows(out: Any, most: Any, total: Any, factor: float) -> None:
    """``out = factor · out / total`` and ``most += log(total)``; a row without keys gives 0 and +∞."""
    for g in range(out.shape[0]):
        for i in range(out.shape[1]):
            if total[g, i] == 0:
                most[g, i] = np.inf
                out[g, i, :] = 0
                continue
            scale = out.dtype.type(factor / total[g, i])
            for c in range(out.shape[2]):
                out[g, i, c] *= scale
            most[g, i] += math.log(total[g, i])
