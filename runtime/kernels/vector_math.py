"""Functions of float32 that compilers turn into vector lanes, for loops that numba compiles; imported only with numba.

``eᵡ − 1`` is formed as ``2ⁿ·(eʳ − 1) + (2ⁿ − 1)`` with ``x = n·ln 2 + r`` (Cody and Waite, Software Manual for the
Elementary Functions, 1980) and the Taylor polynomial of ``eʳ − 1`` on ``|r| ≤ ln 2 / 2``, whose remainder is below
2·10⁻⁸ relative. Results are within 3 units in the last place.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_F = np.float32
_LOG2_E, _ROUND = _F(1.4426950408889634), _F(12582912.0)  # adding 1.5·2²³ rounds to a whole number
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6, _C7 = (_F(1 / n) for n in (2, 6, 24, 120, 720, 5040))
_ZERO, _ONE, _TWO = _F(0), _F(1), _F(2)
#: numba's decorator, which replaces a function of types by one of values.
_typed: Any = intrinsic
#: An array over memory, for use inside a loop.
carray: Any = vars(numba)["carray"]
#: tanh is 1 in float32 beyond.
_TANH_END = _F(9.1)
#: exp is infinite above, and zero below.
_EXP_END, _EXP_START = _F(88.8), _F(-103.98)


@_typed
def pointer(_context: Any, _address: Any) -> Any:
    """The memory at an integer address."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@_typed
def number(_context: Any, _word: Any) -> Any:
    """The float32 whose bits are the lower half of a word."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@_typed
def _power_of_two(_context: Any, _exponent: Any) -> Any:
    """``2ⁿ`` for a whole float32 n in [−126, 127]."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.float32), generate


@_typed
def _with_sign(_context: Any, _value: Any, _sign: Any) -> Any:
    """The first number with the sign of the second."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        value, sign = (builder.bitcast(item, i32) for item in arguments)
        magnitude = builder.and_(value, ir.Constant(i32, 0x7FFFFFFF))
        merged = builder.or_(magnitude, builder.and_(sign, ir.Constant(i32, 0x80000000)))
        return builder.bitcast(merged, ir.FloatType())

    return types.float32(types.float32, types.float32), generate


@njit(inline="always")
def _reduced(x: Any) -> Any:
    """``n`` and ``eʳ − 1``."""
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    tail = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    return n, tail * r * r + r


@njit(inline="always")
def exp(x: Any) -> Any:
    """``eᵡ``; the exponent goes in two halves, so that subnormal results are right."""
    # Comparisons rather than min and max: NaN passes through.
    y = _EXP_END if x > _EXP_END else x  # noqa: FURB136
    y = _EXP_START if y < _EXP_START else y  # noqa: FURB136
    n, e = _reduced(y)
    half = (n * _F(0.5) + _ROUND) - _ROUND
    return (e + _ONE) * _power_of_two(half) * _power_of_two(n - half)


@njit(inline="always")
def tanh(x: Any) -> Any:
    """``(e²ᵡ − 1) / (e²ᵡ + 1)``."""
    a = abs(x)
    a = _TANH_END if a > _TANH_END else a  # noqa: FURB136 (NaN passes through)
    n, e = _reduced(a + a)
    scale = _power_of_two(n)
    e = e * scale + (scale - _ONE)
    return _with_sign(e / (e + _TWO), x)


@njit(inline="always")
def sigmoid(x: Any) -> Any:
    """``1 / (1 + e⁻ᵡ)``."""
    return _ONE / (_ONE + exp(-x))


@njit(inline="always")
def relu(x: Any) -> Any:
    """``x`` where it is positive or NaN, else 0."""
    return _ZERO if x < _ZERO else x  # noqa: FURB136 (NaN passes through)


@njit(inline="always")
def positive(x: Any, y: Any) -> Any:
    """``y`` where x is positive or NaN, else 0."""
    return _ZERO if x <= _ZERO else y
