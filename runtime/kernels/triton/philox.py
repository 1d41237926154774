"""The random numbers of dropout: Philox4x32-10 of a seed and a counter, so that no mask is ever stored.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. An element is kept if the upper 31
bits of its word are at least ``p · 2³¹``. Element ``(row, column)`` takes word ``column mod 4`` of the counter
``offset + row · ⌈width / 4⌉ + ⌊column / 4⌋``: every row starts with a counter of its own, and one call of the generator
serves four elements.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

#: Rounds of the generator; the paper calls seven safe and uses ten.
ROUNDS = 10


def threshold(p: float) -> int:
    """The least word, of 31 bits, that is kept when elements are dropped with probability ``p``."""
    return min(round(p * 2.0**31), 2**31 - 1)


def counters_per_row(width: int) -> int:
    """Counters that one row of ``width`` elements takes."""
    return -(-width // 4)


@triton.jit
def keep_words(seed, offset, rows, columns4, per_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """31-bit words, (ROWS, BLOCK) int32, of ``rows`` (ROWS, int64) by four times ``columns4`` (BLOCK // 4)."""
    counter = offset + rows[:, None] * per_row + columns4[None, :]
    one, two, three, four = tl.randint4x(seed, counter)
    words = tl.join(tl.join(one, three), tl.join(two, four))
    return (tl.reshape(words, (ROWS, BLOCK)).to(tl.uint32, bitcast=True) >> 1).to(tl.int32)


def reference_keep(seed: int, offset: int, rows: int, width: int, p: float) -> NDArray[np.bool_]:
    """The mask of kept elements, ``(rows, width)``, by the same definition in numpy."""
    per_row = counters_per_row(width)
    counter = np.uint64(offset) + np.arange(rows * per_row, dtype=np.uint64)
    low, high = counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32)
    state = [low, high, np.zeros_like(low), np.zeros_like(low)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(ROUNDS):
        first, second = np.uint64(0xD2511F53) * state[0], np.uint64(0xCD9E8D57) * state[2]
        state = [
            (second >> shift) ^ state[1] ^ key[0],
            second & mask,
            (first >> shift) ^ state[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    words = np.stack(state, axis=-1).reshape(rows, per_row * 4)[:, :width]
    return (words >> np.uint64(1)) >= np.uint64(threshold(p))
