"""`planner.update.with_update` on any sizes of states: nothing else changes; results are verified and can be saved."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner import plan, trace
from planner.graph import ITEMSIZE, Graph, Role
from planner.plan import Plan, padded
from planner.update import CONTROL_NUMEL, Block, Launch, Update, with_own_gradients, with_update
from planner.verify import verify

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@cache
def traced() -> Graph:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    graph = trace(module, (torch.randn(4, 5),), loss=lambda y: y.square().mean(), mode="joint")
    return with_own_gradients(graph, frozenset(NAMES))


@cache
def planned(alignment: int) -> Plan:
    return plan(traced(), alignment=alignment)


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Any split of the parameters into launches, with any number and size of blocks."""
    names = draw(st.permutations(NAMES))
    cut = draw(st.integers(0, len(names)))
    launches = []
    for number, part in enumerate((names[:cut], names[cut:])):
        if part:
            kinds = st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.integers(0, 10_000))
            blocks = draw(st.lists(kinds, max_size=4))
            made = tuple(Block(f"optimizer.{number}.{i}", dtype, numel) for i, (dtype, numel) in enumerate(blocks))
            groups = tuple(draw(st.integers(0, 2)) for _ in part)
            steps = Block(f"optimizer.{number}.steps", "float32", len(part))
            launches.append(Launch(f"float{number}", tuple(part), groups, made, steps))
    settings_block, control = Block("settings", "float64", 21), Block("control", "float64", CONTROL_NUMEL)
    return Update("adam", "none", "fp32", 0, tuple(launches), settings_block, control)


@given(update=updates(), alignment=st.sampled_from([16, 256, 4096]))
@settings(max_examples=60, deadline=None)
def test_the_states_lie_between_gradients_and_the_rest(update: Update, alignment: int) -> None:
    before = planned(alignment)
    after = with_update(before, update)
    verify(after)
    added = sum(padded(block.nbytes, alignment) for block in update.blocks)
    assert (after.arena_nbytes, after.lower_bound_nbytes) == (
        before.arena_nbytes + added,
        before.lower_bound_nbytes + added,
    )
    bottom = {Role.PARAMETER, Role.PARAMETER_GRADIENT, Role.BUFFER}
    for storage, old, new in zip(before.graph.storages, before.placements, after.placements, strict=False):
        assert new.offset == old.offset + (0 if storage.role in bottom or not storage.nbytes else added)
        assert (new.birth, new.in_place_of) == (old.birth, old.in_place_of)
    names = {storage.name for storage in after.graph.storages if storage.role is Role.OPTIMIZER_STATE}
    assert names == {block.name for block in update.blocks}
    assert {port.name for port in after.graph.mutated} >= set(NAMES)


def test_a_plan_with_an_update_is_the_same_from_a_file(tmp_path: Path) -> None:
    steps = Block("optimizer.steps", "float32", len(NAMES))
    launch = Launch("float32", NAMES, (0,) * 4, (Block("optimizer.exp_avg", "float32", 256),), steps)
    settings_block, control = Block("settings", "float64", 7), Block("control", "float64", CONTROL_NUMEL)
    update = Update("sgd", "none", "fp32", 3, (launch,), settings_block, control, scratch_nbytes=64)
    made = with_update(planned(256), update)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.graph.operations == made.graph.operations
    assert loaded.placements == made.placements
    assert loaded.unplanned == made.unplanned
