"""What people train: whole steps, planned, beside eager from the same seed, for five steps of gradient descent."""

from __future__ import annotations

import copy

import pytest
import torch

from planner import plan, trace
from planner.graph import Role
from planner.plan import Plan
from runtime import ArenaRuntime
from runtime.measure import allocations
from tests.models.zoo import CASES, Case, build

STEPS = 5
RATE = 0.05
#: Called with `labels=` these compute the same but for the loss; eager attention is that of the sdpa test's formula.
SLOW = frozenset(
    name for name in CASES if name.endswith("-labels") and name not in ("gpt2-sdpa-labels", "t5-eager-labels")
) | {"t5-sdpa", "vit-eager", "bert-eager"}
#: Only convolutions allocate.
CONVOLUTIONS = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})


def planned(case: Case) -> tuple[Plan, ArenaRuntime]:
    made = plan(trace(case.module, case.inputs(0), loss=case.loss, mode="joint"), time_limit=2)
    return made, ArenaRuntime(made)


def close(ours: torch.Tensor, eager: torch.Tensor, scale: float) -> None:
    """Equal but for rounding, which is relative to the largest gradient where a gradient vanishes by itself."""
    torch.testing.assert_close(ours, eager, rtol=2e-4, atol=2e-6 * max(scale, 1.0))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_five_steps_equal_eager(name: str) -> None:
    case = build(name)
    eager = copy.deepcopy(case.module)
    made, run = planned(case)
    ours, theirs = dict(case.module.named_parameters()), dict(eager.named_parameters())
    for step in range(STEPS):
        inputs = case.inputs(step)
        torch.manual_seed(step)
        loss = case.loss(eager(**inputs))
        names = [port.name for port in made.graph.gradients]
        gradients = torch.autograd.grad(loss, [theirs[item] for item in names], allow_unused=True)
        torch.manual_seed(step)
        our_loss, our_gradients = run(*inputs.values(), poison=True)
        torch.testing.assert_close(our_loss, loss.detach(), rtol=1e-5, atol=1e-6)
        scale = max(gradient.abs().max().item() for gradient in gradients if gradient is not None)
        with torch.no_grad():
            for item, gradient in zip(names, gradients, strict=True):
                assert (our_gradients[item] is None) == (gradient is None)
                if gradient is not None:
                    close(our_gradients[item], gradient, scale)
                    ours[item] -= RATE * our_gradients[item]
                    theirs[item] -= RATE * gradient
        for (item, one), (_, two) in zip(case.module.named_buffers(), eager.named_buffers(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=lambda text, item=item: f"{item}: {text}")
    assert {entry.operator for entry in made.unplanned} <= CONVOLUTIONS


@pytest.mark.parametrize("name", ["gpt2-eager", "gpt2-sdpa", "bert-sdpa", "llama-sdpa", "t5-eager", "encoder", "mixer"])
def test_a_steady_step_allocates_nothing(name: str) -> None:
    case = build(name)
    made, run = planned(case)
    inputs = case.inputs(1)
    run(*inputs.values())
    run.load(*inputs.values())
    assert allocations(run.execute).calls == 0
    assert made.unplanned == ()


@pytest.mark.parametrize("name", ["gpt2-sdpa", "resnet"])
def test_l11_later_steps_need_no_more_than_the_first(name: str) -> None:
    """microsoft/onnxruntime#14477: a second run needed more memory than the first."""
    case = build(name)
    _, run = planned(case)
    peaks = [allocations(lambda step=step: run(*case.inputs(step).values())).peak_nbytes for step in range(STEPS)]
    assert peaks[1:] == peaks[:1] * (STEPS - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unplanned_convolutions_are_listed_with_what_they_allocate(dtype: torch.dtype) -> None:
    case = build("resnet")
    case.module.to(dtype)
    inputs = tuple(value.to(dtype) for value in case.inputs(0).values())
    made = plan(trace(case.module, inputs, loss=case.loss, mode="joint"))
    assert {entry.operator for entry in made.unplanned} == CONVOLUTIONS
    run = ArenaRuntime(made)
    run(*inputs)
    run.load(*inputs)
    measured = allocations(run.execute).nbytes
    listed = sum(entry.nbytes for entry in made.unplanned)
    assert 0 < measured <= listed
    if dtype == torch.float64:
        assert measured == listed


def parameters_once(made: Plan, module: torch.nn.Module) -> None:
    """pytorch/executorch#1300: every parameter has one slot, no larger than itself."""
    stored = sum(s.nbytes for s in made.graph.storages if s.role is Role.PARAMETER)
    assert stored == sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama-sdpa", "char-gpt"])
def test_l07_parameters_are_counted_once(name: str) -> None:
    case = build(name)
    made, _ = planned(case)
    parameters_once(made, case.module)
    gradients = [s for s in made.graph.storages if s.role is Role.PARAMETER_GRADIENT]
    assert len(gradients) == len(list(case.module.parameters()))
