"""The update as part of a training step's plan: its results, its place in the arena, its states."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner.errors import BudgetError, VerificationError
from planner.graph import Role
from planner.operators import CHECK_GRADIENTS, UPDATE
from planner.plan import Plan
from planner.verify import verify
from runtime import ArenaRuntime, TrainingStep
from runtime.measure import allocations
from runtime.optimizer import FusedAdamW, FusedOptimizer, FusedSGD
from tests.optimizer_helpers import backend
from tests.planned_helpers import KINDS, beside_its_own_step, data, loss32, net
from tests.small_gpt import SmallGPT, batch, loss_of

pytestmark = pytest.mark.usefixtures("one_thread")


def same(one: FusedOptimizer, two: FusedOptimizer) -> None:
    """Equal bits of parameters, masters and states."""
    for a, b in zip(one.state.items(), two.state.items(), strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_the_optimizers_own_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    planned, stepped = beside_its_own_step(kind, dtype, 4)
    same(planned, stepped)


def test_without_numba_the_results_are_the_same() -> None:
    def train() -> FusedOptimizer:
        model = net()
        optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
        step = TrainingStep(model, loss32, data(0), optimizer=optimizer)
        for number in range(3):
            step(data(number))
        return optimizer

    with backend("compiled"):
        one = train()
    with backend("aten"):
        two = train()
    for a, b in zip(one.state.items(), two.state.items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "8bit", "nesterov", "stochastic", "clipped"])
def test_what_the_update_allocates_without_numba_is_listed(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9000), nn.Linear(9000, 3)).to(dtype)  # most of two chunks
    example = data(0, dtype=dtype)
    with backend("aten"):
        step = TrainingStep(model, F.cross_entropy, example, optimizer=KINDS[kind](model.parameters()))
        step(example)
        check, update = step._run(example)._program[-2:]
        peak = max(allocations(call).peak_nbytes for call in (check, update))
    (listed,) = [entry.nbytes for entry in step.plan.unplanned if entry.operator == UPDATE]
    assert 0 < peak <= listed <= 64 * 2**16
    assert 4 * peak > listed, "the bound says something"


def test_fifty_steps_in_fp32_equal_eager_adamw_within_rounding() -> None:
    ours, eager = net(), net()
    step = TrainingStep(ours, loss32, data(0), optimizer=FusedAdamW(ours.parameters(), lr=0.01))
    reference = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for number in range(50):
        x, target = data(number)
        loss = loss32(eager(x), target)
        loss.backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(step((x, target)), loss.detach(), rtol=1e-5, atol=1e-5)
    for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_fifty_steps_of_a_gpt_in_fp32_have_eager_adamws_losses() -> None:
    """Losses only: a key's bias has a gradient of zero but for rounding, which Adam makes a whole step of."""
    model, eager = SmallGPT(), SmallGPT()
    step = TrainingStep(model, loss_of, batch(0), optimizer=FusedAdamW(model.parameters(), lr=3e-3))
    reference = torch.optim.AdamW(eager.parameters(), lr=3e-3)
    for number in range(50):
        tokens, target = batch(number)
        loss = loss_of(eager(tokens), target)
        loss.backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(step((tokens, target)), loss.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_steady_step_calls_no_allocator_the_update_included(precision: str) -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters(), max_grad_norm=1.0)
    example = data(0)
    step = TrainingStep(model, loss32, example, optimizer=optimizer, precision=precision)
    step(example)
    found = allocations(lambda: step(example))
    assert (found.calls, found.nbytes) == (0, 0)
    assert float(optimizer.state[next(model.parameters())]["step"]) == 2.0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_everything_lies_in_the_one_arena(precision: str) -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters())
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, precision=precision)
    step(data(0))
    arena = step._arena
    assert arena is not None
    first = arena.bytes.data_ptr()
    held = [*model.parameters(), *optimizer.state_blocks().values()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    assert all(first <= tensor.data_ptr() < first + arena.nbytes for tensor in held)
    graph = step.plan.graph
    assert [operation.operator for operation in graph.operations[-2:]] == [CHECK_GRADIENTS, UPDATE]
    states = [s for s in graph.storages if s.role is Role.OPTIMIZER_STATE]
    numel = sum(block.numel() for block in optimizer.state_blocks().values() if block.dtype is torch.float32) // 2
    assert sum(s.nbytes for s in states) >= numel * (8 if precision == "fp32" else 10)
    assert step.plan.resident_nbytes > sum(s.nbytes for s in states)


def test_the_states_add_their_bytes_and_nothing_else() -> None:
    model = net()
    without = TrainingStep(copy.deepcopy(model), loss32, data(0)).plan
    step = TrainingStep(model, loss32, data(0), optimizer=FusedAdamW(model.parameters()))
    with_states = step.plan
    states = sum(-(-s.nbytes // 256) * 256 for s in with_states.graph.storages if s.role is Role.OPTIMIZER_STATE)
    assert with_states.arena_nbytes == without.arena_nbytes + states
    assert with_states.lower_bound_nbytes == without.lower_bound_nbytes + states


def test_other_batch_shapes_share_the_states() -> None:
    ours, theirs = net(), net()
    optimizer, reference = FusedAdamW(ours.parameters(), lr=0.01), torch.optim.AdamW(theirs.parameters(), lr=0.01)
    step = TrainingStep(ours, loss32, data(0), optimizer=optimizer)
    for number, rows in enumerate((8, 3, 40, 8, 3)):
        example = data(number, rows)
        loss32(theirs(example[0]), example[1]).backward()
        reference.step()
        reference.zero_grad()
        step(example)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_a_saved_plan_runs_without_the_model_and_the_optimizer(tmp_path: Path) -> None:
    model = net()
    step = TrainingStep(model, loss32, data(0), optimizer=FusedAdamW(model.parameters(), lr=0.01))
    step(data(0))
    step.plan.save(tmp_path / "step.json")
    state = {port.name: tensor.clone() for port, _, tensor in step._run(data(0))._states}
    run = ArenaRuntime(Plan.load(tmp_path / "step.json"), state=state)
    example = data(1)
    run.load(*example)
    run.execute()
    run.write_back(list(example))
    step(example)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[f"model.{name}"], parameter.detach(), rtol=0, atol=0)


def test_verification_sees_a_state_in_the_way_and_one_that_does_not_last() -> None:
    model = net()
    made = TrainingStep(model, loss32, data(0), optimizer=FusedAdamW(model.parameters())).plan
    place = next(i for i, s in enumerate(made.graph.storages) if s.name.endswith("exp_avg"))
    for changed in (replace(made.placements[place], offset=0), replace(made.placements[place], death=made.steps - 1)):
        placements = (*made.placements[:place], changed, *made.placements[place + 1 :])
        with pytest.raises(VerificationError, match="exp_avg"):
            verify(replace(made, placements=placements))


class Odd(nn.Module):
    """Gradients that are expanded, transposed, parts of one tensor, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.summed = nn.Parameter(torch.randn(5, 4))
        self.turned = nn.Parameter(torch.randn(4, 6))
        self.one, self.two = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.column = nn.Parameter(torch.randn(6, 3).t())
        self.unused = nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.one, self.two])
        products = (x + self.frozen) @ self.turned.t() @ torch.ones(4, 6) * joined
        return self.summed.sum() + (products * self.scalar).sum() + (self.column @ x.t()).sum()


@pytest.mark.parametrize("kind", ["adamw", "nesterov", "8bit"])
def test_gradients_of_every_layout_reach_their_parameters(kind: str) -> None:
    ours, theirs = Odd(), Odd()
    optimizer, reference = KINDS[kind](ours.parameters()), KINDS[kind](theirs.parameters())
    x = torch.randn(7, 6)
    step = TrainingStep(ours, None, (x,), optimizer=optimizer)
    for _ in range(3):
        reference.zero_grad()
        theirs(x).backward()
        reference.step()
        step((x,))
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.stride() == two.stride(), name
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(ours.unused, Odd().unused)
    assert torch.equal(ours.frozen, Odd().frozen)
    assert not torch.equal(ours.column, Odd().column)


@given(
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cut=st.integers(0, 4),
)
@settings(max_examples=8, deadline=None)
def test_any_widths_groups_and_kinds(widths: list[int], kind: str, dtype: torch.dtype, cut: int) -> None:
    """Beside the optimizer's own step on the same gradients, with two groups of different settings."""

    def made() -> tuple[nn.Module, FusedOptimizer]:
        torch.manual_seed(1)
        sizes = [6, *widths, 3]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).to(dtype)
        parameters = list(model.parameters())
        groups = [{"params": parameters[:cut], "lr": 0.03}, {"params": parameters[cut:], "weight_decay": 0.2}]
        return model, KINDS[kind]([group for group in groups if group["params"]])

    (ours, planned), (theirs, stepped) = made(), made()
    step = TrainingStep(ours, loss32, data(0, dtype=dtype), optimizer=planned)
    gradients = TrainingStep(theirs, loss32, data(0, dtype=dtype))
    for number in range(2):
        step(data(number, dtype=dtype))
        gradients(data(number, dtype=dtype))
        stepped.step()
        stepped.zero_grad()
    same(planned, stepped)


def test_a_budget_is_that_of_plan_and_states_together() -> None:
    def made(budget: int | None) -> TrainingStep:
        model = SmallGPT()
        return TrainingStep(model, loss_of, batch(0), optimizer=FusedAdamW(model.parameters()), budget=budget)

    with pytest.raises(BudgetError) as caught:
        made(1)
    least = caught.value.least_nbytes
    step = made(least)
    assert step.plan.arena_nbytes <= least
    step(batch(0))


def test_settings_and_schedules_take_effect_at_each_step() -> None:
    ours, theirs = net(), net()
    optimizer, reference = FusedSGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5) for made in (optimizer, reference)]
    step = TrainingStep(ours, loss32, data(0), optimizer=optimizer)
    for number in range(4):
        x, target = data(number)
        loss32(theirs(x), target).backward()
        reference.step()
        reference.zero_grad()
        step((x, target))
        for schedule in schedules:
            schedule.step()
        for group in (optimizer.param_groups[0], reference.param_groups[0]):
            group["weight_decay"] = 0.1 * number
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_checkpoints_hold_the_states_and_load_where_they_lie() -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, precision="bf16")
    step(data(0))
    file = io.BytesIO()
    torch.save({"model": step.state_dict(), "optimizer": optimizer.state_dict()}, file)
    elements = sum(p.numel() for p in model.parameters())
    assert file.tell() < 14 * elements + 32 * 2**10, "states, and not the arena"
    first = [step(data(number)).item() for number in (1, 2)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    where = [block.data_ptr() for block in optimizer.state_blocks().values()]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert [block.data_ptr() for block in optimizer.state_blocks().values()] == where
    assert [step(data(number)).item() for number in (1, 2)] == first


def test_blocks_placed_anywhere_in_memory_load_and_show_their_states() -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    memory = torch.zeros(100_000, dtype=torch.uint8)
    blocks, start = {}, 256
    for name, block in optimizer.state_blocks().items():
        blocks[name] = memory[start : start + block.nbytes].view(block.dtype)
        start += -(-block.nbytes // 256) * 256
    optimizer.place_states(blocks)
    loss32(model(data(0)[0]), data(0)[1]).backward()
    optimizer.step()
    twin_model = net()
    twin = FusedAdamW(twin_model.parameters(), lr=0.01)
    twin.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(twin.state_dict())
    for one, two in zip(optimizer.state.values(), twin.state.values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_new_parameter_group_is_planned_in() -> None:
    model = net()
    parameters = list(model.parameters())
    optimizer = FusedAdamW(parameters[:2], lr=0.01)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer)
    step(data(0))
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.add_param_group({"params": parameters[2:]})
    step(data(1))
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [2.0] * 2 + [1.0] * 4


def test_release_gives_model_and_optimizer_memory_of_their_own() -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer)
    twin = copy.deepcopy(model)
    other = FusedAdamW(twin.parameters(), lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    step(data(0))
    arena = step._arena
    assert arena is not None
    first, last = arena.bytes.data_ptr(), arena.bytes.data_ptr() + arena.nbytes
    step.release()
    for tensor in (*model.parameters(), *optimizer.state_blocks().values()):
        assert not first <= tensor.data_ptr() < last
    for net_, made in ((model, optimizer), (twin, other)):
        for number in range(0 if net_ is twin else 1, 2):
            loss32(net_(data(number)[0]), data(number)[1]).backward()
            made.step()
            made.zero_grad()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
