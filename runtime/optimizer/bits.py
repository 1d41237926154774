"""Bits as numbers inside compiled loops: addresses and the bits of floats, beside those of `half_bits`.

Each function here becomes one or two LLVM instructions, so that the loops around it run in vector lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.ir as ll
import numba as numba_package
from numba import extending
from numba import types as numba_types

from planner.loops import compiled_function, compiled_loop
from runtime import team

#: numba declares what is compiled, not what is called.
numba: Any = numba_package
types: Any = numba_types
carray = numba.carray
Function = Callable[..., Any]


def intrinsic(function: Function) -> Function:
    """`numba.extending.intrinsic`."""
    made: Any = extending.intrinsic
    return cast("Function", made(function))


def compile_loop(function: Function) -> Function:
    """Compile at the first call, then from disk; other threads go on meanwhile."""
    return cast("Function", compiled_loop(nogil=True)(function))


def compile_function(function: Function) -> int:
    """Compile, or take from disk, a C function of an address of 64-bit words; returns its address."""
    team.announce()
    made: Any = compiled_function(types.void(types.CPointer(types.int64)))(function)
    return int(made.address)


def inline_element(function: Function) -> Function:
    """Put the function into each loop that calls it, before types are found: constants choose among its branches."""
    return cast("Function", numba.njit(inline="always", error_model="numpy")(function))


_FLOAT, _I32 = ll.FloatType(), ll.IntType(32)


def _pointer(element: types.Type) -> Any:
    """An intrinsic that turns an address (int64) into a pointer to ``element``."""

    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        if address is not types.int64:
            return None
        return types.CPointer(element)(types.int64), build

    return pointer


pointer_i8 = _pointer(types.int8)
pointer_u8 = _pointer(types.uint8)
pointer_u16 = _pointer(types.uint16)
pointer_i16 = _pointer(types.int16)
pointer_i64 = _pointer(types.int64)
pointer_f32 = _pointer(types.float32)
pointer_f64 = _pointer(types.float64)

#: The number of the calling OpenMP thread, and of all.
THREAD_NUMBER = types.ExternalFunction(team.THREAD, types.int32())
THREAD_COUNT = types.ExternalFunction(team.THREADS, types.int32())


@intrinsic
def double(_context: Any, _word: Any) -> Any:
    """The float64 with the bits of an int64."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ll.DoubleType())

    return types.float64(types.int64), build


@intrinsic
def float_bits(_context: Any, _value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), build


@intrinsic
def bits_float(_context: Any, _bits: Any) -> Any:
    """The float32 with the bits of an int32."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), build


@intrinsic
def rint(_context: Any, _value: Any) -> Any:
    """A float32 rounded to an integer, to nearest, ties to even."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_FLOAT]), arguments)

    return types.float32(types.float32), build
