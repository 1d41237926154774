"""What a search runs on: the interpreter for small ones, compiled loops for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.colouring import first_fit_kernel, search_kernel
from planner.loops import compiled_loop

SAFE_TOTAL = 2**50
"""Compiled loops add sizes and multiply offsets by up to 2**10 in 64 bits; larger totals stay interpreted."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel and the arrays it reads.

    Attributes:
        advance: ``search_kernel.advance``, interpreted or compiled.
        array: makes its array from a list.
        full: makes an array of so many equal numbers.
        slice_nodes: nodes between two looks at the clock.
    """

    advance: Callable[..., int]
    array: Callable[[list[int]], Any]
    full: Callable[[int, int], Any]
    slice_nodes: int


def interpreted() -> Backend:
    """Return the backend that needs nothing but Python, and has no limit on numbers."""
    return Backend(search_kernel.advance, list, _repeated, 200)


def _repeated(count: int, value: int) -> list[int]:
    """Return a list of so many equal numbers."""
    return [value] * count


@cache
def compiled() -> Backend | None:
    """Return the numba backend, or ``None`` where numba is not installed. Compiles at first use, then from disk."""
    try:
        import numba  # noqa: F401
        import numpy as np
    except ImportError:
        return None

    def array(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    def full(count: int, value: int) -> Any:
        return np.full(count, value, dtype=np.int64)

    advance = compiled_loop()(search_kernel.advance)
    return Backend(advance, array, full, 20_000)


def loaded() -> Backend:
    """Return the compiled backend if some search ran on it before, else the interpreted one: both search alike."""
    backend = compiled() if compiled.cache_info().currsize else None
    return backend or interpreted()


@cache
def compiled_first_fit() -> Callable[..., int] | None:
    """Return ``first_fit_kernel.place`` compiled, or ``None`` where numba is not installed."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return None
    place: Callable[..., int] = compiled_loop()(first_fit_kernel.place)
    return place
