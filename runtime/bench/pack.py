"""Our packing beside omnimalloc's, on the same problems, in one process, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from planner.bounds import lower_bound
from planner.colouring import colour
from planner.packing_file import read_problem
from planner.problem import Problem
from runtime.bench.environment import environment
from runtime.bench.pack_problems import random_lifetimes, training_step

BUFFERS = (1_000, 10_000, 20_000)
"""Sizes of the synthetic problems compared; omnimalloc's portfolio takes a minute on the largest."""

SMOKE_BUFFERS = (200,)
"""Sizes that take a moment, to see that it works."""


def bench_pack(
    files: Sequence[str | Path] = (),
    *,
    buffers: Sequence[int] = BUFFERS,
    rounds: int = 3,
    time_limit: float = 10.0,
    omnimalloc_allocator: str = "greedy_by_all",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the ``bench`` JSON: medians of interleaved runs; ``omnimalloc`` is left out where not installed.

    Args:
        files: problems as CSV.
        buffers: sizes of synthetic problems to add, a training step and a random one of each.
        rounds: runs of each contender on each problem.
        time_limit: seconds allowed to ours.
        omnimalloc_allocator: the name of its allocator.
        progress: told each problem's name.
    """
    problems = [(Path(file).stem, read_problem(file, keep_offsets=False)) for file in files]
    for count in buffers:
        problems.append((f"training step, {count} buffers", training_step(count)))
        problems.append((f"random, {count} buffers", random_lifetimes(count)))
    contenders: dict[str, Callable[[Problem], int]] = {"ours": lambda problem: _ours(problem, time_limit)}
    if find_spec("omnimalloc") is not None:
        contenders["omnimalloc"] = lambda problem: _omnimalloc(problem, omnimalloc_allocator)
    for run in contenders.values():
        run(training_step(100))  # loading and compiling are not what is compared
    _ours(training_step(2_000), 1.0)
    cases = []
    for name, problem in problems:
        if progress is not None:
            progress(name)
        cases.append(_case(name, problem, contenders, rounds))
    settings = environment(
        ("numpy", "numba", "omnimalloc"),
        rounds=rounds,
        time_limit=time_limit,
        omnimalloc_allocator=omnimalloc_allocator,
    )
    return {"cases": cases, "environment": settings}


def _case(name: str, problem: Problem, contenders: dict[str, Callable[[Problem], int]], rounds: int) -> dict[str, Any]:
    """Run the contenders in turns on one problem."""
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for contender, run in contenders.items():
            start = time.perf_counter()
            peaks[contender] = run(problem)
            seconds[contender].append(time.perf_counter() - start)
    typical = {contender: median(values) for contender, values in seconds.items()}
    return {
        "name": name,
        "buffers": len(problem.lifetimes),
        "seconds": typical,
        "spread_seconds": {contender: [min(values), max(values)] for contender, values in seconds.items()},
        "peak_bytes": peaks,
        "lower_bound_bytes": lower_bound(problem),
        "ratio": {other: typical["ours"] / typical[other] for other in typical if other != "ours"},
        "peak_ratio": {other: peaks["ours"] / peaks[other] for other in peaks if other != "ours"},
    }


def _ours(problem: Problem, time_limit: float) -> int:
    """Return the peak our engine reaches; an interrupt, which ends its search early, ends the benchmark."""
    result = colour(problem, time_limit=time_limit)
    if result.interrupted:
        raise KeyboardInterrupt
    return result.peak_nbytes


def _omnimalloc(problem: Problem, allocator: str) -> int:
    """Return the peak omnimalloc reaches, its own types made inside the time as ours are."""
    import omnimalloc

    allocations = [
        omnimalloc.Allocation(item.name, item.nbytes, item.birth, item.death)
        for item in problem.lifetimes
        if item.nbytes
    ]
    placed = omnimalloc.allocate(allocations, allocator)
    return max(int((item.offset or 0) + item.size) for item in placed)
