"""The Mersenne Twister of PyTorch's CPU generator, a block at a time. Plain Python, so numba can compile it.

Matsumoto and Nishimura, "Mersenne Twister" (1998), MT19937. Every loop walks slices of one length, which compilers turn
into vector lanes; the recurrence reaches back 227 words at the nearest, far enough for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = 624
#: Words behind which the recurrence reads its own new values.
_AHEAD = 227
_UPPER, _LOWER, _TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_ONE, _ZERO = np.uint32(1), np.uint32(0)
_MASK_7, _MASK_15 = np.uint32(0x9D2C5680), np.uint32(0xEFC60000)
_SHIFT_7, _SHIFT_11, _SHIFT_15, _SHIFT_18 = np.uint32(7), np.uint32(11), np.uint32(15), np.uint32(18)
#: The 53 bits that make a double in [0, 1).
_FRACTION, _HALF = np.uint64(2**53 - 1), np.uint64(32)


def bernoulli(state: Any, left: Any, following: Any, fresh: Any, drawn: Any, out: Any, limit: Any) -> None:
    """Fill ``out`` with ``u < limit · 2⁻⁵³``, u a double in [0, 1) made from the next two words for each element.

    The engine is left where those draws leave it.

    Args:
        state: 624 words, uint32.
        left: one more than the words of the block not yet drawn, int32, one element.
        following: position of the next word, uint32, one element.
        fresh: scratch of 624 words.
        drawn: scratch of 625 words.
        out: uint8.
        limit: probability · 2⁵³, uint64.
    """
    done, carried, position, words = 0, 0, np.int64(following[0]), np.int64(left[0]) - 1
    while done < out.size:
        if words == 0:
            for start, end in ((0, _AHEAD), (_AHEAD, 2 * _AHEAD), (2 * _AHEAD, WORDS - 1), (WORDS - 1, WORDS)):
                current, new = state[start:end], fresh[start:end]
                after = fresh[:1] if end == WORDS else state[start + 1 : end + 1]
                far = state[WORDS - _AHEAD :] if start == 0 else fresh[start - _AHEAD :]
                for i in range(new.size):
                    y = np.uint32((current[i] & _UPPER) | (after[i] & _LOWER))
                    new[i] = far[i] ^ (y >> _ONE) ^ (_TWIST if after[i] & _ONE else _ZERO)
            state[:] = fresh
            position, words = np.int64(0), np.int64(WORDS)
        count = min(words, 2 * (out.size - done) - carried)
        block, target = state[position : position + count], drawn[carried : carried + count]
        for i in range(target.size):
            y = block[i]
            y = np.uint32(y ^ (y >> _SHIFT_11))
            y = np.uint32(y ^ ((y << _SHIFT_7) & _MASK_7))
            y = np.uint32(y ^ ((y << _SHIFT_15) & _MASK_15))
            target[i] = np.uint32(y ^ (y >> _SHIFT_18))
        pairs = (carried + count) // 2
        flags = out[done : done + pairs]
        for i in range(flags.size):
            # The first word drawn is the upper half.
            word = (np.uint64(drawn[2 * i]) << _HALF) | np.uint64(drawn[2 * i + 1])
            flags[i] = (word & _FRACTION) < limit
        carried = (carried + count) % 2  # a pair may straddle two blocks
        if carried:
            drawn[0] = drawn[2 * pairs]
        done, position, words = done + pairs, position + count, words - count
    left[0], following[0] = words + 1, position
