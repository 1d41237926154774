"""A tile of 256 elements between memory and FP32 buffers in a core's first cache, compiled by numba.

Each loop touches few enough arrays for LLVM to prove them apart at run time and to use vector lanes. All arithmetic is
FP32 in the order written, without fusing, so that the result is the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.kernels.half_bits import float_to_half, half_to_float
from runtime.optimizer.bits import (
    bits_float,
    carray,
    compile_loop,
    float_bits,
    inline_element,
    pointer_f32,
    pointer_i16,
    pointer_u16,
    rint,
)
from runtime.optimizer.codes import (
    FLOAT16,
    FLOAT32,
    GRID_EXPONENT,
    MASTER,
    NONE,
    SPLIT,
    STOCHASTIC,
    UNIT_EXPONENT,
)

_ZERO = np.float32(0)
_UP, _DOWN = np.float32(2.0**GRID_EXPONENT), np.float32(2.0**-GRID_EXPONENT)
_SMALLEST_NORMAL, _SUBNORMAL_UP, _SUBNORMAL_DOWN = np.float32(2.0**-14), np.float32(2.0**24), np.float32(2.0**-24)
_TO_UNIT = np.float32(2.0**-24)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_HIGH = np.int32(-(2**31))


@compile_loop
def mix(x: Any) -> Any:
    """A 32-bit hash of a 32-bit number: xor-shifts and multiplications by constants found by search (lowbias32)."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compile_loop
def stream_key(seed: Any, step: Any, high: Any) -> Any:
    """The key of a training step and of the upper half of an element's number."""
    key = mix(np.uint32(np.uint32(seed) + np.uint32(0x9E3779B9)))
    key = mix(np.uint32(key ^ np.uint32(step)))
    return mix(np.uint32(key ^ np.uint32(high)))


