"""The packing engine: small problems by hand, capacity, groups, pins, interruption."""

from __future__ import annotations

import pytest
from packing_oracle import faults

from planner.bounds import lower_bound
from planner.colouring import colour, large, minimise, portfolio
from planner.errors import CapacityError, ProblemError
from planner.problem import Lifetime, Problem

HARD = tuple(
    Lifetime(str(index), size, birth, death)
    for index, (size, birth, death) in enumerate(
        [(4, 0, 3), (4, 3, 9), (4, 0, 9), (4, 9, 21), (4, 0, 21), (3, 2, 4), (5, 5, 12), (1, 1, 15), (2, 8, 14)]
    )
)


def _colour(*lifetimes: Lifetime, capacity: int | None = None, time_limit: float = 0.5) -> tuple[int, ...]:
    problem = Problem(lifetimes, capacity)
    colouring = colour(problem, time_limit=time_limit)
    assert faults(problem, colouring) == []
    return colouring.offsets


def test_nothing_to_place() -> None:
    result = colour(Problem(()))
    assert (result.offsets, result.peak_nbytes, result.proved_optimal) == ((), 0, True)


def test_storages_never_alive_together_share_their_place() -> None:
    assert _colour(Lifetime("a", 8, 0, 1), Lifetime("b", 8, 1, 2), Lifetime("c", 8, 5, 6)) == (0, 0, 0)


def test_zero_bytes_conflict_with_nothing() -> None:
    assert _colour(Lifetime("a", 8, 0, 9), Lifetime("b", 0, 0, 9), Lifetime("c", 0, 0, 9, 4, 4)) == (0, 0, 4)


def test_alignment_is_kept_and_holes_are_filled() -> None:
    offsets = _colour(Lifetime("a", 3, 0, 1), Lifetime("b", 8, 0, 1, alignment=8), Lifetime("c", 5, 0, 1))
    assert max(offsets) == 8


def test_pins_stay_and_what_fits_goes_below_them() -> None:
    assert _colour(Lifetime("a", 4, 0, 9, offset=8), Lifetime("b", 8, 0, 9), Lifetime("c", 1, 0, 9)) == (8, 0, 12)


def test_pins_that_collide_are_refused() -> None:
    with pytest.raises(ProblemError, match="pinned over each other at offset 8"):
        _colour(Lifetime("a", 4, 0, 9, offset=6), Lifetime("b", 8, 5, 6, offset=8))


def test_a_group_lies_in_problem_order() -> None:
    offsets = _colour(
        Lifetime("a", 3, 0, 4, group="g"), Lifetime("x", 10, 0, 9), Lifetime("b", 8, 2, 9, alignment=8, group="g")
    )
    assert offsets[2] - offsets[0] == 8


def test_a_group_of_unequal_lifetimes_shares_its_holes() -> None:
    problem = Problem((Lifetime("a", 4, 0, 2, group="g"), Lifetime("b", 4, 0, 9, group="g"), Lifetime("c", 4, 3, 9)))
    colouring = colour(problem)
    assert faults(problem, colouring) == []
    assert colouring.peak_nbytes == 8


def test_a_group_its_hull_keeps_from_the_bound_does_not_use_up_the_time() -> None:
    problem = Problem(
        (
            Lifetime("a", 2, 0, 2, group="g"),
            Lifetime("b", 2, 4, 9, group="g"),
            Lifetime("p", 1, 0, 2, offset=1),
            Lifetime("c", 4, 3, 6),
            Lifetime("d", 3, 0, 4),
        )
    )
    # Nothing is left to search once the hulls are refuted; were it searched on, this would take half a minute.
    assert faults(problem, colour(problem, time_limit=30.0)) == []


def test_a_pinned_member_places_its_group() -> None:
    assert _colour(Lifetime("a", 4, 0, 2, group="g"), Lifetime("b", 4, 0, 2, offset=12, group="g")) == (8, 12)


@pytest.mark.parametrize(
    "lifetimes",
    [
        (Lifetime("a", 8, 0, 2, group="g"), Lifetime("b", 4, 0, 2, offset=4, group="g")),
        (Lifetime("a", 4, 0, 2, offset=0, group="g"), Lifetime("b", 4, 0, 2, offset=8, group="g")),
        (Lifetime("a", 4, 0, 2, offset=4, group="g"), Lifetime("b", 4, 0, 2, alignment=16, group="g")),
    ],
)
def test_a_group_its_pins_contradict_is_refused(lifetimes: tuple[Lifetime, ...]) -> None:
    with pytest.raises(ProblemError, match="group 'g'"):
        _colour(*lifetimes)


