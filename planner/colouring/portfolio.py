"""The engine: cheap algorithms first, stop at the bound, spend the time limit on hard components only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.bounds import bottleneck, lower_bound
from planner.colouring.first_fit import first_fit
from planner.colouring.instance import Instance, instances, zero_offset
from planner.colouring.orders import orders
from planner.errors import CapacityError
from planner.problem import Colouring, Problem, check_problem


@dataclass(slots=True)
class _Best:
    """The best packing of one component so far."""

    instance: Instance
    offsets: list[int]
    peak: int
    algorithm: str
    exact: bool = False

    @property
    def peak_nbytes(self) -> int:
        return self.peak * self.instance.unit


def colour(
    problem: Problem, *, time_limit: float = 10.0, progress: Callable[[str], None] | None = None
) -> Colouring:
    """Return offsets for a problem, of the least peak found within ``time_limit`` seconds.

    With a capacity the search stops at the first packing that fits. The peak is never above that of first fit in
    the order given. The same problem and limit give the same offsets as long as the limit is not what ends the
    search. Ctrl-C ends it early: the best packing until then is returned, with ``interrupted`` set.

    Raises:
        ProblemError: a lifetime is malformed, or pins or groups contradict each other.
        CapacityError: nothing was found that fits; it says by how much, and what is alive where most is.
    """
    check_problem(problem)
    deadline = time.monotonic() + time_limit
    pieces = instances(problem)
    bound = max([lower_bound(problem), *(piece.bound * piece.unit for piece in pieces)])
    capacity = problem.capacity
    if capacity is not None and bound > capacity:
        raise _too_large(problem, bound, proved=True)
    parts = [_start(piece) for piece in pieces]
    target = bound if capacity is None else capacity
    interrupted = False
    try:
        for part in parts:
            _portfolio(part, target, deadline)
    except KeyboardInterrupt:
        interrupted = True
    result = _colouring(problem, parts, bound, interrupted)
    if capacity is not None and result.peak_nbytes > capacity and not interrupted:
        raise _too_large(problem, result.peak_nbytes, proved=result.proved_optimal)
    return result


def _start(instance: Instance) -> _Best:
    """Return first fit in the given order: what no result may be worse than."""
    offsets = first_fit(instance, range(len(instance)))
    return _Best(instance, offsets, instance.peak(offsets), "first fit, given order")


def _portfolio(part: _Best, target_nbytes: int, deadline: float) -> None:
    """Try first fit in every order until one is at the target."""
    for name, order in orders(part.instance):
        if part.peak_nbytes <= target_nbytes or part.peak == part.instance.bound or time.monotonic() > deadline:
            return
        offsets = first_fit(part.instance, order)
        peak = part.instance.peak(offsets)
        if peak < part.peak:
            part.offsets, part.peak, part.algorithm = offsets, peak, f"first fit, {name}"


def _colouring(problem: Problem, parts: list[_Best], bound: int, interrupted: bool) -> Colouring:
    """Put the components together again."""
    offsets = [zero_offset(lifetime) for lifetime in problem.lifetimes]
    for part in parts:
        unit = part.instance.unit
        for offset, members in zip(part.offsets, part.instance.members, strict=True):
            for index, rise in members:
                offsets[index] = (offset + rise) * unit
    peak = max((at + item.nbytes for at, item in zip(offsets, problem.lifetimes, strict=True)), default=0)
    highest = [part for part in parts if part.peak_nbytes == peak]
    return Colouring(
        offsets=tuple(offsets),
        peak_nbytes=peak,
        lower_bound_nbytes=bound,
        algorithm=highest[0].algorithm if highest else "nothing to place",
        proved_optimal=peak == bound or any(part.exact for part in highest),
        interrupted=interrupted,
    )


def _too_large(problem: Problem, needed: int, *, proved: bool) -> CapacityError:
    """Say by how much a problem misses its capacity, and where."""
    most = bottleneck(problem)
    return CapacityError(problem.capacity or 0, needed, most.step, most.names, proved)
