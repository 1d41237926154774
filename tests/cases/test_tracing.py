"""Tracing whole steps: what PyTorch's own capture got wrong, by case; sources in each docstring."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner import plan, trace
from planner.errors import TraceError
from planner.graph import Role
from runtime import ArenaRuntime
from runtime.measure import allocations
from tests.custom_functions import AddOne, ScalesIncoming
from tests.helpers import joint_equals_eager


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed).requires_grad_()


def steps_equal_eager(
    module: nn.Module, inputs: Callable[[int], tuple[Any, ...]], loss: Callable[[Any], torch.Tensor], steps: int = 4
) -> tuple[nn.Module, Any]:
    """Planned joint steps with gradient descent by hand, beside eager; returns the eager twin and the plan."""
    eager = copy.deepcopy(module)
    made = plan(trace(module, inputs(0), loss=loss, mode="joint"))
    run = ArenaRuntime(made)
    ours, theirs = dict(module.named_parameters()), dict(eager.named_parameters())
    for step in range(steps):
        torch.manual_seed(step)
        expected = loss(eager(*inputs(step)))
        names = [port.name for port in made.graph.gradients]
        gradients = torch.autograd.grad(expected, [theirs[name] for name in names], allow_unused=True)
        torch.manual_seed(step)
        value, found = run(*inputs(step), poison=True)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                assert (found[name] is None) == (gradient is None)
                if gradient is not None:
                    torch.testing.assert_close(found[name], gradient)
                    ours[name] -= 0.1 * found[name]
                    theirs[name] -= 0.1 * gradient
    return eager, made


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d])
def test_t05_running_statistics_are_updated_exactly(kind: type[nn.Module]) -> None:
    """pytorch/pytorch#88375: running_mean, running_var and num_batches_tracked lost their updates."""
    extra = {"track_running_stats": True, "affine": True} if kind is nn.InstanceNorm2d else {}
    module = nn.Sequential(kind(4, **extra), nn.ReLU()).train()
    shape = (6, 4) if kind is nn.BatchNorm1d else (6, 4, 5, 3)
    eager, _ = steps_equal_eager(module, lambda s: (draw(*shape, seed=s) * 2 + 3,), lambda y: y.square().sum())
    before = dict(module.named_buffers())
    # Of a (N, C) input ATen sums rows in float32; all else is the same to the bit.
    tolerance = 2.5e-7 if kind is nn.BatchNorm1d else 0
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(before[name], buffer, rtol=tolerance, atol=0)
    if kind is not nn.InstanceNorm2d:
        assert before["0.num_batches_tracked"].item() == 4


def test_t05_evaluation_leaves_the_statistics_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    module[1].running_mean.normal_()
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    steps_equal_eager(module, lambda s: (draw(2, 3, 6, 6, seed=s),), lambda y: y.sin().mean())
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, kept[name], rtol=0, atol=0)