@compile_loop
def bfloat_bits(bits: Any) -> Any:
    """FP32 bits rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""
    rounded = np.int32((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))
    quiet = np.int32((bits >> np.int32(16)) | np.int32(0x40))
    return quiet if (bits & _MAGNITUDE) > np.int32(0x7F800000) else rounded


@compile_loop
def unit_bits(value: Any) -> Any:
    """FP32 bits of 2^(e − 25), e the exponent of a float16 given as FP32, at least −14: the unit of its remainder.

    With the float16's exponent field E = e + 15, at least 1, that is 2^(E − 40): `codes.UNIT_EXPONENT`.
    """
    exponent = max(np.int32(float_bits(value) & np.int32(0x7F800000)), np.int32(113 << 23))
    return np.int32(exponent - np.int32((UNIT_EXPONENT - 15) << 23))


@inline_element
def plus(value: Any, factor: Any, x: Any) -> Any:
    """``value + factor · x``; what is infinite times 0 is nothing here."""
    return value + factor * x if factor != _ZERO else value


@inline_element
def elements(kind: Any, address: Any, n: Any) -> Any:
    """So many parameters or gradients in memory: FP32, or 16-bit ones as their bits."""
    if kind == FLOAT32:
        return carray(pointer_f32(address), (n,))
    else:  # noqa: RET505 - numba drops the branches of other kinds where each has its own
        return carray(pointer_u16(address), (n,))


@inline_element
def kept_elements(master: Any, address: Any, parameters: Any, n: Any) -> Any:
    """What is kept beyond so many parameters; where that is nothing, the parameters stand in and are not looked at."""
    if master == MASTER:
        return carray(pointer_f32(address), (n,))
    elif master == SPLIT:  # noqa: RET505 - as above
        return carray(pointer_i16(address), (n,))
    else:
        return parameters


@inline_element
def gradient_value(kind: Any, bits: Any) -> Any:
    """A gradient in FP32."""
    if kind == FLOAT32:
        return bits
    elif kind == FLOAT16:  # noqa: RET505 - as above
        return half_to_float(bits)
    else:
        return bits_float(np.int32(np.int32(bits) << np.int32(16)))


@inline_element
def full_precision(kind: Any, master: Any, bits: Any, kept: Any) -> Any:
    """The full-precision parameter, of the parameter and what is kept beyond it.

    A master that no longer rounds to its parameter is out of date: someone wrote the parameter, which then counts.
    """
    shown = gradient_value(kind, bits)
    if kind == FLOAT32 or master in (NONE, STOCHASTIC):
        return shown
    elif master == SPLIT:  # noqa: RET505 - as above
        if kind == FLOAT16:
            return shown - np.float32(kept) * bits_float(unit_bits(shown))
        else:  # noqa: RET505 - as above
            return bits_float(np.int32(float_bits(shown) + np.int32(kept)))
    elif kind == FLOAT16:
        return kept if float_to_half(kept) == bits else shown
    else:
        return kept if np.uint16(bfloat_bits(float_bits(kept))) == bits else shown


@compile_loop
def store_parameter(kind: Any, master: Any, address: Any, kept: Any, n: Any, w: Any, key: Any, first: Any) -> None:
    """Write the parameter, and its master or remainder; ``key`` and ``first`` number the elements' random bits."""
    if kind == FLOAT32:
        full = carray(pointer_f32(address), (n,))
        for i in range(n):
            full[i] = w[i]
        return
    p = carray(pointer_u16(address), (n,))
    if master == MASTER:
        kept_full = carray(pointer_f32(kept), (n,))
        if kind == FLOAT16:
            for i in range(n):
                value = rint(w[i] * _UP) * _DOWN
                kept_full[i] = value
                p[i] = float_to_half(value)
        else:
            for i in range(n):
                bits = float_bits(w[i])
                top = bfloat_bits(bits)
                rest = min(np.int32(bits - np.int32(top << np.int32(16))), np.int32(0x7FFF))
                nan = (bits & _MAGNITUDE) > np.int32(0x7F800000)
                kept_full[i] = w[i] if nan else bits_float(np.int32(np.int32(top << np.int32(16)) + rest))
                p[i] = np.uint16(top)
    elif master == SPLIT:
        low = carray(pointer_i16(kept), (n,))
        if kind == FLOAT16:
            for i in range(n):
                value = rint(w[i] * _UP) * _DOWN
                half = float_to_half(value)
                shown = half_to_float(half)
                finite = (half & np.uint16(0x7C00)) != np.uint16(0x7C00)
                difference = (shown - value) if finite else _ZERO
                p[i] = half
                # The reciprocal of a power of two: exponent fields of both add up to 254.
                low[i] = np.int16(difference * bits_float(np.int32(np.int32(254 << 23) - unit_bits(shown))))
        else:
            for i in range(n):
                bits = float_bits(w[i])
                top = bfloat_bits(bits)
                rest = min(np.int32(bits - np.int32(top << np.int32(16))), np.int32(0x7FFF))
                nan = (bits & _MAGNITUDE) > np.int32(0x7F800000)
                p[i] = np.uint16(top)
                low[i] = np.int16(0) if nan else np.int16(rest)
    elif master == STOCHASTIC:
        if kind == FLOAT16:
            for i in range(n):
                p[i] = random_half(w[i], mix(np.uint32(np.uint32(first + np.uint32(i)) ^ key)))
        else:
            for i in range(n):
                p[i] = random_bfloat(w[i], mix(np.uint32(np.uint32(first + np.uint32(i)) ^ key)))
    elif kind == FLOAT16:
        for i in range(n):
            p[i] = float_to_half(w[i])
    else:
        for i in range(n):
            p[i] = np.uint16(bfloat_bits(float_bits(w[i])))


@compile_loop
def random_half(value: Any, random: Any) -> Any:
    """A float16 neighbour of ``value``, the nearer the likelier: its mean is ``value``."""
    bits = float_bits(value)
    size = bits_float(np.int32(bits & _MAGNITUDE))
    normal = bits_float(np.int32((bits + np.int32(random & np.uint32(0x1FFF))) & np.int32(-0x2000)))
    part = np.float32(np.int32(random >> np.uint32(8))) * _TO_UNIT
    count = np.floor(size * _SUBNORMAL_UP + part) * _SUBNORMAL_DOWN
    small = bits_float(np.int32(float_bits(count) | (bits & _HIGH)))
    return float_to_half(normal if size >= _SMALLEST_NORMAL else small)


@compile_loop
def random_bfloat(value: Any, random: Any) -> Any:
    """A bfloat16 neighbour of ``value``, the nearer the likelier: its mean is ``value``."""
    bits = float_bits(value)
    finite = (bits & np.int32(0x7F800000)) != np.int32(0x7F800000)
    moved = np.int32(bits + np.int32(random & np.uint32(0xFFFF))) >> np.int32(16)
    return np.uint16(moved if finite else bfloat_bits(bits))
