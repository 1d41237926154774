"""The searches behind the engine: minimalloc's problems, the compiled kernels against the interpreted ones."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from packing_oracle import faults, first_fit_peak, minimalloc

from planner.colouring import colour, large
from planner.colouring.backend import compiled, interpreted
from planner.colouring.best import Best
from planner.colouring.exact import Decider
from planner.colouring.first_fit import first_fit
from planner.colouring.instance import instances
from planner.colouring.large import large_first_fit
from planner.colouring.portfolio import SMALL
from planner.colouring.ragged import ragged_first_fit
from planner.colouring.search import Layout, Search
from planner.errors import ProblemError
from planner.problem import Colouring, Lifetime, Problem

CAPACITY = 1048576
QUICK = "BCDEFGHJK"
"""Those that take well under a second each."""


@pytest.mark.parametrize("letter", [*QUICK, *(pytest.param(letter, marks=pytest.mark.slow) for letter in "AI")])
def test_minimallocs_problems_fit_in_their_capacity(letter: str) -> None:
    problem = minimalloc(letter, CAPACITY)
    assert faults(problem, colour(problem, time_limit=60.0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("letter", list("ABCDEFGHIJK"))
def test_minimallocs_problems_are_minimised_without_a_capacity(letter: str) -> None:
    problem = minimalloc(letter)
    colouring = colour(problem, time_limit=60.0 if letter not in "DJ" else 10.0)
    assert faults(problem, colouring) == []
    assert colouring.peak_nbytes <= CAPACITY
    assert colouring.proved_optimal or letter in "DJ"


def _random(seed: int, count: int, pins: bool) -> Problem:
    draw = random.Random(seed)
    lifetimes = []
    for index in range(count):
        birth = draw.randrange(count)
        alignment = draw.choice((1, 2, 8))
        pin = alignment * draw.randrange(20) if pins and index < 1 else None
        lifetimes.append(Lifetime(str(index), draw.randint(1, 30), birth, birth + draw.randint(1, 12), alignment, pin))
    return Problem(tuple(lifetimes))


@pytest.mark.parametrize("pins", [False, True])
def test_compiled_and_interpreted_searches_walk_the_same_tree(pins: bool) -> None:
    backend = compiled()
    assert backend is not None
    for seed in range(15):
        for instance in instances(_random(seed, 25, pins)):
            layout = Layout(instance)
            order = sorted(range(len(instance)), key=lambda item: -instance.size[item])
            for target in (instance.bound, instance.bound + 2):
                runs = [Search(layout, order, (1024, 3), target, each) for each in (interpreted(), backend)]
                outcomes = [run.advance(300) for run in runs]
                assert outcomes[0] == outcomes[1]
                assert runs[0].nodes == runs[1].nodes
                assert runs[0].offsets() == runs[1].offsets()


def test_a_paused_search_goes_on_where_it_stopped() -> None:
    instance = max(instances(minimalloc("K")), key=len)
    backend = compiled()
    assert backend is not None
    order = list(range(len(instance)))
    whole, pieces = (Search(Layout(instance), order, (1, 0), CAPACITY // instance.unit, backend) for _ in range(2))
    outcome = whole.advance(1000)
    for _ in range(100):
        last = pieces.advance(10)
    assert last == outcome
    assert pieces.nodes == whole.nodes
    assert pieces.offsets() == whole.offsets()


def test_a_decision_ends_at_its_deadline() -> None:
    instance = max(instances(minimalloc("D")), key=len)
    verdict = Decider(Layout(instance), interpreted()).decide(instance.bound, 10**9, time.monotonic(), lambda: None)
    assert verdict.offsets is None


@pytest.mark.parametrize("seed", range(6))
def test_compiled_first_fit_is_first_fit(seed: int) -> None:
    for instance in instances(_random(seed, 400, pins=True)):
        engine = large_first_fit(instance)
        assert engine is not None
        for _, order in engine.orders():
            expected = first_fit(instance, [int(item) for item in order])
            assert engine.run(order, engine.ample, time.monotonic() + 60, lambda: None) == expected


def test_a_large_problem_is_no_worse_than_first_fit_in_its_order() -> None:
    problem = _random(3, 1700, pins=False)
    colouring = colour(problem, time_limit=1.0)
    assert faults(problem, colouring) == []
    assert colouring.peak_nbytes <= first_fit_peak(problem)


def _with_groups(seed: int, count: int) -> Problem:
    """Return a problem in which every third lifetime belongs to a group of two or three that live unequally long."""
    items = _random(seed, count, pins=True).lifetimes
    grouped = [
        replace(item, group=f"g{index // 8}") if index % 8 in {3, 5} else item for index, item in enumerate(items)
    ]
    return Problem(tuple(grouped))


@pytest.mark.parametrize("seed", range(4))
def test_first_fit_of_ragged_groups_over_arrays_is_first_fit(seed: int) -> None:
    pieces = instances(_with_groups(seed, 300))
    assert any(instance.ragged for instance in pieces)
    for instance in pieces:
        expected = first_fit(instance, range(len(instance)))
        assert ragged_first_fit(instance, time.monotonic() + 60, lambda: None) == expected


def test_a_large_problem_with_ragged_groups_is_no_worse_than_first_fit_in_its_order() -> None:
    problem = _with_groups(5, 2400)
    pieces = instances(problem)
    assert max(map(len, pieces)) > SMALL
    colouring = colour(problem, time_limit=10.0)
    assert faults(problem, colouring) == []
    expected = [first_fit(instance, range(len(instance))) for instance in pieces]
    highest = max(instance.peak(at) * instance.unit for instance, at in zip(pieces, expected, strict=True))
    assert colouring.peak_nbytes <= highest


def test_what_first_fit_did_not_reach_in_time_is_stacked() -> None:
    problem = _random(6, 5000, pins=True)
    for instance in instances(problem):
        engine = large_first_fit(instance)
        assert engine is not None
        assert engine.run(engine.given(), engine.ample, 0.0, lambda: None) is None or len(instance) <= 2000
        offsets = engine.run(engine.given(), engine.ample, 0.0, lambda: None, stack=True)
        assert offsets is not None
        part = Best(instance, offsets, "stacked")
        unit = instance.unit
        at = {instance.members[item][0][0]: offset * unit for item, offset in enumerate(part.offsets)}
        items = sorted(at)
        piece = Problem(tuple(problem.lifetimes[index] for index in items))
        found = Colouring(tuple(at[index] for index in items), part.peak_nbytes, 0, "", proved_optimal=False)
        assert faults(piece, found) == []


def test_lists_that_outgrow_their_room_are_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "FIRST_ROOM", 4)
    monkeypatch.setattr(large, "ITEMS_A_RANGE", 1000)
    for instance in instances(_random(1, 800, pins=True)):
        engine = large_first_fit(instance)
        assert engine is not None
        assert engine.run(engine.given(), engine.ample, time.monotonic() + 60, lambda: None) == first_fit(
            instance, range(len(instance))
        )


def test_pins_that_collide_in_a_large_problem_are_refused() -> None:
    items = [Lifetime(str(index), 4, index, index + 3, offset=4 * (index % 3)) for index in range(2000)]
    assert colour(Problem(tuple(items))).peak_nbytes == 12
    items[1500] = replace(items[1500], offset=4 * (1501 % 3) + 3)
    with pytest.raises(ProblemError, match="pinned over each other"):
        colour(Problem(tuple(items)))
