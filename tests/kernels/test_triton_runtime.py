"""Planned steps with Triton kernels, interpreted: the same results as eager, from every strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.attention import build_attention
from runtime.errors import ArenaError
from runtime.kernels.triton.launch import Launch
from tests.models.norms import Block


class Language(nn.Module):
    """Embedding, a block with everything a transformer has, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(29, 24)
        self.norm = nn.LayerNorm(24)
        self.attention = build_attention(2, 3, 7, 24, dropout=0.0, causal=True, device="cpu")[0]
        self.last = nn.LayerNorm(24)
        self.head = nn.Linear(24, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.attention(self.norm(x))
        return nn.functional.cross_entropy(self.head(self.last(x)).flatten(0, 1), tokens.flatten())


def launches(run: ArenaRuntime) -> list[str]:
    """Names of the kernels a runtime launches, in order."""
    return [item.kernel.fn.__name__.removesuffix("_kernel") for item in run._program if isinstance(item, Launch)]


def joint(module: nn.Module, inputs: tuple[torch.Tensor, ...], strategy: str, steps: int = 2) -> ArenaRuntime:
    """Run planned steps with Triton kernels in a poisoned arena, each equal to eager."""
    made = plan(trace(module, inputs, mode="joint"), strategy=strategy, time_limit=1)
    run = ArenaRuntime(made, kernels="triton")
    for step in range(steps):
        torch.manual_seed(step)
        expected = module(*inputs)
        incoming = torch.ones_like(expected)
        named = dict(module.named_parameters()) | {
            f"input.{k}": item for k, item in enumerate(inputs) if item.requires_grad
        }
        gradients = torch.autograd.grad(expected, list(named.values()), incoming, allow_unused=True)
        torch.manual_seed(step)
        output, ours = run(*inputs, incoming, poison=True)
        torch.testing.assert_close(output, expected.detach(), rtol=2e-5, atol=2e-6)
        for name, gradient in zip(named, gradients, strict=True):
            torch.testing.assert_close(ours[name], gradient, rtol=2e-4, atol=2e-6)
    return run


@pytest.mark.parametrize("strategy", ["traced", "materialized"])
def test_a_language_model_step(strategy):
    torch.manual_seed(0)
    tokens = torch.randint(0, 29, (2, 7))
    run = joint(Language(), (tokens,), strategy)
    found = launches(run)
    for name in ("norm", "norm_backward", "softmax", "softmax_backward", "embedding_backward", "sum_parts"):
        assert name in found, found
    if strategy == "materialized":  # without head copies, and with cross-entropy's backward as one operator
        assert "matmul" in found
        assert "cross_entropy_backward" in found
        assert found.count("softmax") == 1


@pytest.mark.parametrize(("strategy", "dropout", "causal"), [("materialized", 0.2, False), ("materialized", 0.0, True)])
def test_attention_runs_its_chains_as_one_kernel(strategy, dropout, causal):
    torch.manual_seed(0)
    module, x = build_attention(2, 3, 43, 24, dropout=dropout, causal=causal, device="cpu")
    run = joint(module, (x,), strategy)
    names = [operation.operator for operation in run.plan.graph.operations]
    bound = [item for item in run._program if isinstance(item, Launch)]
    (forward,) = [item for item in bound if item.kernel.fn.__name__ == "softmax_kernel"]
    (backward,) = [item for item in bound if item.kernel.fn.__name__ == "softmax_backward_kernel"]
    assert forward.setting.constants["MASK"] == int(causal)
    assert backward.setting.constants["DROP"] == (2 if dropout else 0)
    assert len(run._program) < len(names)
    assert backward.arguments[0].data_ptr() == backward.arguments[2].data_ptr()  # in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["module", "llama"])
def test_root_mean_square_norms(kind, dtype):
    """Forward and backward one launch each, and one that adds the parts; held against float64 as closely as eager."""
    module = Block(kind, 43).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x, incoming = (torch.randn(70, 43, generator=generator).to(dtype) for _ in range(2))
    made = plan(trace(module, (x.requires_grad_(),), mode="joint"), time_limit=1)
    run = ArenaRuntime(made, kernels="triton")
    exact = copy.deepcopy(module).double()
    wide = x.detach().double().requires_grad_()
    reference = exact(wide)
    names = dict(exact.named_parameters()) | {"input.0": wide}
    grads = torch.autograd.grad(reference, list(names.values()), incoming.double())
    for _ in range(2):
        output, ours = run(x.detach(), incoming, poison=True)
    bound = 8 * torch.finfo(dtype).eps
    assert (output.double() - reference).norm() < bound * reference.norm()
    for name, gradient in zip(names, grads, strict=True):
        assert (ours[name].double() - gradient).norm() < bound * gradient.norm(), name
    found = launches(run)
    assert found.count("norm") >= 2  # one more where it is computed again in the backward
    assert (found.count("norm_backward"), found.count("sum_parts")) == (2, 2)


def test_slices_launch_within_their_lanes():
    torch.manual_seed(0)
    module, x = build_attention(2, 3, 16, 24, dropout=0.1, device="cpu")
    joint(module, (x,), "sliced")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    """Held against float64 from the same 16-bit parameters: a few roundings of intermediate results."""
    torch.manual_seed(0)
    module, x = build_attention(1, 2, 43, 16, dropout=0.0, device="cpu", dtype=str(dtype).removeprefix("torch."))
    made = plan(trace(module, (x,), mode="joint"), strategy="materialized", time_limit=1)
    output, ours = ArenaRuntime(made, kernels="triton")(x, torch.ones_like(x), poison=True)
    wide = {name: item.detach().double().requires_grad_() for name, item in module.named_parameters()}
    source = x.detach().double().requires_grad_()
    expected = torch.func.functional_call(module, wide, (source,))
    expected.sum().backward()
    limit = 5e-3 if dtype == torch.float16 else 4e-2
    results = {"output": (output, expected.detach()), "input.0": (ours["input.0"], source.grad)}
    results |= {name: (ours[name], item.grad) for name, item in wide.items()}
    floor = max(two.norm().item() for name, (_, two) in results.items() if name != "output")
    for name, (one, two) in results.items():
        assert (one.double() - two).norm().item() <= limit * max(two.norm().item(), 1e-2 * floor), name


def test_a_row_of_masked_scores_gives_no_nan():
    """Case N01, in a fused chain."""

    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * 0.5).masked_fill(mask, float("-inf")).softmax(-1) + 0.0

    x, mask = torch.randn(3, 5), torch.zeros(3, 5, dtype=torch.bool)
    mask[1] = True
    made = plan(trace(masked, (x, mask), mode="forward"), strategy="materialized", time_limit=1)
    result = ArenaRuntime(made, kernels="triton")(x, mask, poison=True)
    expected = torch.where(mask, 0.0, masked(x, mask))
    torch.testing.assert_close(result, expected)


def test_an_intermediate_result_that_is_needed_is_not_left_out():
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = x * 0.5
        return scaled.softmax(-1), scaled * 2

    x = torch.randn(3, 5)
    for strategy in ("traced", "materialized"):
        run = ArenaRuntime(plan(trace(both, (x,), mode="forward"), strategy=strategy), kernels="triton")
        for ours, expected in zip(run(x, poison=True), both(x), strict=True):
            torch.testing.assert_close(ours, expected)


def test_kernels_can_be_left_out_and_must_be_known():
    x = torch.randn(3, 5)
    made = plan(trace(lambda y: y.softmax(-1), (x,), mode="forward"))
    assert launches(ArenaRuntime(made)) == []
    assert launches(ArenaRuntime(made, kernels="triton")) == ["softmax"]
    with pytest.raises(ArenaError, match="use auto, triton or aten"):
        ArenaRuntime(made, kernels="cuda")
