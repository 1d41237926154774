"""Work on ATen's own threads: one more thread pool beside OpenMP's, whose idle threads spin, would contend with it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

#: Names under which compiled loops call OpenMP for the number of their thread, and of all.
THREAD, THREADS = "arenaplan_omp_get_thread_num", "arenaplan_omp_get_num_threads"
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that this build of PyTorch runs on, if it is GNU's and lies beside it."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            for name in ("omp_get_thread_num", "omp_get_num_threads"):
                getattr(library, name).argtypes, getattr(library, name).restype = (), ctypes.c_int
        except (OSError, AttributeError):
            continue
        return library
    return None


def found() -> bool:
    """Whether ATen's threads can be had."""
    return _openmp() is not None


@cache
def available() -> bool:
    """Whether compiled loops can run on ATen's threads; if so, what they call inside is known to numba by name."""
    library = _openmp()
    if library is None:
        return False
    from llvmlite import binding

    for name, function in (
        (THREAD, library.omp_get_thread_num),
        (THREADS, library.omp_get_num_threads),
    ):
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return True


def on_all_threads(function: int, arguments: int) -> None:
    """Call the C function at this address with one pointer, on each thread that ATen's loops would use here."""
    library = _openmp()
    if library is None:
        raise RuntimeError("PyTorch's OpenMP library was not found")
    library.GOMP_parallel(function, arguments, 0, 0)


def run(work: Callable[[int, int], None]) -> None:
    """Call ``work(member, members)`` once on each thread of ATen's, for code that leaves Python's lock for long.

    Where ATen's threads cannot be had, a thread pool of as many stands in. Returns when all have ended; what one
    raised is raised here.
    """
    library = _openmp()
    failures: list[BaseException] = []

    def attempt(member: int, members: int) -> None:
        try:
            work(member, members)
        except BaseException as error:  # noqa: BLE001 - nothing may pass through the C frames; raised below
            failures.append(error)

    if torch.get_num_threads() == 1:
        attempt(0, 1)
    elif library is None:
        members = torch.get_num_threads()
        list(_pool(members).map(attempt, range(members), [members] * members))
    else:
        enter = _CALLBACK(lambda _: attempt(library.omp_get_thread_num(), library.omp_get_num_threads()))
        on_all_threads(ctypes.cast(enter, ctypes.c_void_p).value or 0, 0)
    if failures:
        raise failures[0]


@cache
def _pool(members: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(members, thread_name_prefix="arenaplan")
