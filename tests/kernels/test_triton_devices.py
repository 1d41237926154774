"""One call of every launcher, and planned steps, on a GPU (mark ``gpu``, interpreter off) and in the interpreter.

``TRITON_INTERPRET=0 pytest -m gpu`` runs the first where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from reference.softmax import softmax as reference_softmax
from reference.softmax import softmax_backward as reference_softmax_backward
from slots import close, numbers

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.attention import build_attention
from runtime.kernels.triton import (
    cross_entropy,
    dropout,
    embedding,
    gelu,
    matmul,
    norm,
    pointwise,
    softmax,
    swiglu,
)
from runtime.kernels.triton.launch import INTERPRETED
from runtime.kernels.triton.philox import reference_keep

ON_GPU = torch.cuda.is_available() and not INTERPRETED
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not ON_GPU, reason="no CUDA device, or TRITON_INTERPRET is not 0"),
            ],
        ),
    ]
)
def device(request):
    return request.param


def run(*launches) -> None:
    for launch in launches:
        launch()


def _softmax(device: str, dtype: torch.dtype) -> Pairs:
    x = numbers(1, 6, 43, dtype=dtype).to(device)
    out = torch.empty_like(x)
    run(softmax.launch(x, out, scale=0.5))
    return [(out, reference_softmax(x, 0.5))]


def _softmax_backward(device: str, dtype: torch.dtype) -> Pairs:
    probs, grad = numbers(1, 6, 43).softmax(-1).to(dtype).to(device), numbers(2, 6, 43, dtype=dtype).to(device)
    kept = torch.from_numpy(reference_keep(9, 0, 6, 43, 0.25)).to(device)
    expected = reference_softmax_backward(grad, probs, kept, 0.25, 0.5)
    run(softmax.launch_backward(grad, probs, grad, p=0.25, seed=torch.tensor([9], device=device), scale=0.5))
    return [(grad, expected)]


def _dropout(device: str, dtype: torch.dtype) -> Pairs:
    x = numbers(1, 6, 43, dtype=dtype).to(device)
    kept = torch.from_numpy(reference_keep(-3, 2**33, 6, 43, 0.25)).to(device)
    out = torch.empty_like(x)
    run(dropout.launch(x, out, torch.tensor([-3], device=device), 0.25, offset=2**33))
    return [(out, torch.where(kept, x.double() / 0.75, 0.0))]


def _matmul(device: str, dtype: torch.dtype) -> Pairs:
    q, k = (numbers(s, 2, 43, 3, 32, dtype=dtype).to(device).transpose(1, 2) for s in (1, 2))
    out = torch.empty(2, 3, 43, 43, dtype=dtype, device=device)
    weight, bias = numbers(3, 65, 32, dtype=dtype).to(device), numbers(4, 65, dtype=dtype).to(device)
    result, before = (torch.empty(43, 65, dtype=dtype, device=device) for _ in range(2))
    x = q[0, 0]
    run(
        matmul.launch(q, k.transpose(-1, -2), out),
        matmul.launch(x, weight.t(), result, bias=bias, activation="gelu", before=before),
    )
    line = F.linear(x.double(), weight.double(), bias.double())
    return [(out, q.double() @ k.double().transpose(-1, -2)), (before, line), (result, F.gelu(before.double()))]


def _norm(device: str, dtype: torch.dtype) -> Pairs:
    x, grad = numbers(1, 37, 300, dtype=dtype).to(device), numbers(2, 37, 300, dtype=dtype).to(device)
    weight, bias = (numbers(s, 300, dtype=dtype).to(device) for s in (3, 4))
    wide, wide_weight, wide_bias = (item.double().requires_grad_() for item in (x, weight, bias))
    expected = F.layer_norm(wide, (300,), wide_weight, wide_bias)
    expected.backward(grad.double())
    out, mean, rstd = torch.empty_like(x), *(torch.empty(37, device=device) for _ in range(2))
    to_weight, to_bias, parts = torch.empty_like(weight), torch.empty_like(bias), torch.empty(3, 2, 300, device=device)
    run(norm.launch(x, weight, bias, out, mean, rstd, 1e-5))
    sums = {"grad_weight": to_weight, "grad_bias": to_bias, "parts": parts}
    run(*norm.launch_backward(grad, x, weight, mean, rstd, grad, **sums))
    return [
        (out, expected.detach()),
        (grad, wide.grad),
        (to_weight, wide_weight.grad),
        (to_bias, wide_bias.grad),
    ]


def _gelu(device: str, dtype: torch.dtype) -> Pairs:
    x, bias, grad = (numbers(s, *n, dtype=dtype).to(device) for s, n in ((1, (9, 300)), (2, (300,)), (3, (9, 300))))
    wide, wide_bias = x.double().requires_grad_(), bias.double().requires_grad_()
    expected = F.gelu(wide + wide_bias, approximate="tanh")
    expected.backward(grad.double())
    out, to_bias, parts = torch.empty_like(x), torch.empty_like(bias), torch.empty(2, 300, device=device)
    run(gelu.launch(x, bias, out, "tanh"))
    run(*gelu.launch_backward(grad, x, bias, grad, grad_bias=to_bias, parts=parts, approximate="tanh"))
    return [(out, expected.detach()), (grad, wide.grad), (to_bias, wide_bias.grad)]


def _swiglu(device: str, dtype: torch.dtype) -> Pairs:
    both, grad = numbers(1, 9, 600, dtype=dtype).to(device), numbers(2, 9, 300, dtype=dtype).to(device)
    wide = both.double().requires_grad_()
    expected = F.silu(wide[:, :300]) * wide[:, 300:]
    expected.backward(grad.double())
    a, b = both.chunk(2, -1)
    out = torch.empty(9, 300, dtype=dtype, device=device)
    run(swiglu.launch(a, b, out), swiglu.launch_backward(grad, a, b, a, b))
    return [(out, expected.detach()), (both, wide.grad)]


def _cross_entropy(device: str, dtype: torch.dtype) -> Pairs:
    x = numbers(1, 9, 4100, dtype=dtype).to(device)
    target = torch.arange(9, device=device) * 400
    wide = x.double().requires_grad_()
    expected = F.cross_entropy(wide, target)
    expected.backward()
    losses, lse, out, counted, one = (torch.ones(n, device=device) for n in (9, 9, 1, 1, 1))
    run(*cross_entropy.launch(x, target, losses, lse, out, counted))
    run(cross_entropy.launch_backward(x, target, lse, one, counted, x))
    return [(out, expected.detach().view(1)), (x, wide.grad)]


def _embedding(device: str, dtype: torch.dtype) -> Pairs:
    source = numbers(1, 43, 300, dtype=dtype).to(device)
    index = (torch.arange(43, device=device) * 7) % 10
    table = torch.zeros(12, 300, dtype=dtype, device=device)
    run(embedding.launch(source, index, table))
    expected = torch.zeros(12, 300, dtype=torch.float64, device=device)
    return [(table, expected.index_add_(0, index, source.double()))]


def _pointwise(device: str, dtype: torch.dtype) -> Pairs:
    x = numbers(1, 9, 300).to(device)
    out = torch.empty_like(x)
    run(pointwise.launch([("mul", (0, 1)), ("tanh", (2,)), ("add", (3, 0))], [x, 0.5], out))
    return [(out, torch.tanh(x.double() * 0.5) + x.double())]


CASES: dict[str, Callable[[str, torch.dtype], Pairs]] = {
    function.__name__.strip("_"): function
    for function in (
        _softmax,
        _softmax_backward,
        _dropout,
        _matmul,
        _norm,
        _gelu,
        _swiglu,
        _cross_entropy,
        _embedding,
        _pointwise,
    )
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_float64(name, dtype, device):
    for actual, expected in CASES[name](device, dtype):
        close(actual, expected, factor=8)


@pytest.mark.parametrize("strategy", ["materialized", "sliced"])
def test_a_planned_step_equals_eager(strategy, device):
    torch.manual_seed(0)
    module, x = build_attention(2, 3, 64, 48, dropout=0.0, causal=True, device=device)
    run = ArenaRuntime(
        plan(trace(module, (x,), mode="joint"), strategy=strategy, time_limit=1), device=device, kernels="triton"
    )
    incoming = torch.randn_like(x)
    for _ in range(2):
        expected = module(x)
        gradients = torch.autograd.grad(expected, [x, *module.parameters()], incoming)
        output, ours = run(x, incoming, poison=True)
        close(output, expected.detach(), factor=20)
        for name, gradient in zip(("input.0", *dict(module.named_parameters())), gradients, strict=True):
            floor = gradients[0].norm() * 1e-6
            assert (ours[name] - gradient).norm() <= 5e-5 * gradient.norm() + floor, name


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device, or TRITON_INTERPRET is not 0")
def test_a_planned_step_allocates_nothing_and_replays_as_a_graph():
    module, x = build_attention(2, 4, 128, 128, dropout=0.0, device="cuda", dtype="float16")
    made = plan(trace(module, (x,), mode="joint"), strategy="materialized", time_limit=1)
    run = ArenaRuntime(made, device="cuda")
    incoming = torch.randn_like(x)
    run(x, incoming)
    expected = [item.clone() for item in run.results()[1].values()]
    run.load(x, incoming)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run.execute()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    run.load(x, incoming)
    with torch.cuda.graph(graph):
        run.execute()
    for _ in range(2):
        run.load(x, incoming)
        graph.replay()
        torch.cuda.synchronize()
        for one, two in zip(run.results()[1].values(), expected, strict=True):
            assert torch.equal(one, two)
