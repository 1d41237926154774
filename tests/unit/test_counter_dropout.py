"""Dropout masks that are never stored: the same in forward and backward, on every device, step after step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner import plan, trace, verify
from planner.operators import DROPOUT
from planner.rewrite.counter import counter_dropout
from runtime import ArenaRuntime


class Dropped(nn.Module):
    """A dropout whose mask shows in the output and in the gradient of its input."""

    def __init__(self, p: float, *, native: bool) -> None:
        super().__init__()
        self.p = p
        self.native = native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.native:  # as PyTorch traces it on a GPU
            return torch.native_dropout(x, self.p, True)[0] * 2.0
        return nn.functional.dropout(x, self.p, self.training) * 2.0


def _run(module, x, **options):
    graph = counter_dropout(trace(module, (x,), mode="joint"))
    made = plan(graph, time_limit=1)
    verify(made, graph)
    return made, ArenaRuntime(made, **options)


@pytest.mark.parametrize("native", [False, True], ids=["stored noise", "native"])
@pytest.mark.parametrize("p", [0.3, 0.5])  # a half is bernoulli_'s default, which the dispatcher leaves out
@pytest.mark.parametrize("shape", [(7,), (3, 43), (2, 5, 65), (300, 441)])
def test_forward_and_backward_drop_the_same(shape, p, native):
    x = torch.ones(shape, requires_grad=True)
    made, run = _run(Dropped(p, native=native), x)
    operators = [operation.operator for operation in made.graph.operations]
    assert operators.count(DROPOUT) == 2
    assert not any("bernoulli" in operator for operator in operators)
    assert all(storage.nbytes <= 4 * x.numel() + 8 for storage in made.graph.storages)
    torch.manual_seed(0)
    masks = []
    for _ in range(3):
        output, gradients = run(x, torch.ones_like(x), poison=True)
        torch.testing.assert_close(output, gradients["input.0"])
        scaled = torch.tensor(2 / (1 - p))
        torch.testing.assert_close(output, torch.where(output != 0, scaled, torch.tensor(0.0)))
        masks.append(output != 0)
    assert x.numel() < 20 or not torch.equal(masks[0], masks[1])
    if x.numel() > 1000:
        assert abs(masks[0].double().mean().item() - (1 - p)) < 0.01
    torch.manual_seed(0)
    assert torch.equal(run(x, torch.ones_like(x))[0] != 0, masks[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    x = torch.randn(5, 43).to(dtype).requires_grad_()
    _, run = _run(Dropped(0.5, native=False), x)
    output, gradients = run(x, torch.ones_like(x))
    kept = output != 0
    torch.testing.assert_close(output, torch.where(kept, x.detach() * 4, 0))
    torch.testing.assert_close(gradients["input.0"], torch.where(kept, 4.0, 0.0).to(dtype))


def test_triton_drops_what_the_cpu_drops():
    pytest.importorskip("triton")
    x = torch.randn(6, 43, requires_grad=True)
    results = []
    for kernels in ("aten", "triton"):
        _, run = _run(Dropped(0.4, native=False), x, kernels=kernels)
        torch.manual_seed(3)
        output, gradients = run(x, torch.ones_like(x), poison=True)
        results.append((output.clone(), gradients["input.0"].clone()))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_the_mask_is_no_longer_stored():
    """B·L·H bytes of mask, from the forward to the backward, become eight."""
    from runtime.attention import build_attention

    module, x = build_attention(2, 4, 64, 64, dropout=0.1)
    graph = trace(module, (x,), mode="joint")
    stored, counted = (plan(item, strategy="materialized", time_limit=1) for item in (graph, counter_dropout(graph)))
    flags = [sum(t.dtype == "bool" for t in item.graph.tensors) for item in (stored, counted)]
    assert counted.arena_nbytes < stored.arena_nbytes
    assert flags[0] >= 2
    assert [operation.operator for operation in counted.graph.operations].count(DROPOUT) == 4


def test_what_is_left_alone():
    def seen(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, mask = torch.native_dropout(x, 0.5, True)
        return result, mask

    x = torch.randn(3, 5)
    graph = counter_dropout(trace(seen, (x,), mode="forward"))
    assert DROPOUT not in [operation.operator for operation in graph.operations]
    handed_in = counter_dropout(trace(Dropped(0.5, native=False), (x.requires_grad_(),), mode="backward"))
    assert DROPOUT not in [operation.operator for operation in handed_in.operations]


@pytest.mark.slow
def test_a_whole_layer_is_the_same_on_the_cpu_and_in_triton():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.2, activation="gelu", batch_first=True)
    x, incoming = torch.randn(2, 13, 24, requires_grad=True), torch.randn(2, 13, 24)
    made = plan(counter_dropout(trace(layer, (x,), mode="joint")), time_limit=1)
    assert [operation.operator for operation in made.graph.operations].count(DROPOUT) >= 6
    results = []
    for kernels in ("aten", "triton"):
        run = ArenaRuntime(made, kernels=kernels)
        torch.manual_seed(1)
        output, gradients = run(x, incoming, poison=True)
        results.append([output.clone(), *(item.clone() for item in gradients.values())])
    for one, two in zip(*results, strict=True):
        assert (one - two).norm() <= 1e-5 * max(two.norm().item(), 1e-2)
