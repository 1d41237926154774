"""Sizes at the edge: empty, one, odd; sources in each docstring."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.attention import build_attention
from runtime.errors import InputError
from tests.helpers import forward_equals_eager, joint_equals_eager


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [(13, 5), (257, 3), (64, 64), (1, 1)])
def test_l01_in_place_reuse_with_odd_sizes(sizes: tuple[int, int]) -> None:
    """ggml-org/llama.cpp#17884, #16679: a child smaller than its parent's slot, not a multiple of the alignment."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        b = (a + 1).sin()
        c = b[:, : max(b.shape[1] - 1, 1)] * 2
        d = c.relu().sum(0)
        return (d + a.sum()) * b.mean(0)[: d.shape[0]]

    forward_equals_eager(function, lambda s: (draw(*sizes, seed=s),), exact=False)


def test_l04_another_shape_is_refused() -> None:
    """microsoft/onnxruntime#28359: a stale offset map must not be used for a new shape."""
    run = ArenaRuntime(plan(trace(lambda x: x * 2, (draw(32, 4),), mode="forward")))
    with pytest.raises(InputError, match="trace and plan again"):
        run(draw(1, 4))


def test_l10_empty_tensors() -> None:
    """microsoft/onnxruntime#20375; pytorch/pytorch#94830, #104937."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * 2, y + x.sum(), torch.cat([x, y])

    made = forward_equals_eager(function, lambda s: (torch.empty(0), draw(3, seed=s)))
    empty = [index for index, storage in enumerate(made.graph.storages) if storage.nbytes == 0]
    assert empty, "the plan keeps the empty storages"


@pytest.mark.parametrize(("inside", "outside"), [(0, 0), (0, 3), (3, 0)])
def test_l10_a_linear_layer_without_elements(inside: int, outside: int) -> None:
    with pytest.warns(UserWarning, match="zero-element") if inside * outside == 0 else None:
        module = nn.Linear(inside, outside)
    joint_equals_eager(module, lambda s: (draw(4, inside, seed=s).requires_grad_(),))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 5, 4), (3, 1, 1, 8), (2, 4, 1, 4), (1, 1, 7, 1)])
@pytest.mark.parametrize("mode", ["backward", "joint"])
def test_n07_batch_length_and_hidden_of_one(shape: tuple[int, int, int, int], mode: str) -> None:
    """bytedance/lightseq#191: batch size 1 squeezed the mask."""
    batch, heads, length, hidden = shape
    module, x = build_attention(batch, heads, length, hidden, dropout=0.0, causal=True, device="cpu")
    graph = trace(module, (x,), mode=mode)
    run = ArenaRuntime(plan(graph))
    y = module(x)
    incoming = torch.ones_like(y)
    names = [port.name for port in graph.gradients]
    known = {**dict(module.named_parameters()), "input.0": x}
    expected = torch.autograd.grad(y, [known[name] for name in names], incoming)
    if mode == "backward":
        assert graph.forward is not None
        ours = run(*graph.forward(x)[1], incoming, poison=True)
    else:
        _, ours = run(x, incoming, poison=True)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(ours[name], gradient)
