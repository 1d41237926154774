"""8-bit moments, compiled by numba: Adam over a few blocks of 256 at a time, and the codes themselves (`codes`).

Codes are read and written with integer operations on the bits of FP32 numbers; no root, no division but one for each
block. Each loop is short enough for the registers of a core; what passes from one to the next lies in its first cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.optimizer.bits import (
    bits_float,
    carray,
    compile_loop,
    float_bits,
    pointer_f32,
    pointer_i8,
    pointer_u8,
)
from runtime.optimizer.codes import (
    RANDOM_FACTOR,
    RANDOM_STEP,
    SIGNED,
    TILE,
    TINY,
    UNSIGNED,
    ZERO_PLACE,
    float32_bits,
)
from runtime.optimizer.tile_kernel import mix, plus

_ONE, _ZERO = np.float32(1), np.float32(0)
_MAGNITUDE, _HIGH = np.int32(0x7FFFFFFF), np.int32(-(2**31))
_TINY = np.float32(TINY)
_PLACE, _PLACE_FLOAT = np.int32(ZERO_PLACE), np.float32(ZERO_PLACE)
_SIGNED_ZERO, _UNSIGNED_ZERO = np.float32(SIGNED.zero), np.float32(UNSIGNED.zero)
#: What the code at the top stands for, as a share of the scale.
_SIGNED_WHOLE, _UNSIGNED_WHOLE = _ONE - _SIGNED_ZERO, _ONE - _UNSIGNED_ZERO
_SIGNED_VALUE, _UNSIGNED_VALUE = np.int32(SIGNED.to_value), np.int32(UNSIGNED.to_value)
_TO_SIGNED, _TO_UNSIGNED = np.int32(SIGNED.to_place), np.int32(UNSIGNED.to_place)
_SIGNED_BASE, _UNSIGNED_BASE = (np.uint32(float32_bits(form.base)) for form in (SIGNED, UNSIGNED))
_SIGNED_SHIFT, _UNSIGNED_SHIFT = np.int32(SIGNED.fraction), np.int32(UNSIGNED.fraction)
#: The sum that ends in code 1.
_SMALLEST = np.float32(257)


@compile_loop
def decode_signed(code: Any, factor: Any) -> Any:
    """``factor · (F(|code| + 4) − F(4))`` with the code's sign; the factor is not negative."""
    place = np.float32(np.int32(abs(code) + _PLACE))
    size = bits_float(np.int32(np.int32(float_bits(place) << np.int32(2)) + _SIGNED_VALUE)) - _SIGNED_ZERO
    return bits_float(np.int32(float_bits(size * factor) | (code & _HIGH)))


@compile_loop
def decode_unsigned(code: Any, factor: Any) -> Any:
    """``factor · (F(code + 4) − F(4))``."""
    place = np.float32(np.int32(code + _PLACE))
    size = bits_float(np.int32(np.int32(float_bits(place) << np.int32(2)) + _UNSIGNED_VALUE)) - _UNSIGNED_ZERO
    return size * factor


@compile_loop
def encode_signed(x: Any, per: Any, random: Any) -> Any:
    """The code on one or the other side of ``x · per``, by the upper half of 32 random bits."""
    size = np.int32(float_bits(abs(x) * per + _SIGNED_ZERO) >> np.int32(2))
    place = bits_float(np.int32(size + _TO_SIGNED)) - _PLACE_FLOAT
    place = bits_float(np.int32(float_bits(place) | (float_bits(x) & _HIGH)))
    addend = bits_float(np.int32((random >> np.uint32(18)) | _SIGNED_BASE))
    return np.int8(float_bits(place + addend) >> _SIGNED_SHIFT)


@compile_loop
def encode_unsigned(x: Any, per: Any, random: Any, nothing: Any) -> Any:
    """The code on one or the other side of ``x · per``, by the lower half of 32 random bits; of more than 0 not 0.

    ``nothing``: zero, or infinity where the block is all zero.
    """
    size = np.int32(np.uint32(float_bits(x * per + _UNSIGNED_ZERO)) >> np.uint32(2))
    place = bits_float(np.int32(size + _TO_UNSIGNED))
    total = place + bits_float(np.int32((random & np.uint32(0xFFFE)) | _UNSIGNED_BASE))
    total = max(total, _SMALLEST) if x > nothing else total
    return np.uint8(float_bits(total) >> _UNSIGNED_SHIFT)


@compile_loop
def scaled(largest: Any, whole: Any) -> Any:
    """A block's scale and what its elements are multiplied by, from its largest magnitude; 0 and 0 for a tiny one."""
    if largest < _TINY:
        return _ZERO, _ZERO
    return largest / whole, whole / largest


