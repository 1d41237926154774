"""Dropout masks: ``bernoulli_`` into bytes, several times as fast as ATen's loop, from the same draws.

ATen's CPU loop draws two words of the generator's Mersenne Twister for each element, one element at a time. Here the
same words are made a block at a time, in the generator's own state. Where that state lies inside the generator's object
is no public interface: it is found by its value, and the whole is compared with ATen's own draws once, before first
use. Where anything differs (another build, another engine), ATen draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from typing import Any

import numpy as np
import torch

from planner.graph import Operation
from planner.loops import compiled_loop
from runtime.kernels.aten import bind_aten
from runtime.kernels.binding import Call, Context
from runtime.kernels.compiled import array
from runtime.kernels.twister_kernel import WORDS, bernoulli

#: Bytes from the generator object's start within which its engine is looked for.
_SEARCHED_NBYTES = 160
#: Bytes of the engine before its words: seed (8), words left (4), a flag (4), position (4).
_HEADER_NBYTES = 20
#: Elements drawn to compare with ATen: odd, so that a pair straddles two blocks, and several blocks long.
_COMPARED = 4 * WORDS + 1


@dataclass(frozen=True, slots=True)
class Engine:
    """The default CPU generator's Mersenne Twister, as arrays over its own memory."""

    words: Any
    left: Any
    following: Any
    fresh: Any
    drawn: Any


def bind_bernoulli(operation: Operation, context: Context) -> list[Call]:
    """``out[i] = 1 with probability p else 0``, drawn from torch's default generator in eager's order."""
    (output,) = context.outputs(operation)
    keep = operation.arguments[1] if len(operation.arguments) == 2 else None
    fits = output.dtype in (torch.bool, torch.uint8) and output.is_contiguous() and output.device.type == "cpu"
    found = engine() if fits and isinstance(keep, float) and output.numel() and not operation.keywords else None
    if found is None or not isinstance(keep, float):
        return bind_aten(operation, context)
    return [_draw(found, output, keep)]


def _draw(found: Engine, output: torch.Tensor, keep: float) -> Call:
    loop = _compiled()
    if loop is None:
        raise RuntimeError("no compiled loop")
    limit = np.uint64(ceil(keep * 2**53))
    flat = array(output.view(torch.uint8).view(-1))
    return partial(loop, found.words, found.left, found.following, found.fresh, found.drawn, flat, limit)


@cache
def _compiled() -> Callable[..., Any] | None:
    try:
        made: Callable[..., Any] = compiled_loop(nogil=True)(bernoulli)
    except ImportError:
        return None
    return made


@cache
def engine() -> Engine | None:
    """The default generator's engine, or ``None`` where it was not found, draws otherwise, or numba is missing."""
    if _compiled() is None:
        return None
    generator = torch.default_generator
    before = generator.get_state()
    try:
        torch.rand(3, generator=generator)
        found = _find(generator)
        return found if found is not None and _agrees(found, generator) else None
    finally:
        generator.set_state(before)


def _find(generator: torch.Generator) -> Engine | None:
    """Look for the 624 words that the official state holds in the generator's memory."""
    official = np.frombuffer(generator.get_state().numpy().tobytes(), dtype=np.uint64)
    if official.size < WORDS + 3:
        return None
    words = official[3 : 3 + WORDS].astype(np.uint32).tobytes()
    start: int = generator._cdata  # type: ignore[attr-defined]
    memory = ctypes.string_at(start, _SEARCHED_NBYTES + len(words))
    offset = memory.find(words)
    if offset < _HEADER_NBYTES:
        return None

    def at(kind: Any, address: int, count: int) -> Any:
        return np.ctypeslib.as_array((kind * count).from_address(address))

    base = start + offset
    return Engine(
        words=at(ctypes.c_uint32, base, WORDS),
        left=at(ctypes.c_int32, base - 12, 1),
        following=at(ctypes.c_uint32, base - 4, 1),
        fresh=np.empty(WORDS, dtype=np.uint32),
        drawn=np.empty(WORDS + 1, dtype=np.uint32),
    )


def _agrees(found: Engine, generator: torch.Generator) -> bool:
    """Whether our draws are ATen's, for several probabilities, and leave the generator where ATen leaves it."""
    if not 1 <= found.left[0] <= WORDS or found.following[0] > WORDS:
        return False
    for keep in (0.1, 0.5, 0.9, 1.0):
        start = generator.get_state()
        expected, ours = (torch.empty(_COMPARED, dtype=torch.bool) for _ in range(2))
        expected.bernoulli_(keep)
        end = generator.get_state()
        generator.set_state(start)
        _draw(found, ours, keep)()
        if not torch.equal(expected, ours) or not torch.equal(generator.get_state(), end):
            return False
    return True
