"""The models of the zoo trained through `TrainingStep` and ``torch.compile``, five optimizer steps beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime import TrainingStep
from runtime.compiler import backend
from runtime.measure import allocations
from tests.models.zoo import CASES, Case, build

STEPS = 5
RATE = 0.05
#: One of each family in the default run; the other attention implementations and losses are slow.
QUICK = ("gpt2-sdpa", "llama-sdpa", "encoder", "resnet", "char-gpt")


def names() -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


def optimizers(one: torch.nn.Module, two: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9) for module in (one, two)]


def follow(case: Case, ours: Callable[[dict[str, Any]], torch.Tensor], eager: torch.nn.Module) -> None:
    """Five optimizer steps with equal losses, gradients and buffers."""
    made = optimizers(case.module, eager)
    for step in range(STEPS):
        inputs = case.inputs(step)
        torch.manual_seed(step)
        loss = ours(inputs)
        torch.manual_seed(step)
        expected = case.loss(eager(**inputs))
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        scale = max(p.grad.abs().max().item() for p in eager.parameters() if p.grad is not None)
        for (name, one), two in zip(case.module.named_parameters(), eager.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), name
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=5e-4, atol=5e-6 * max(scale, 1.0), msg=name)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), two in zip(case.module.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", names())
def test_training_step_follows_eager(name: str) -> None:
    case = build(name)
    eager = copy.deepcopy(case.module)
    step = TrainingStep(case.module, lambda output, _: case.loss(output), case.inputs(0))
    follow(case, step, eager)


# After a graph break Dynamo looks at the `.grad` of what the graph gets, whether it is a leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", names())
def test_torch_compile_follows_eager(name: str) -> None:
    torch._dynamo.reset()
    case = build(name)
    eager = copy.deepcopy(case.module)
    compiled = torch.compile(case.module, backend=backend)

    def ours(inputs: dict[str, Any]) -> torch.Tensor:
        loss = case.loss(compiled(**inputs))
        loss.backward()
        return loss

    follow(case, ours, eager)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gpt2-sdpa", "bert-sdpa", "llama-sdpa"])
def test_a_steady_training_step_allocates_nothing(name: str) -> None:
    case = build(name)
    step = TrainingStep(case.module, lambda output, _: case.loss(output), case.inputs(0))
    inputs = case.inputs(1)
    for _ in range(2):
        step(inputs)
        case.module.zero_grad()
    assert allocations(lambda: step(inputs)).calls == 0
