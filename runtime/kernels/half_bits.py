"""float16 and bfloat16 inside loops that numba compiles, which has no arithmetic for them; imported only with numba.

Arrays of float16 are given as int16, of bfloat16 as uint16: `wide` and `narrow` go by that, and leave others alone.
Each becomes a few instructions, so that the loops around them run in vector lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

_typed: Any = intrinsic
_FLOAT, _HALF, _I16, _I32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)


@_typed
def half_to_float(_context: Any, _bits: Any) -> Any:
    """The float32 of a float16 given as its 16 bits."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALF), _FLOAT)

    return types.float32(types.uint16), generate


@_typed
def float_to_half(_context: Any, _value: Any) -> Any:
    """The 16 bits of a float32 rounded to float16, to nearest, ties to even."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _HALF), _I16)

    return types.uint16(types.float32), generate


@_typed
def _from_brain(_context: Any, _bits: Any) -> Any:
    """The float32 of a bfloat16 given as a uint16."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        wide = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(types.uint16), generate


@_typed
def _to_brain(_context: Any, _value: Any) -> Any:
    """A float32 rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16))
        chosen = builder.select(
            builder.fcmp_unordered("uno", arguments[0], arguments[0]), ir.Constant(_I32, 0x7FC0), rounded
        )
        return builder.trunc(chosen, _I16)

    return types.uint16(types.float32), generate


def wide(value: Any) -> Any:
    """A stored number as one that is computed with."""


def narrow(like: Any, value: Any) -> Any:
    """A number rounded to how ``like`` is stored."""


@overload(wide, inline="always", strict=False)
def _wide(value: Any) -> Any:
    if value == types.int16:
        return lambda value: half_to_float(np.uint16(value))
    if value == types.uint16:
        return lambda value: _from_brain(value)  # noqa: PLW0108 - an intrinsic is no implementation by itself
    return lambda value: value


@overload(narrow, inline="always", strict=False)
def _narrow(like: Any, value: Any) -> Any:  # noqa: ARG001 - numba matches arguments by name
    if like == types.int16:
        return lambda like, value: np.int16(float_to_half(np.float32(value)))  # noqa: ARG005
    if like == types.uint16:
        return lambda like, value: _to_brain(np.float32(value))  # noqa: ARG005
    if like == types.float32:
        return lambda like, value: np.float32(value)  # noqa: ARG005
    return lambda like, value: value  # noqa: ARG005
