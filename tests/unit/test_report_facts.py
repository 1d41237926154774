"""The facts behind the reports, against naive recomputation."""

from __future__ import annotations

from functools import partial

import pytest
from plans import TRACED, PlanBuilder, small_plan, synthetic_plan, traced_plan

from planner.errors import ShapeError
from planner.graph import Role
from planner.plan import padded
from planner.report.facts import about_tensor, at_step, chain, handed_over, live_nbytes, peak_step, size_text

MAKERS = [small_plan, lambda: synthetic_plan(300), *(partial(traced_plan, *options) for options in TRACED)]


@pytest.mark.parametrize("make", MAKERS)
def test_live_bytes_are_what_covers_the_arena_at_each_step(make):
    plan = make()
    for step, live in enumerate(live_nbytes(plan)):
        covered: set[int] = set()
        for storage, place in zip(plan.graph.storages, plan.placements, strict=True):
            if place.birth <= step < place.death:
                first = place.offset // plan.alignment
                covered.update(range(first, first + padded(storage.nbytes, plan.alignment) // plan.alignment))
        assert live == len(covered) * plan.alignment
    assert max(live_nbytes(plan)) == plan.lower_bound_nbytes
    assert live_nbytes(plan)[peak_step(plan)] == plan.lower_bound_nbytes


@pytest.mark.parametrize("make", MAKERS)
def test_gaps_are_what_is_not_alive(make):
    plan = make()
    for step in range(0, plan.steps, 7):
        facts = at_step(plan, step)
        assert facts.live_nbytes + sum(gap.nbytes for gap in facts.gaps) == plan.arena_nbytes
        for gap in facts.gaps:
            assert not any(
                entry.offset < gap.offset + gap.nbytes and gap.offset < entry.offset + entry.nbytes
                for entry in facts.occupants
            )


def test_a_step_says_what_it_reads_and_writes():
    facts = at_step(small_plan(), 1)
    names = {small_plan().graph.storages[entry.storage].name: (entry.reads, entry.writes) for entry in facts.occupants}
    assert names["scaled"] == (True, False)
    assert names["masked"] == (False, True)
    assert names["x"] == (False, False)
    assert "grad_output" not in names


@pytest.mark.parametrize("step", [-1, 4, 10**30])
def test_a_step_out_of_range_is_refused(step):
    with pytest.raises(ShapeError, match=f"step={step}: the plan has the steps 0 to 3"):
        at_step(small_plan(), step)


def test_everything_about_a_view():
    plan = small_plan()
    facts = about_tensor(plan, "x.t")
    assert facts.storage.name == "x"
    assert facts.views == ("x",)
    assert facts.arena_offset == plan.placements[1].offset
    assert (facts.writers, facts.readers) == ((), (2,))
    assert facts.chain == (1,)


def test_everything_about_a_link_of_a_chain():
    plan = small_plan()
    facts = about_tensor(plan, "scaled")
    names = [plan.graph.storages[index].name for index in facts.chain]
    assert names == ["grad_output", "scaled", "masked"]
    assert (facts.storage_writers, facts.storage_readers) == ((0,), (1,))
    assert [plan.graph.storages[index].name for index in facts.below] == ["grad_w"]
    assert [plan.graph.storages[index].name for index in facts.above] == ["x"]


def test_a_storage_name_finds_its_first_tensor():
    build = PlanBuilder()
    tensor = build.storage("store", (64,), Role.OUTPUT)
    build.tensors[tensor] = build.tensors[tensor].__class__("first", 0, 0, (64,), (1,), "float32")
    build.step("fill", "arenaplan.fill", (0.0,), tensor)
    assert about_tensor(build.build(), "store").tensor.name == "first"


@pytest.mark.parametrize(("name", "near"), [("mask", None), ("masc", "mask"), ("GRAD_", "grad_output"), ("", "11")])
def test_an_unknown_tensor_names_near_ones(name, near):
    if near is None:
        assert about_tensor(small_plan(), name).tensor.name == name
    else:
        with pytest.raises(ShapeError, match=near):
            about_tensor(small_plan(), name)


def test_chains_end_even_where_a_plan_is_wrong():
    plan = small_plan()
    assert handed_over(plan) == {0: 5, 5: 6}
    assert chain(plan, 6, {0: 5, 5: 6, 6: 0}) == (0, 5, 6)


def test_a_plan_without_operations_has_one_step():
    build = PlanBuilder()
    build.storage("x", (64,), Role.INPUT)
    plan = build.build()
    assert at_step(plan, 0).operation is None
    assert live_nbytes(plan) == (256,)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (3 << 20, "3.00 MiB"),
        (5 << 29, "2.50 GiB"),
        (1 << 50, "1,024.00 TiB"),
    ],
)
def test_sizes_are_binary(nbytes, text):
    assert size_text(nbytes) == text
