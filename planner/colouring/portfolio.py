"""The engine: cheap algorithms first, stop at the bound, spend the time limit on hard components only."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner.bounds import bottleneck, lower_bound
from planner.colouring.best import Best
from planner.colouring.first_fit import check_pins, first_fit, stacked
from planner.colouring.instance import Instance, instances, zero_offset
from planner.colouring.large import LargeFirstFit, large_first_fit, large_portfolio, large_start, load_first_fit
from planner.colouring.minimise import WORTH_COMPILING_SECONDS, minimise
from planner.colouring.orders import orders
from planner.errors import CapacityError
from planner.problem import Colouring, Problem, check_problem

SMALL = 1500
"""Items up to which interpreted first fit takes less time than loading the compiled one."""

WORTH_REPAIRING = 500
"""Items from which a hard component gets the repairs of compiled first fit before the search."""


def colour(
    problem: Problem,
    *,
    time_limit: float = 10.0,
    progress: Callable[[str], None] | None = None,
    source: str = "problem",
) -> Colouring:
    """Return offsets for a problem, of the least peak found within ``time_limit`` seconds.

    With a capacity the search stops at the first packing that fits. The peak is never above that of first fit in
    the order given, unless the limit is up before that is done (on large problems, and after two seconds at the
    least). The same problem and limit give the same offsets as long as the limit is not what ends the search.
    Ctrl-C ends it early: the best packing until then is returned, with ``interrupted`` set.
    Errors call the problem ``source``; where it was read from a file, that is the file's name.

    Raises:
        ProblemError: a lifetime is malformed, or pins or groups contradict each other.
        CapacityError: nothing was found that fits; it says by how much, and what is alive where most is.
    """
    check_problem(problem, source)
    deadline = time.monotonic() + time_limit
    interrupted = False
    try:
        pieces, bound = _prepared(problem, source)
    except KeyboardInterrupt:
        interrupted = True
        pieces, bound = _prepared(problem, source)  # Without these there is nothing to return.
    capacity = problem.capacity
    if capacity is not None and bound > capacity:
        raise _too_large(problem, bound, proved=True)
    target = bound if capacity is None else capacity
    parts: list[Best] = []
    report = _Reporter(parts, progress)
    engines: list[LargeFirstFit | None] = []
    try:
        if interrupted:
            raise KeyboardInterrupt
        if any(len(piece) > SMALL for piece in pieces):
            deadline += load_first_fit()
        engines += [large_first_fit(piece) if len(piece) > SMALL else None for piece in pieces]
        for piece, engine in zip(pieces, engines, strict=True):
            parts.append(_start(piece, engine, target, deadline))
        for part, engine in zip(parts, engines, strict=True):
            if engine is None:
                _portfolio(part, target, deadline)
            else:
                large_portfolio(part, engine, target, time_limit, deadline, report)
        # The highest first: what it reaches is all that the others have to reach.
        hard = sorted((part for part in parts if not part.done(target)), key=lambda part: -part.peak_nbytes)
        for position, part in enumerate(hard):
            now = time.monotonic()
            share = now + (deadline - now) / (len(hard) - position)
            if WORTH_REPAIRING < len(part.instance) <= SMALL and time_limit >= WORTH_COMPILING_SECONDS:
                repairer = large_first_fit(part.instance)
                if repairer is not None:
                    large_portfolio(part, repairer, target, time_limit, share, report)
            deadline += minimise(part, target, share, time_limit, report, give_up=capacity is not None)
            if capacity is None:
                target = max(target, min(part.peak_nbytes, part.floor * part.instance.unit))
    except KeyboardInterrupt:
        interrupted = True
        parts += [Best(piece, stacked(piece, piece.pin), "a stack") for piece in pieces[len(parts) :]]
    result = _colouring(problem, parts, bound, interrupted)
    if capacity is not None and result.peak_nbytes > capacity and not interrupted:
        raise _too_large(problem, result.peak_nbytes, proved=_refuted(parts, capacity))
    return result


def _prepared(problem: Problem, source: str) -> tuple[list[Instance], int]:
    """Return the components of a problem, their pins checked, and its lower bound in bytes."""
    pieces = instances(problem)
    for piece in pieces:
        check_pins(piece, problem.lifetimes, source)
    return pieces, max([lower_bound(problem), *(piece.bound * piece.unit for piece in pieces)])


class _Reporter:
    """Says how far the search is, at most once a second and not in the first."""

    def __init__(self, parts: list[Best], progress: Callable[[str], None] | None) -> None:
        self._parts = parts
        self._progress = progress
        self._next = time.monotonic() + 1.0

    def __call__(self) -> None:
        if self._progress is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        peak = max(part.peak_nbytes for part in self._parts)
        bound = max(1, *(part.instance.bound * part.instance.unit for part in self._parts))
        self._progress(f"peak {peak} bytes, {peak / bound - 1:.2%} above the lower bound")


def _start(instance: Instance, engine: LargeFirstFit | None, goal_nbytes: int, deadline: float) -> Best:
    """Return a packing no worse than first fit in the given order, unless the limit ends it on a large component."""
    part = large_start(instance, engine, goal_nbytes, deadline) if engine is not None else None
    return part or Best(instance, first_fit(instance, range(len(instance))), "first fit, given order")


def _portfolio(part: Best, goal_nbytes: int, deadline: float) -> None:
    """Try first fit in every order until one is at the goal."""
    for name, order in orders(part.instance):
        if part.done(goal_nbytes) or time.monotonic() > deadline:
            return
        part.offer(first_fit(part.instance, order), f"first fit, {name}")


def _colouring(problem: Problem, parts: list[Best], bound: int, interrupted: bool) -> Colouring:
    """Put the components together again."""
    offsets = [zero_offset(lifetime) for lifetime in problem.lifetimes]
    for part in parts:
        unit = part.instance.unit
        for offset, members in zip(part.offsets, part.instance.members, strict=True):
            for index, rise in members:
                offsets[index] = offset * unit + rise
    peak = max((at + item.nbytes for at, item in zip(offsets, problem.lifetimes, strict=True)), default=0)
    highest = [part for part in parts if part.peak_nbytes == peak]
    return Colouring(
        offsets=tuple(offsets),
        peak_nbytes=peak,
        lower_bound_nbytes=bound,
        algorithm=highest[0].algorithm if highest else "nothing to place",
        proved_optimal=peak == bound or any(part.peak <= part.proved_floor for part in highest),
        interrupted=interrupted,
    )


def _refuted(parts: list[Best], capacity: int) -> bool:
    """Whether some component is proved not to fit."""
    return any(part.proved_floor * part.instance.unit > capacity for part in parts)


def _too_large(problem: Problem, needed: int, *, proved: bool) -> CapacityError:
    """Say by how much a problem misses its capacity, and where."""
    most = bottleneck(problem)
    return CapacityError(problem.capacity or 0, needed, most.step, most.names, proved)
