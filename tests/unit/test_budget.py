"""A budget is kept or refused: in place, then sliced, then recomputed, and never a byte over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from planner import plan, trace
from planner.errors import BudgetError, CapacityError
from planner.graph import Graph
from planner.operators import is_random
from planner.plan import Plan
from planner.rewrite.costs import cost
from planner.rewrite.evict import Evictor
from planner.variants import measured
from runtime import ArenaRuntime, TrainingStep
from runtime.cli import app
from tests.property.test_programs import PURE, Step, inputs, interpret, leaves, programs, runs_as_autograd


def work(made: Plan) -> int:
    return sum(cost(operation, made.graph.tensors) for operation in made.graph.operations)


def again(made: Plan) -> list[str]:
    return [operation.name for operation in made.graph.operations if ".again" in operation.name]


def planned_or_least(graph: Graph, budget: int) -> tuple[Plan | None, int]:
    """The plan within a budget, or none and the least budget that planning says it reaches."""
    try:
        return plan(graph, budget=budget, alignment=16), 0
    except BudgetError as error:
        return None, error.least_nbytes


class Tower(nn.Module):
    """A few residual blocks with dropout, whose activations outweigh their weights."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(functional.dropout(functional.gelu(up(norm(x))), 0.3))
        return x


def tower_graph(rows: int = 256) -> Graph:
    torch.manual_seed(0)
    x = torch.randn(rows, 16)
    return trace(Tower(), (x,), loss=lambda y: y.square().mean(), mode="joint")


def test_a_generous_budget_does_not_pay_for_recomputation() -> None:
    graph = tower_graph()
    once = plan(graph, recompute=False)
    generous = plan(graph, budget=2 * once.arena_nbytes)
    assert not again(generous)
    assert generous.arena_nbytes == once.arena_nbytes


def test_the_boundary_is_exact() -> None:
    graph = tower_graph()
    once = plan(graph, recompute=False)
    assert work(plan(graph, budget=once.arena_nbytes)) == work(once)
    less = plan(graph, budget=once.arena_nbytes - 1)
    assert less.arena_nbytes < once.arena_nbytes
    assert again(less)
    with pytest.raises(BudgetError):
        plan(graph, budget=once.arena_nbytes - 1, recompute=False)