def test_t07_second_derivatives_equal_eager() -> None:
    """pytorch/pytorch#91469, #181581: a gradient of a gradient was silently bogus."""

    def function(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad((x**5).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (first * second).sum()

    joint_equals_eager(function, lambda s: (leaf(5, seed=s),))


def test_t08_a_custom_function_that_changes_its_input() -> None:
    """pytorch/pytorch#180642, #133491: the gradient went to the wrong slot, mark_dirty was dropped."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (AddOne.apply(x * y) * y).sin()

    joint_equals_eager(function, lambda s: (leaf(4, seed=s), leaf(4, seed=s + 9)))


def test_t08_a_custom_backward_that_changes_its_incoming_gradient() -> None:
    """pytorch/pytorch#141111."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return ScalesIncoming.apply(x.sin()) * 1.5

    joint_equals_eager(function, lambda s: (leaf(4, seed=s),))


def test_t10_gradients_of_unused_branches_are_none_and_take_no_memory() -> None:
    """pytorch/pytorch#131794, #58511: three outputs, the loss uses one."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return [branch(x).tanh() for branch in self.branches]

    module = Branches()
    _, made = steps_equal_eager(module, lambda s: (draw(3, 4, seed=s),), lambda outputs: outputs[1].sum())
    unused = [port for port in made.graph.gradients if port.tensor is None]
    assert len(unused) == 4
    reserved = [storage for storage in made.graph.storages if storage.role is Role.PARAMETER_GRADIENT]
    assert sum(storage.nbytes for storage in reserved) == (16 + 4) * 4


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_r01_the_backward_uses_the_forward_mask(rate: float) -> None:
    """pytorch/pytorch#190758: the gradient is non-zero exactly where the output is."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, rate, training=True)

    x = torch.ones(40, 30, requires_grad=True)
    run = ArenaRuntime(plan(trace(function, (x,), mode="joint")))
    masks = []
    for step in range(3):
        torch.manual_seed(step)
        y, gradients = run(x, torch.ones(40, 30), poison=True, copy=True)
        torch.testing.assert_close(y, gradients["input.0"], rtol=0, atol=0)
        torch.manual_seed(step)
        torch.testing.assert_close(y, functional.dropout(x.detach(), rate, training=True), rtol=0, atol=0)
        masks.append(y != 0)
    assert not torch.equal(masks[0], masks[1])


def test_r01_random_tensors_are_drawn_as_eager_draws_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x) + torch.randn_like(x)

    joint_equals_eager(function, lambda s: (leaf(17, 3, seed=s),), exact=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_o01_tied_weights_have_one_slot_and_one_gradient(transposed: bool) -> None:
    """pytorch/pytorch#114743, #147380, #127357, #85093: the same parameter twice, and a use of its transpose."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(5, 5, bias=False)
            if not transposed:
                self.decode = nn.Linear(5, 5, bias=False)
                self.decode.weight = self.encode.weight

        def forward(self, x):
            hidden = self.encode(x).tanh()
            return functional.linear(hidden, self.encode.weight.t()) if transposed else self.decode(hidden)

    module = Tied()
    _, made = steps_equal_eager(module, lambda s: (draw(3, 5, seed=s),), lambda y: y.square().sum())
    assert [port.name for port in made.graph.gradients] == ["encode.weight"]
    assert sum(storage.role is Role.PARAMETER for storage in made.graph.storages) == 1


def test_o02_frozen_parameters_take_no_gradient_memory() -> None:
    """pytorch/pytorch#104690, huggingface/peft#1702."""
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    module[0].requires_grad_(False)
    frozen = module[0].weight.clone()
    _, made = steps_equal_eager(module, lambda s: (draw(3, 6, seed=s),), lambda y: y.square().sum())
    assert [port.name for port in made.graph.gradients] == ["2.weight", "2.bias"]
    reserved = sum(s.nbytes for s in made.graph.storages if s.role is Role.PARAMETER_GRADIENT)
    assert reserved == (12 + 2) * 4
    torch.testing.assert_close(module[0].weight, frozen, rtol=0, atol=0)


def test_o18_a_channels_last_weight_gets_its_gradient_by_value() -> None:
    """pytorch/pytorch#70222, #127922: strides of a 1 × 1 convolution's gradient against those of its weight."""
    module = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 3)).to(memory_format=torch.channels_last)

    def inputs(seed: int) -> tuple[torch.Tensor]:
        return (draw(2, 6, 5, 5, seed=seed).contiguous(memory_format=torch.channels_last),)

    steps_equal_eager(module, inputs, lambda y: y.square().mean())


def test_o20_sparse_gradients_are_refused_before_anything_runs() -> None:
    """pytorch/pytorch#150656."""
    module = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(TraceError, match="sparse"):
        trace(module, (torch.tensor([1, 2]),), loss=lambda y: y.sum(), mode="joint")


def test_l11_steps_two_and_on_need_no_more_than_the_first() -> None:
    """microsoft/onnxruntime#14477."""
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    run = ArenaRuntime(plan(trace(module, (draw(5, 8),), loss=lambda y: y.square().mean(), mode="joint")))
    measured = [allocations(lambda s=s: run(draw(5, 8, seed=s))) for s in range(4)]
    assert len({step.peak_nbytes for step in measured}) == 1
    assert len({step.calls for step in measured}) == 1


def test_a12_two_backward_passes_in_one_step() -> None:
    """tinygrad/tinygrad#16571, #16588: right on the first run, wrong on every replay."""

    class PerExample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, images):
            channels_first = images.permute(0, 3, 1, 2).contiguous()
            losses = self.conv(channels_first).square().flatten(1).mean(1)
            weight = self.conv.weight
            (first,) = torch.autograd.grad(losses[0], weight, retain_graph=True, create_graph=True)
            (second,) = torch.autograd.grad(losses[1], weight, retain_graph=True, create_graph=True)
            return losses.sum() + (first * second).sum()

    steps_equal_eager(PerExample(), lambda s: (draw(2, 5, 5, 3, seed=s),), lambda y: y)
