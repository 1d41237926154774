"""Work on ATen's own threads: one more thread pool beside OpenMP's, whose idle threads spin, would contend with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

#: Names under which compiled loops call OpenMP for the number of their thread, and of all.
THREAD, THREADS = "arenaplan_omp_get_thread_num", "arenaplan_omp_get_num_threads"
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_WHOLE = ctypes.CFUNCTYPE(ctypes.c_int)
_ALONE = (_WHOLE(lambda: 0), _WHOLE(lambda: 1))


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
def announce() -> bool:
    """Tell numba where OpenMP's functions are, else of ones that answer for a single thread; whether they are found."""
    from llvmlite import binding

    library = _openmp()
    number, count = _ALONE if library is None else (library.omp_get_thread_num, library.omp_get_num_threads)
    for name, function in ((THREAD, number), (THREADS, count)):
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return library is not None


def available() -> bool:
    """Whether compiled loops can ask OpenMP for the number of their thread."""
    return found() and announce()


def on_all_threads(function: int, arguments: int) -> None:
    """Call the C function at this address with one pointer, on each thread that ATen's loops would use here."""
    library = _openmp()
    if library is None:
        raise RuntimeError("PyTorch's OpenMP library was not found")
    library.GOMP_parallel(function, arguments, 0, 0)


class Loop:
    """A compiled loop bound to the 64-bit words it is given, called on all of ATen's threads; holds what it reads."""

    def __init__(self, function: int, words: torch.Tensor, kept: tuple[torch.Tensor | None, ...] = ()) -> None:
        self.function = function
        self.words = words
        self.address = words.data_ptr()
        self.kept = kept

    def __call__(self) -> None:
        on_all_threads(self.function, self.address)


def share(function: int, words: Any, members: int) -> None:
    """Call the C function at this address with 64-bit words on that many threads.

    The first word says which of the members is called, or −1 where OpenMP is to be asked; the second, of how many.
    Where ATen's threads cannot be had, a thread pool of as many stands in.
    """
    words[:2] = 0 if members == 1 else -1, members
    if members == 1:
        _CALLBACK(function)(words.ctypes.data)
    elif (library := _openmp()) is not None:
        library.GOMP_parallel(function, words.ctypes.data, members, 0)
    else:
        each = [words.copy() for _ in range(members)]
        for member, own in enumerate(each):
            own[0] = member
        in_pool([partial(_CALLBACK(function), own.ctypes.data) for own in each])


def run(work: Callable[[int, int], None]) -> None:
    """Call ``work(member, members)`` once on each thread of ATen's, for code that leaves Python's lock for long.

    Where ATen's threads cannot be had, a thread pool of as many stands in. Returns when all have ended; what one
    raised is raised here.
    """
    library = _openmp()
    ended: dict[int, BaseException | None] = {}

    def attempt(member: int, members: int) -> None:
        try:
            work(member, members)
            ended[member] = None
        except BaseException as error:  # noqa: BLE001 - nothing may pass through the C frames; raised below
            ended[member] = error

    if torch.get_num_threads() == 1:
        attempt(0, 1)
    elif library is None:
        members = torch.get_num_threads()
        in_pool([partial(attempt, member, members) for member in range(members)])
    else:
        enter = _CALLBACK(lambda _: attempt(library.omp_get_thread_num(), library.omp_get_num_threads()))
        on_all_threads(ctypes.cast(enter, ctypes.c_void_p).value or 0, 0)
        if 0 not in ended:  # the caller is member 0; what is raised outside of `attempt` ctypes only prints
            raise KeyboardInterrupt
    for raised in ended.values():
        if raised is not None:
            raise raised


def in_pool(tasks: Iterable[Callable[[], None]]) -> None:
    """Call each task on a thread of its own, and return when all have ended, Ctrl-C or not; raises what one raised.

    A task that outlived the call would write into the arena under the next one.
    """
    calls = list(tasks)
    waiting: list[Future[None]] = []
    failure: BaseException | None = None
    try:
        for call in calls:
            waiting.append(_pool(len(calls)).submit(call))  # noqa: PERF401 - those submitted before Ctrl-C are known
    except BaseException as error:  # noqa: BLE001 - raised below
        failure = error
    while True:
        try:
            wait(waiting)
            break
        except KeyboardInterrupt as error:
            failure = error
    for raised in (failure, *(future.exception() for future in waiting)):
        if raised is not None:
            raise raised


@cache
def _pool(members: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(members, thread_name_prefix="arenaplan")


if hasattr(os, "register_at_fork"):  # a forked process has the pools' books, but not their threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
