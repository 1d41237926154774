"""Executed attention backwards: gradients equal autograd's on every step, the arena poisoned before each."""

from __future__ import annotations

import pytest
import torch

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.measure import allocations
from tests.attention_cases import Shape, in_float64

SHAPES = [
    Shape(2, 4, 64, 64),
    Shape(1, 1, 33, 8, dropout=0.0),
    Shape(3, 2, 43, 20, causal=True),
    Shape(8, 12, 32, 96, fused=False),
    Shape(1, 16, 128, 128, causal=True, dropout=0.0),
    Shape(5, 3, 1, 12),
    Shape(2, 8, 65, 64, fused=False, causal=True),
    Shape(4, 8, 128, 128),
]
STEPS = 5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strategy", ["materialized", "sliced"])
def test_backward_equals_autograd(shape: Shape, strategy: str) -> None:
    module, x = shape.build()
    graph = trace(module, (x,))
    assert graph.forward is not None
    slices = 3 if strategy == "sliced" else None
    run = ArenaRuntime(plan(graph, strategy=strategy, slices=slices))
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        x = torch.randn(x.shape).requires_grad_()
        incoming = torch.randn(x.shape)
        torch.manual_seed(step)
        y = module(x)
        names = [port.name for port in graph.gradients]
        known = {**dict(module.named_parameters()), "input.0": x}
        expected = torch.autograd.grad(y, [known[name] for name in names], incoming)
        torch.manual_seed(step)
        outputs, saved = graph.forward(x)
        torch.testing.assert_close(outputs, y.detach(), rtol=0, atol=0)
        ours = run(*saved, incoming, poison=True)
        exact = in_float64(module, x, incoming, step)
        for name, gradient in zip(names, expected, strict=True):
            torch.testing.assert_close(ours[name], gradient, rtol=2e-5, atol=2e-6)
            error = (ours[name].double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-30)
            eager = (gradient.double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-30)
            assert error <= 2 * eager + 1e-6, f"step {step}: {name}"


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[7]], ids=str)
def test_sliced_equals_materialized_bit_for_bit(shape: Shape) -> None:
    module, x = shape.build()
    graph = trace(module, (x,))
    assert graph.forward is not None
    _, saved = graph.forward(x)
    incoming = torch.randn(x.shape)
    whole = ArenaRuntime(plan(graph, strategy="materialized"))(*saved, incoming, copy=True)
    for slices in (1, 2, 5, 16):
        cut = ArenaRuntime(plan(graph, strategy="sliced", slices=slices))(*saved, incoming, poison=True)
        for name, gradient in whole.items():
            torch.testing.assert_close(cut[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("strategy", ["materialized", "sliced"])
def test_16_bit_backward_is_as_close_to_float64_as_eager(dtype: str, strategy: str) -> None:
    shape = Shape(2, 4, 43, 64, dtype=dtype)
    module, x = shape.build()
    graph = trace(module, (x,))
    assert graph.forward is not None
    made = plan(graph, strategy=strategy, slices=3 if strategy == "sliced" else None)
    run = ArenaRuntime(made)
    for step in range(STEPS):
        incoming = torch.randn(x.shape).to(x.dtype)
        torch.manual_seed(step)
        y = module(x)
        names = [port.name for port in graph.gradients]
        known = {**dict(module.named_parameters()), "input.0": x}
        expected = torch.autograd.grad(y, [known[name] for name in names], incoming)
        torch.manual_seed(step)
        ours = run(*graph.forward(x)[1], incoming, poison=True)
        exact = in_float64(module, x, incoming, step)
        for name, gradient in zip(names, expected, strict=True):
            error = (ours[name].double() - exact[name]).norm() / exact[name].norm()
            eager = (gradient.double() - exact[name]).norm() / exact[name].norm()
            assert error <= 1.5 * eager + 1e-4, f"step {step}: {name}"
    assert [entry.operator for entry in made.unplanned] == ["arenaplan.matmul"], "its float32 tiles are listed"


@pytest.mark.parametrize("mode", ["backward", "joint"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("strategy", ["materialized", "sliced"])
def test_nothing_is_allocated(mode: str, dtype: str, strategy: str) -> None:
    module, x = Shape(2, 4, 64, 64, dtype=dtype, causal=True).build()
    graph = trace(module, (x,), mode=mode)
    run = ArenaRuntime(plan(graph, strategy=strategy))
    incoming = torch.randn(x.shape).to(x.dtype)
    inputs = [x, incoming]
    if mode == "backward":
        assert graph.forward is not None
        inputs = [*graph.forward(x)[1], incoming]
    run(*inputs)
    assert allocations(lambda: run(*inputs)).calls == 0


def test_the_counter_sees_an_allocation() -> None:
    x = torch.randn(100)
    seen = allocations(lambda: x * x)
    assert seen.calls == 1
    assert seen.nbytes == 400
    assert seen.peak_nbytes == 400
    out = torch.empty(100)
    assert allocations(lambda: torch.mul(x, x, out=out)).calls == 0


def test_dropout_masks_are_the_ones_the_forward_used() -> None:
    module, x = Shape(2, 2, 16, 8, dropout=0.5).build()
    graph = trace(module, (x,), mode="joint")
    run = ArenaRuntime(plan(graph))
    incoming = torch.ones(x.shape)
    torch.manual_seed(11)
    y = module(x)
    torch.manual_seed(11)
    outputs, gradients = run(x, incoming, poison=True)
    torch.testing.assert_close(outputs, y.detach(), rtol=0, atol=0)
    kept = (y.detach() != 0).float() / 0.5
    torch.testing.assert_close(gradients["output.bias"], kept.sum((0, 1)))