@pytest.mark.parametrize(
    "lifetime",
    [
        Lifetime("a", -1, 0, 1),
        Lifetime("a", 2**63, 0, 1),
        Lifetime("a", 1, 1, 1),
        Lifetime("a", 1, 0, 1, alignment=0),
        Lifetime("a", 1, 0, 1, offset=-1),
        Lifetime("a", 1, 0, 1, alignment=4, offset=2),
    ],
)
def test_a_malformed_lifetime_is_refused(lifetime: Lifetime) -> None:
    with pytest.raises(ProblemError, match="lifetime 'a'"):
        _colour(lifetime)


def test_names_are_unique() -> None:
    with pytest.raises(ProblemError, match="used twice"):
        _colour(Lifetime("a", 1, 0, 1), Lifetime("a", 1, 0, 1))


def test_a_capacity_below_what_is_alive_is_refused_with_the_bottleneck() -> None:
    with pytest.raises(CapacityError) as caught:
        _colour(Lifetime("small", 1, 0, 9), Lifetime("large", 8, 4, 5), capacity=8)
    error = caught.value
    assert (error.needed_nbytes, error.step, error.bottleneck, error.proved) == (9, 4, ("large", "small"), True)


def test_a_misfit_that_only_a_search_can_refute_is_proved() -> None:
    # Alive: 6 bytes at most. But p splits them 3 and 3, and a (2) and b (2) cannot both lie beside a third of 2.
    lifetimes = [Lifetime("p", 1, 0, 1, offset=3), *(Lifetime(name, 2, 0, 1) for name in "abc")]
    assert colour(Problem(tuple(lifetimes))).peak_nbytes == 8
    with pytest.raises(CapacityError) as caught:
        _colour(*lifetimes, capacity=7)
    assert (caught.value.needed_nbytes, caught.value.proved) == (8, True)


def test_sizes_near_the_largest_do_not_overflow() -> None:
    lifetimes = [Lifetime(str(i), 2**62 + i, i, i + 3) for i in range(9)]
    problem = Problem(tuple(lifetimes))
    colouring = colour(problem, time_limit=2.0)
    assert faults(problem, colouring) == []
    assert colouring.peak_nbytes >= 3 * 2**62


def test_the_report_names_the_algorithm_and_the_gap() -> None:
    result = colour(Problem(HARD), time_limit=0.5)
    assert result.algorithm
    assert result.proved_optimal


def test_the_same_problem_gives_the_same_offsets() -> None:
    assert colour(Problem(HARD), time_limit=0.5) == colour(Problem(HARD), time_limit=0.5)


def test_an_interruption_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio, "minimise", interrupt)
    monkeypatch.setattr(portfolio, "_portfolio", interrupt)
    for capacity in (None, 8):
        problem = Problem((Lifetime("p", 1, 0, 1, offset=3), *(Lifetime(name, 2, 0, 1) for name in "abc")), capacity)
        result = colour(problem)
        assert result.interrupted
        assert faults(problem, result) == []


@pytest.mark.parametrize("called", ["_start", "load_first_fit"])
def test_an_interruption_before_any_packing_still_returns_one(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio, called, interrupt)
    monkeypatch.setattr(portfolio, "SMALL", 3)
    items = [Lifetime(str(i), 256 * (1 + i % 7), i, i + 5, 256) for i in range(20)]
    items.append(Lifetime("pinned", 512, 0, 9, offset=1024))
    for capacity in (None, 6912):
        problem = Problem(tuple(items), capacity)
        result = colour(problem)
        assert result.interrupted
        assert faults(problem, result) == []


def test_an_interruption_of_the_preparation_still_returns_a_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupt_once(problem: Problem) -> int:
        calls.append(problem)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return lower_bound(problem)

    monkeypatch.setattr(portfolio, "lower_bound", interrupt_once)
    problem = Problem(HARD)
    result = colour(problem)
    assert result.interrupted
    assert faults(problem, result) == []


def test_a_hurried_caller_never_loads_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (minimise, large):
        for name in ("compiled", "compiled_first_fit"):
            monkeypatch.setattr(module, name, None, raising=False)
    items = tuple(Lifetime(str(i), 256 * (1 + i % 7), i, i + 5, 256) for i in range(200))
    problem = Problem(items)
    assert faults(problem, colour(problem, time_limit=0.5)) == []
