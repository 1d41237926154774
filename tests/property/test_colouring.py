"""What holds of every packing, whatever the problem."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_oracle import faults, first_fit_peak, first_fit_peak_of_groups, least_peak, live_peak

from planner.colouring import colour
from planner.errors import CapacityError, ProblemError
from planner.problem import Lifetime, Problem

QUICK = 0.9
"""Seconds: below what loads the compiled search, so that examples stay quick."""

common = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn, most: int, groups: bool = True, pins: bool = True) -> Problem:
    """Draw a problem; pins and groups may contradict each other."""
    steps = draw(st.integers(1, 12))
    alignments = draw(st.sampled_from([(1,), (4,), (1, 2, 8), (256,), (2, 3)]))
    scale = draw(st.sampled_from([1, 1, 4, 256, 2**56]))
    lifetimes = []
    for index in range(draw(st.integers(0, most))):
        birth = draw(st.integers(0, steps - 1))
        alignment = draw(st.sampled_from(alignments))
        pin = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 9))) if pins else None
        group = draw(st.one_of(st.none(), st.none(), st.sampled_from("gh"))) if groups else None
        lifetimes.append(
            Lifetime(
                name=f"t{index}",
                nbytes=draw(st.integers(0, 12)) * scale,
                birth=birth,
                death=draw(st.integers(birth + 1, steps + 1)),
                alignment=alignment,
                offset=None if pin is None else pin * alignment * scale,
                group=group,
            )
        )
    return Problem(tuple(lifetimes))


@common
@given(problems(most=24))
def test_a_packing_is_valid_or_the_pins_contradict_each_other(problem: Problem) -> None:
    try:
        colouring = colour(problem, time_limit=QUICK)
    except ProblemError:
        assert any(item.offset is not None for item in problem.lifetimes)
        return
    assert faults(problem, colouring) == []
    assert colouring.lower_bound_nbytes >= live_peak(problem)
    if colouring.peak_nbytes == colouring.lower_bound_nbytes:
        assert colouring.proved_optimal


@common
@given(problems(most=24, groups=False, pins=False))
def test_never_worse_than_first_fit_in_the_order_given(problem: Problem) -> None:
    assert colour(problem, time_limit=0.0).peak_nbytes <= first_fit_peak(problem)


@common
@given(problems(most=24, pins=False))
def test_never_worse_than_first_fit_of_whole_groups_in_the_order_given(problem: Problem) -> None:
    assert colour(problem, time_limit=0.0).peak_nbytes <= first_fit_peak_of_groups(problem)


@common
@given(problems(most=24))
def test_the_same_answer_twice(problem: Problem) -> None:
    try:
        first = colour(problem, time_limit=QUICK)
    except ProblemError:
        return
    assert colour(problem, time_limit=QUICK) == first


@common
@given(problems(most=6, groups=False))
def test_the_least_peak_of_small_problems_is_found_and_proved(problem: Problem) -> None:
    try:
        colouring = colour(problem, time_limit=QUICK)
    except ProblemError:
        return
    assert colouring.peak_nbytes == least_peak(problem)
    assert colouring.proved_optimal


@common
@given(problems(most=6, groups=False), st.integers(-3, 3))
def test_a_capacity_is_met_exactly_where_it_can_be(problem: Problem, slack: int) -> None:
    try:
        least = least_peak(problem) if colour(problem, time_limit=0.0) else 0
    except ProblemError:
        return
    capacity = max(0, least + slack)
    bounded = Problem(problem.lifetimes, capacity)
    if slack >= 0 or least == 0:
        colouring = colour(bounded, time_limit=QUICK)
        assert faults(bounded, colouring) == []
        assert colouring.peak_nbytes <= capacity
        return
    with pytest.raises(CapacityError) as caught:
        colour(bounded, time_limit=QUICK)
    assert caught.value.proved
    assert caught.value.needed_nbytes > capacity


@common
@given(problems(most=8), st.integers(0, 200))
def test_every_combination_with_a_capacity_is_valid_or_refused(problem: Problem, capacity: int) -> None:
    bounded = Problem(problem.lifetimes, capacity)
    try:
        colouring = colour(bounded, time_limit=QUICK)
    except (ProblemError, CapacityError):
        return
    assert faults(bounded, colouring) == []
    assert colouring.peak_nbytes <= capacity
