"""Cross-entropy's backward in one operator: against float64 and eager, ignored targets, in place, nothing allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from planner import plan, trace
from planner.operators import CROSS_ENTROPY_BACKWARD
from runtime import ArenaRuntime
from runtime.measure import allocations
from tests.kernels.harness import perform

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("overwrite", [None, 1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 13), (64, 1000), (0, 5)])
def test_gradient_against_float64(
    reduction: str, ignored: str, dtype: torch.dtype, overwrite: int | None, rows: int, classes: int
) -> None:
    target = torch.arange(rows) % classes
    if ignored != "none":
        target[:: 2 if ignored == "some" else 1] = -100
    logits = (10 * draw(rows, classes)).requires_grad_()
    loss = functional.cross_entropy(logits, target, reduction=reduction)
    gradient = draw(*loss.shape, seed=1)
    (expected,) = torch.autograd.grad(loss, logits, gradient)
    logarithms = logits.detach().log_softmax(1).to(dtype)
    total = torch.tensor(float((target != -100).sum()), dtype=dtype)
    values = [gradient.to(dtype), logarithms, target, total, REDUCTIONS[reduction], -100]
    outcome = perform(CROSS_ENTROPY_BACKWARD, values, {}, [expected.to(dtype)], overwrite=overwrite)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(outcome.results[0].double(), expected, rtol=bound, atol=bound, equal_nan=True)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes == 0


def step(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(logits * 2, target, **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}, {"label_smoothing": 0.1}], ids=str)
def test_planned_step_equals_eager(options: dict[str, Any]) -> None:
    logits, target = draw(50, 20).float().requires_grad_(), torch.arange(50) % 20
    expected = step(logits, target, **options)
    (gradient,) = torch.autograd.grad(expected, logits)
    made = plan(trace(lambda x, y: step(x, y, **options), (logits, target), loss=lambda loss: loss, mode="joint"))
    run = ArenaRuntime(made)
    for _ in range(2):
        loss, gradients = run(logits.detach(), target, poison=True)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients["input.0"], gradient)
    assert allocations(run.execute).calls == 0


def test_one_matrix_of_logits_is_alive_at_a_time() -> None:
    logits = torch.empty(64, 4096, device="meta", requires_grad=True)
    target = torch.empty(64, dtype=torch.int64, device="meta")
    made = plan(trace(step, (logits, target), loss=lambda loss: loss, mode="joint"))
    assert any(operation.operator == CROSS_ENTROPY_BACKWARD for operation in made.graph.operations)
    matrix = 64 * 4096 * 4
    assert made.arena_nbytes < 2.1 * matrix


def test_a_gradient_somebody_else_reads_is_kept() -> None:
    weight = torch.ones(20)
    logits, target = draw(50, 20).float().requires_grad_(), torch.arange(50) % 20
    made = plan(trace(lambda x, y: step(x, y, weight=weight), (logits, target), loss=lambda loss: loss, mode="joint"))
    assert all(operation.operator != CROSS_ENTROPY_BACKWARD for operation in made.graph.operations)