def test_less_memory_costs_more_work() -> None:
    graph = tower_graph()
    most = plan(graph, recompute=False).arena_nbytes
    with pytest.raises(BudgetError) as caught:
        plan(graph, budget=1)
    least = caught.value.least_nbytes
    assert least < 0.6 * most
    curve = [plan(graph, budget=budget) for budget in (most, (3 * most + least) // 4, (most + least) // 2, least)]
    assert [work(made) for made in curve] == sorted(work(made) for made in curve)
    assert work(curve[0]) < work(curve[-1]) < 2 * work(curve[0])


def test_the_error_says_what_is_in_the_way() -> None:
    graph = tower_graph()
    with pytest.raises(CapacityError) as caught:
        plan(graph, budget="20KiB")
    error = caught.value
    assert isinstance(error, BudgetError)
    assert (error.capacity_nbytes, error.needed_nbytes) == (20 * 2**10, error.least_nbytes)
    assert error.operation
    assert error.source.startswith("test_budget.py:")
    assert len(error.bottleneck) == len(error.bottleneck_nbytes) > 0
    assert list(error.bottleneck_nbytes) == sorted(error.bottleneck_nbytes, reverse=True)
    for part in (str(error.least_nbytes), error.operation, error.source, *error.bottleneck):
        assert part in str(error)
    reached = plan(graph, budget=error.least_nbytes)
    assert reached.arena_nbytes == error.least_nbytes
    assert reached.graph.operations[error.step].operator in error.operation


@pytest.mark.parametrize("strategy", ["traced", "materialized", "auto"])
def test_every_strategy_keeps_a_budget_or_refuses(strategy: str) -> None:
    graph = tower_graph()
    most = plan(graph, strategy=strategy, recompute=False).arena_nbytes
    assert plan(graph, strategy=strategy, budget=most).arena_nbytes == most
    if strategy == "traced":
        with pytest.raises(BudgetError):
            plan(graph, strategy=strategy, budget=most - 1)
    else:
        assert plan(graph, strategy=strategy, budget=most * 3 // 4).arena_nbytes <= most * 3 // 4


@pytest.mark.parametrize("share", [0.45, 0.6])
def test_r01_a_recomputed_forward_has_the_masks_of_the_first(share: float) -> None:
    """pytorch/pytorch#190758: under a budget the recomputed dropout drew fresh numbers."""
    torch.manual_seed(0)
    ours, eager = Tower(), Tower()
    eager.load_state_dict(ours.state_dict())
    x = torch.randn(256, 16)
    graph = trace(ours, (x,), loss=lambda y: y.square().mean(), mode="joint")
    budget = int(share * plan(graph, recompute=False).arena_nbytes)
    made = plan(graph, budget=budget)
    assert made.arena_nbytes <= budget
    masked = [o for o in made.graph.operations if any(made.graph.tensors[i].dtype == "bool" for i in o.reads)]
    assert any(".again" in operation.name for operation in masked)
    assert not any(is_random(o.operator) for o in made.graph.operations if ".again" in o.name)
    run = ArenaRuntime(made)
    for step in range(3):
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        loss = eager(x).square().mean()
        gradients = torch.autograd.grad(loss, list(eager.parameters()))
        torch.manual_seed(step)
        value, found = run(x, poison=True)
        torch.testing.assert_close(value, loss.detach())
        for one, two in zip(found.values(), gradients, strict=True):
            torch.testing.assert_close(one, two)


def test_a_training_step_within_a_budget() -> None:
    torch.manual_seed(0)
    ours, eager = Tower(), Tower()
    eager.load_state_dict(ours.state_dict())
    batch = (torch.randn(256, 16),)
    free = TrainingStep(ours, lambda y: y.square().mean(), batch, recompute=False)
    budget = free.plan.arena_nbytes * 6 // 10
    free.release()
    step = TrainingStep(ours, lambda y: y.square().mean(), batch, budget=budget)
    assert step.plan.arena_nbytes <= budget
    for number in range(3):
        torch.manual_seed(number)
        loss = eager(*batch).square().mean()
        eager.zero_grad()
        loss.backward()
        torch.manual_seed(number)
        ours.zero_grad()
        torch.testing.assert_close(step(batch), loss.detach())
        for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@given(programs((*PURE, "dropout"), 9), st.integers(1, 100))
@settings(max_examples=15, deadline=None)
def test_l08_a_plan_is_within_its_budget_or_the_least_is_honest(steps: list[Step], share: int) -> None:
    """pytorch/pytorch#197871: a budget solver returned a plan over its budget."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return interpret(steps, x, y)

    graph = trace(program, leaves(0), mode="joint")
    once = plan(graph, recompute=False, alignment=16)
    budget = max(once.arena_nbytes * share // 100, 1)
    made, least = planned_or_least(graph, budget)
    if made is None:
        assert least > budget
        made, _ = planned_or_least(graph, least)
        assert made is not None
        assert made.arena_nbytes == least
        assert planned_or_least(graph, least - 1) == (None, least)
        budget = least
    assert made.arena_nbytes <= budget
    runs_as_autograd(made, program)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_l08_three_equal_weights(budget: int) -> None:
    """pytorch/pytorch#197871: weights [1, 1, 1] under a budget of 1 gave a plan of 2."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.sin(), x.cos(), x.tanh()
        return (a @ b) @ c

    graph = trace(function, (torch.randn(4, 4),), mode="forward")
    unit = 4 * 4 * 4
    made, least = planned_or_least(graph, budget * unit)
    assert least > budget * unit if made is None else made.arena_nbytes <= budget * unit


@given(programs((*PURE, "dropout"), 10), st.integers(0, 16))
@settings(max_examples=40, deadline=None)
def test_eviction_keeps_every_limit_it_claims(steps: list[Step], share: int) -> None:
    x, y = inputs(0)
    graph = trace(lambda a, b: interpret(steps, a, b), (x.requires_grad_(), y.requires_grad_()), mode="joint")
    evictor = Evictor(graph, alignment=16)
    most = measured("traced", None, graph, 16, donate=True).lower_bound_nbytes
    low = evictor.least_possible_nbytes
    assert low <= most
    limit = low + (most - low) * share // 16
    changed = evictor.within(limit)
    assert share < 16 or changed is not None
    if changed is not None:
        assert measured("traced", None, changed, 16, donate=True).lower_bound_nbytes <= limit
    assert evictor.within(low - 1) is None


def test_the_command_ends_with_one_line_and_status_one(tmp_path: Path) -> None:
    (tmp_path / "tower.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), (torch.ones(32, 8),)\n"
    )
    call = ["plan", f"{tmp_path}/tower.py:make", "--pass", "joint", "--json", "--budget"]
    refused = CliRunner().invoke(app, [*call, "4KiB"])
    assert refused.exit_code == 1
    assert refused.stdout == ""
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("arenaplan: error: no plan fits in the budget of 4096 bytes: the least reachable is")
    least = line.partition("the least reachable is ")[2].split()[0]
    assert CliRunner().invoke(app, [*call, least]).exit_code == 0