@compile_loop
def random_start(key: Any, element: Any) -> Any:
    """Random bits of a block that begins with this element; those of its elements follow by `random_bits`."""
    return mix(np.uint32(np.uint32(element) ^ np.uint32(key)))


@compile_loop
def random_bits(at: Any) -> Any:
    """32 bits of one element of a block; ``at`` grows by RANDOM_STEP from one to the next."""
    return np.uint32((at ^ (at >> np.uint32(15))) * np.uint32(RANDOM_FACTOR))


@compile_loop
def adam_blocks(
    g: Any, w: Any, codes: Any, scales: Any, m: Any, v: Any, blocks: Any, c: Any, keep1: Any, largest: Any
) -> None:
    """Adam of whole blocks; new moments into ``m`` and ``v``, the largest magnitudes of both into ``largest``.

    ``g`` holds the gradient with weight decay, if that is part of it; ``codes`` and ``scales`` are addresses of both
    moments'. Formulas as in `update_kernel.adam`, but that ``m · β₁ + g · (1 − β₁)`` is not rearranged.
    """
    shrink, _, take1, keep2, take2, size, root, eps = c
    first_scales, second_scales = carray(pointer_f32(scales[0]), (blocks,)), carray(pointer_f32(scales[1]), (blocks,))
    for block in range(blocks):
        at = block * TILE
        first_codes = carray(pointer_i8(codes[0] + at), (TILE,))
        second_codes = carray(pointer_u8(codes[1] + at), (TILE,))
        factor1, factor2 = first_scales[block] * keep1, second_scales[block] * keep2
        worst1, worst2 = np.int32(0), np.uint32(0)
        for i in range(TILE):
            x = w[at + i]
            gradient = g[at + i]
            first = decode_signed(np.int32(first_codes[i]), factor1) + gradient * take1
            second = decode_unsigned(np.int32(second_codes[i]), factor2) + (gradient * gradient) * take2
            m[at + i] = first
            v[at + i] = second
            worst1 = max(worst1, np.int32(float_bits(first) & _MAGNITUDE))
            worst2 = max(worst2, np.uint32(float_bits(second)))  # never negative; a NaN's sign may be
            w[at + i] = x - plus(size * (first / (np.sqrt(second) * root + eps)), shrink, x)
        largest[2 * block] = bits_float(worst1)
        largest[2 * block + 1] = bits_float(np.int32(worst2 & np.uint32(0x7FFFFFFF)))


@compile_loop
def encode_blocks(
    codes: Any, scales: Any, m: Any, v: Any, blocks: Any, largest: Any, key: Any, first_element: Any
) -> None:
    """Both moments of whole blocks to codes, and their scales."""
    first_scales, second_scales = carray(pointer_f32(scales[0]), (blocks,)), carray(pointer_f32(scales[1]), (blocks,))
    for block in range(blocks):
        at = block * TILE
        first_codes = carray(pointer_i8(codes[0] + at), (TILE,))
        second_codes = carray(pointer_u8(codes[1] + at), (TILE,))
        first_scales[block], per1 = scaled(largest[2 * block], _SIGNED_WHOLE)
        second_scales[block], per2 = scaled(largest[2 * block + 1], _UNSIGNED_WHOLE)
        nothing = _ZERO if per2 != _ZERO else np.float32(np.inf)
        place = random_start(key, first_element + at)
        for i in range(TILE):
            random = random_bits(place)
            place = np.uint32(place + np.uint32(RANDOM_STEP))
            first_codes[i] = encode_signed(m[at + i], per1, random)
            second_codes[i] = encode_unsigned(v[at + i], per2, random, nothing)


@compile_loop
def load_signed(codes: Any, scale: Any, keep: Any, n: Any, out: Any) -> None:
    """``out`` = a block's first moment times ``keep``; addresses of its codes and of its scale."""
    c = carray(pointer_i8(codes), (n,))
    factor = carray(pointer_f32(scale), (1,))[0] * keep
    for i in range(n):
        out[i] = decode_signed(np.int32(c[i]), factor)


@compile_loop
def store_signed(codes: Any, scale: Any, n: Any, x: Any, key: Any, first_element: Any) -> None:
    """Encode a block of the first moment."""
    c = carray(pointer_i8(codes), (n,))
    worst = np.int32(0)
    for i in range(n):
        worst = max(worst, np.int32(float_bits(x[i]) & _MAGNITUDE))
    carray(pointer_f32(scale), (1,))[0], per = scaled(bits_float(worst), _SIGNED_WHOLE)
    place = random_start(key, first_element)
    for i in range(n):
        c[i] = encode_signed(x[i], per, random_bits(place))
        place = np.uint32(place + np.uint32(RANDOM_STEP))
