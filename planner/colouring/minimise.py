"""Minimisation by decisions: the lowest target first, then bisection between what is refuted and what is found."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner.colouring.backend import SAFE_TOTAL, Backend, compiled, interpreted, loaded
from planner.colouring.best import Best
from planner.colouring.exact import Decider
from planner.colouring.instance import Instance, instances
from planner.colouring.search import Layout, Search
from planner.colouring.search_kernel import EXHAUSTED, SOLVED
from planner.colouring.sweep import sweep
from planner.problem import Lifetime, Problem

LARGEST_SEARCHED = 3000
"""Items beyond which the search is not tried: its arrays grow with the square, and its depth with the count."""

TINY = 15
"""Items up to which interpreted search is given enough nodes to finish."""

TINY_NODES, SMALL_NODES, FIRST_ROUND_NODES = 4_000, 1_200, 120_000
"""Nodes a round for tiny components and others when interpreted, and in the first round when compiled."""

MISSED_ROUND_NODES = 4 * FIRST_ROUND_NODES
"""Nodes of the round that also looks above a capacity that was not met, for the least peak to name."""

TINY_ROUNDS = 3
"""Rounds for tiny components: each bisects what the last left open."""

WORTH_COMPILING_SECONDS = 1.0
"""Loading the compiled search takes most of a second, compiling it some: not for a caller in more of a hurry."""

THIN, SWEEP_NODES = 14, 30_000
"""Storages alive at once up to which the sweep gets so many nodes; where more are, it seldom finds anything."""

BISECTIONS, TINY_BISECTIONS = 5, 64
"""Targets tried between the least possible and the best found, in one round; for tiny components enough for
any 64-bit range, as each takes next to nothing."""


def minimise(
    part: Best,
    goal_nbytes: int,
    deadline: float,
    time_limit: float,
    tick: Callable[[], None],
    *,
    give_up: bool = False,
) -> float:
    """Lower the peak of one component towards ``goal_nbytes``; what is found is kept in ``part`` as it is found.

    With ``give_up``, stop soon after the goal is refuted. Returns the seconds that went into loading or compiling the
    search, which no time limit counts: they come once, and would leave nothing to a limit set for searching.
    """
    loading = 0.0
    instance = part.instance
    if len(instance) > LARGEST_SEARCHED or part.done(goal_nbytes) or time.monotonic() > deadline:
        return loading
    if len(instance) > TINY:
        _sweep(part, goal_nbytes, deadline, tick)
        if part.done(goal_nbytes):
            return loading
    small = _fits_64_bits(part)
    deciders = _deciders(instance, loaded() if small else interpreted())
    if len(instance) <= TINY:
        for _ in range(TINY_ROUNDS):
            _round(part, *deciders, goal_nbytes, TINY_NODES, deadline, tick)
    elif give_up:
        _decide(part, deciders[0], max(goal_nbytes // instance.unit, part.floor), SMALL_NODES, deadline, tick)
    else:
        _round(part, *deciders, goal_nbytes, SMALL_NODES, deadline, tick)
    if part.done(goal_nbytes) or time_limit < WORTH_COMPILING_SECONDS or not small:
        return loading
    start = time.monotonic()
    backend: Backend | None = compiled()
    if backend is None:
        return loading
    _warm_up(backend)
    loading = time.monotonic() - start
    deadline += loading
    deciders = _deciders(instance, backend)
    nodes = FIRST_ROUND_NODES
    while not part.done(goal_nbytes) and time.monotonic() < deadline:
        if give_up and part.floor * instance.unit > goal_nbytes:
            return loading
        if give_up and nodes != MISSED_ROUND_NODES:  # what lies between tells only by how much the goal is missed
            goal = max(goal_nbytes // instance.unit, part.floor)
            _decide(part, deciders[0], goal, nodes, deadline, tick)
        else:
            _round(part, *deciders, goal_nbytes, nodes, deadline, tick)
        nodes *= 2
    return loading


def _warm_up(backend: Backend) -> None:
    """Make sure the search is loaded or compiled."""
    nothing = Lifetime("warm up", 1, 0, 1)
    (instance,) = instances(Problem((nothing,)))
    Search(Layout(instance), [0], (1, 0), 1, backend).advance(1)


def _sweep(part: Best, goal_nbytes: int, deadline: float, tick: Callable[[], None]) -> None:
    """Place in the order of births at the lowest target, then at some above it where little is alive at once."""
    thin = max(map(len, Layout(part.instance).alive)) <= THIN
    low = goal = max(goal_nbytes // part.instance.unit, part.floor)
    for _ in range(1 + (BISECTIONS if thin else 0)):
        if part.done(goal_nbytes) or low >= part.peak or time.monotonic() > deadline:
            return
        target = goal if low == goal else (low + part.peak - 1) // 2
        nodes = (SWEEP_NODES if target == goal else SWEEP_NODES // 5) if thin else 2 * len(part.instance)
        offsets = sweep(part.instance, target, nodes, deadline, tick)
        if offsets is not None:
            part.offer(offsets, "sweep over births")
        else:
            low = target + 1


def _deciders(instance: Instance, backend: Backend) -> tuple[Decider, Decider]:
    """Return two: what is spent on targets in between must not change which tries the lowest target gets."""
    layout = Layout(instance)
    return Decider(layout, backend), Decider(layout, backend)


def _round(
    part: Best,
    at_goal: Decider,
    between: Decider,
    goal_nbytes: int,
    nodes: int,
    deadline: float,
    tick: Callable[[], None],
) -> None:
    """Decide at the lowest target, then at some between it and the best."""
    goal = max(goal_nbytes // part.instance.unit, part.floor)
    _decide(part, at_goal, goal, nodes, deadline, tick)
    low = max(goal + 1, part.floor)
    for _ in range(BISECTIONS if len(part.instance) > TINY else TINY_BISECTIONS):
        high = part.peak - 1
        if part.done(goal_nbytes) or low > high or time.monotonic() > deadline:
            return
        target = (low + high) // 2
        before = part.peak
        _decide(part, between, target, nodes // 8, deadline, tick)
        low = max(low, part.floor) if part.peak < before else target + 1


def _decide(part: Best, decider: Decider, target: int, nodes: int, deadline: float, tick: Callable[[], None]) -> None:
    """Search for a packing at a target, and note what was learned."""
    verdict = decider.decide(target, nodes, deadline, tick)
    if verdict.outcome == SOLVED and verdict.offsets is not None:
        part.offer(verdict.offsets, "branch and bound")
    elif verdict.outcome == EXHAUSTED:
        part.floor = max(part.floor, target + 1)


def _fits_64_bits(part: Best) -> bool:
    """Whether no sum in compiled code can come near 2**63."""
    instance = part.instance
    return sum(instance.size) + max(instance.pin) + sum(instance.alignment) < SAFE_TOTAL
