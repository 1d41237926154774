"""Compilation of Python loops by numba, kept on disk where a folder for that can be written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def compiled_loop(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: numba's ``njit`` with these options; what it compiles is kept for later processes if possible.

    numba keeps it beside the source or under the user's cache folder. Where it may write to neither (a container's
    read-only file system, no home), or the disk is full, the loop is compiled in every process.

    Raises:
        ImportError: numba is not installed.
    """
    import numba

    options = {"error_model": "numpy", **options}

    def compile_function(function: Callable[..., Any]) -> Any:
        made = numba.njit(**options)(function)
        with suppress(RuntimeError):  # no folder: compiled in every process
            made._cache = _forgiving(function)  # as numba's own `cache=True` sets it
        return made

    return compile_function


def compiled_function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same for a C function of that numba signature (`numba.cfunc`), compiled at once; it has an ``address``."""
    from numba.core.ccallback import CFunc

    def compile_function(function: Callable[..., Any]) -> Any:
        made: Any = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
        with suppress(RuntimeError):
            made._cache = _forgiving(function)  # as `cfunc(cache=True)` sets it
        made.compile()
        return made

    return compile_function


def _forgiving(function: Callable[..., Any]) -> Any:
    """The store of compiled functions, for which a damaged file is no file, and a full disk no error."""
    from numba.core.caching import FunctionCache

    store: Any = FunctionCache

    class Forgiving(store):  # type: ignore[misc]
        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # noqa: BLE001 - whatever reading a cut or foreign file raises
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception:  # noqa: BLE001 - a full disk, an index that cannot be read
                return

    made: Any = Forgiving
    return made(function)
