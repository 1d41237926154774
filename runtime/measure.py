"""What PyTorch allocates while something runs, by torch.profiler's memory events."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

#: Name of the profiler's event behind which events count.
_START = "arenaplan.start"


@dataclass(frozen=True, slots=True)
class Allocations:
    """Allocator activity of one call.

    Attributes:
        calls: allocations of a positive size.
        nbytes: their total.
        peak_nbytes: most bytes held at once above the start.
        held_nbytes: bytes still held at the end (what was freed counts against it).
    """

    calls: int
    nbytes: int
    peak_nbytes: int
    held_nbytes: int


def now(device: torch.device | str) -> float:
    """Seconds of the host's clock, all work on the device done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def allocations(call: Callable[[], object], *, before: Callable[[], object] | None = None) -> Allocations:
    """Run ``call`` once under torch.profiler and count its CPU allocator events.

    Args:
        call: what is counted.
        before: run first, uncounted. The profiler does not see memory freed that it did not see allocated: what
            ``call`` frees of this counts only if it was allocated in here.
    """
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = None if before is None else before()
        with record_function(_START):
            pass
        kept = call()
    events = profiler.profiler.kineto_results.events() if profiler.profiler is not None else []
    # Two events of one nanosecond keep their order.
    ordered = sorted(events, key=lambda event: event.start_ns())
    start = next((event.start_ns() for event in ordered if event.name() == _START), 0)
    sizes = [event.nbytes() for event in ordered if event.name() == "[memory]" and event.start_ns() >= start]
    del kept, made
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    positive = [size for size in sizes if size > 0]
    return Allocations(len(positive), sum(positive), peak, sum(sizes))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep the profiler's own start and stop lines, written by C++, off the user's terminal."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # no standard error to keep quiet
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
