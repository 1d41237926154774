"""Compilation of Python loops by numba, kept on disk where a folder for that can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled_loop(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: numba's ``njit`` with these options; what it compiles is kept for later processes if possible.

    numba keeps it beside the source or under the user's cache folder, and refuses the option where it may write to
    neither (a container's read-only file system, no home): the loop is then compiled in every process.

    Raises:
        ImportError: numba is not installed.
    """
    import numba

    options = {"error_model": "numpy", **options}

    def compile_function(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return compile_function
