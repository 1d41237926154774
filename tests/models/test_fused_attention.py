"""The strategy ``fused`` end to end: traced, planned, run out of a poisoned arena, held against float64."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from planner import Plan, plan, trace, verify
from planner.errors import StrategyError, TraceError
from planner.flash import FUSED
from planner.trace.fused import attention_as
from runtime import ArenaRuntime, TrainingStep
from runtime.attention_reference import reference_attention
from runtime.check import check_against_eager
from runtime.cli import app
from runtime.measure import allocations
from tests.attention_cases import Shape, in_float64
from tests.models import zoo

TOLERANCE = {"float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}
STEPS = 2


def by_definition(module: nn.Module, x: torch.Tensor, incoming: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Output and gradients in float64 under the same seed, the attention by its definition."""
    with attention_as(reference_attention):
        return in_float64(module, x, incoming, seed)


def close(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: str, least: float = 0.05) -> None:
    """Relative errors; of tensors smaller than a share ``least`` of the largest, relative to that."""
    floor = least * max(tensor.norm().item() for tensor in exact.values())
    for name, value in ours.items():
        error = (value.double() - exact[name]).norm().item() / max(exact[name].norm().item(), floor)
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


def follows(shape: Shape, mode: str, *, steps: int = STEPS, least: float = 0.05) -> Plan:
    """Check ``steps`` planned steps of one mode against float64; every step starts in a poisoned arena."""
    module, x = shape.build(sdpa=True)
    graph = trace(module, (x,), mode=mode, attention="fused")
    made = plan(graph, strategy="fused")
    verify(made, graph)
    run = ArenaRuntime(made)
    for step in range(steps):
        torch.manual_seed(100 + step)
        x = torch.randn(x.shape).to(x.dtype).requires_grad_()
        incoming = torch.randn(x.shape).to(x.dtype)
        exact = by_definition(module, x, incoming, step)
        torch.manual_seed(step)
        if mode == "backward":
            assert graph.forward is not None
            outputs, saved = graph.forward(x)
            close({"output.0": outputs}, exact, shape.dtype, least)
            close(run(*saved, incoming, poison=True), exact, shape.dtype, least)
        elif mode == "joint":
            outputs, gradients = run(x, incoming, poison=True)
            close({"output.0": outputs, **gradients}, exact, shape.dtype, least)
        else:
            close({"output.0": run(x, poison=True)}, exact, shape.dtype, least)
    return made


SHAPES = [
    Shape(2, 4, 64, 64),
    Shape(1, 1, 33, 8, dropout=0.0),
    Shape(3, 2, 43, 20, causal=True),
    Shape(2, 4, 441, 32, fused=False, causal=True),
    Shape(5, 3, 1, 12),
    Shape(2, 8, 65, 64, fused=False, dtype="float16"),
    Shape(2, 2, 300, 32, dtype="bfloat16", causal=True),
]


@pytest.mark.parametrize("mode", ["backward", "joint", "forward"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mode_equals_float64(shape: Shape, mode: str) -> None:
    assert follows(shape, mode).strategy == "fused"


@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    length=st.integers(1, 90),
    depth=st.integers(1, 12),
    causal=st.booleans(),
    fused=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from(["float32", "float16"]),
    mode=st.sampled_from(["backward", "joint"]),
)
def test_any_plan_equals_float64(batch: int, heads: int, length: int, depth: int, mode: str, **options: Any) -> None:
    # Of one or two elements, terms that cancel leave rounding only: half the tolerance of the largest tensor is two to
    # four units of rounding in float16.
    follows(Shape(batch, heads, length, heads * depth, **options), mode, steps=2, least=0.5)


@pytest.mark.parametrize("mode", ["backward", "joint"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_is_allocated(mode: str, dtype: str) -> None:
    module, x = Shape(2, 4, 300, 64, dtype=dtype, causal=True).build(sdpa=True)
    graph = trace(module, (x,), mode=mode, attention="fused")
    run = ArenaRuntime(plan(graph, strategy="fused"))
    incoming = torch.randn(x.shape).to(x.dtype)
    inputs = [x, incoming]
    if mode == "backward":
        assert graph.forward is not None
        inputs = [*graph.forward(x)[1], incoming]
    run(*inputs)
    assert allocations(lambda: run(*inputs)).calls == 0


@pytest.mark.parametrize(
    ("dtype", "fused", "causal"),
    [
        ("float16", True, True),
        ("float32", False, False),
        *(
            pytest.param(dtype, fused, causal, marks=pytest.mark.slow)
            for dtype, fused, causal in (
                ("float16", True, False),
                ("float16", False, True),
                ("float16", False, False),
                ("float32", True, True),
                ("float32", True, False),
                ("float32", False, True),
            )
        ),
    ],
)
@pytest.mark.parametrize("length", [512 << power for power in range(9)])
def test_what_a_backward_adds_has_no_length_squared(length: int, causal: bool, fused: bool, dtype: str) -> None:
    """From 512 to 131,072: at most 2.5 X, and no storage larger than one of the graph's own activations."""
    shape = Shape(1, 16, length, 1024, dtype=dtype, fused=fused, causal=causal)
    module, x = shape.build(sdpa=True, device="meta")
    made = plan(trace(module, (x,), attention="fused"), strategy="fused")
    activation = shape.activation * (2 if dtype == "float16" else 4)
    assert made.extra_nbytes <= 2.5 * activation
    weights = 3 * shape.hidden**2 * 4
    assert max(storage.nbytes for storage in made.graph.storages) <= max(3 * activation, weights)
    assert made.formula is not None
    assert made.formula.target == shape.target_nbytes


def test_what_the_forward_leaves_is_as_long_as_the_sequence() -> None:
    shape = Shape(2, 4, 256, 64, dropout=0.1)
    module, x = shape.build(sdpa=True)
    graph = trace(module, (x,), attention="fused")
    tensors = {port.name: graph.tensors[port.tensor] for port in graph.inputs if port.tensor is not None}
    assert max(tensor.numel for tensor in tensors.values()) == 3 * shape.activation  # the projection's result
    assert sum(tensor.numel for tensor in tensors.values()) <= 7 * shape.activation + 5 * shape.hidden**2
    assert graph.forward is not None
    _, saved = graph.forward(x)
    assert any(tensor.shape == (2, 4, 256) for tensor in saved), "the log-sum-exp"
    assert any(tensor.dtype == torch.int64 and tensor.numel() == 1 for tensor in saved), "the seed"


def test_a_graph_without_fused_attention_is_refused_with_the_remedy() -> None:
    module, x = Shape(2, 4, 64, 64).build(sdpa=True)
    with pytest.raises(StrategyError, match='trace it with attention="fused"'):
        plan(trace(module, (x,)), strategy="fused")
    with pytest.raises(TraceError, match="math, fused"):
        trace(module, (x,), attention="flash")


@pytest.mark.parametrize("strategy", ["auto", "materialized", "traced", "fused"])
def test_every_strategy_runs_a_graph_traced_fused(strategy: str) -> None:
    module, x = Shape(2, 4, 43, 32, dropout=0.2).build(sdpa=True)
    graph = trace(module, (x,), mode="joint", attention="fused")
    made = plan(graph, strategy=strategy)
    assert made.strategy in ("fused", "traced")
    check = check_against_eager(module, (x,), graph, made, steps=2)
    assert check.passed
    assert check.allocator_calls == 0


def test_a_saved_plan_runs(tmp_path: Any) -> None:
    module, x = Shape(2, 4, 43, 32, dropout=0.2).build(sdpa=True)
    graph = trace(module, (x,), mode="joint", attention="fused")
    made = plan(graph, strategy="fused")
    made.save(tmp_path / "fused.plan.json")
    incoming = torch.randn(x.shape)
    torch.manual_seed(1)
    expected = ArenaRuntime(made)(x, incoming, copy=True)
    torch.manual_seed(1)
    state = dict(module.named_parameters())
    ours = ArenaRuntime(Plan.load(tmp_path / "fused.plan.json"), state=state)(x, incoming, poison=True)
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=0)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=0, atol=0)


# -- what is traced fused, and what is left as it is ------------------------------------------------------------


class Calls(nn.Module):
    """One call of PyTorch's attention with given keywords; the name is looked up when called, or was before."""

    def __init__(self, *, imported: bool = False, **keywords: Any) -> None:
        super().__init__()
        self.function = F.scaled_dot_product_attention if imported else None
        self.keywords = keywords

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        function = self.function or F.scaled_dot_product_attention
        return function(q, k, v, *mask, **self.keywords)


def operands(*shape: int, key_heads: int | None = None, columns: int | None = None) -> list[torch.Tensor]:
    *lead, rows, depth = shape
    if key_heads is not None:
        lead[-1] = key_heads
    torch.manual_seed(0)
    keys = [torch.randn(*lead, columns or rows, depth).requires_grad_() for _ in range(2)]
    return [torch.randn(*shape).requires_grad_(), *keys]


def is_fused(graph: Any) -> bool:
    return any(operation.operator in FUSED for operation in graph.operations)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Calls(), operands(2, 3, 9, 4)),
        (Calls(imported=True), operands(2, 3, 9, 4)),
        (Calls(is_causal=True), operands(2, 3, 9, 4, columns=7)),
        (Calls(scale=0.3), operands(2, 9, 4)),
        (Calls(enable_gqa=True), operands(2, 6, 9, 4, key_heads=2)),
        (Calls(), [*operands(2, 3, 9, 4), torch.rand(9, 9) > 0.2]),
        (Calls(), [*operands(2, 3, 9, 4), torch.randn(2, 1, 1, 9)]),
        (Calls(), [*operands(2, 9, 4), torch.randn(2, 9, 9)]),
        (Calls(attn_mask=None, dropout_p=0.25), operands(2, 3, 9, 4)),
    ],
)
@pytest.mark.parametrize("mode", ["backward", "joint"])
def test_every_way_to_call_it_is_fused(module: nn.Module, inputs: list[torch.Tensor], mode: str) -> None:
    graph = trace(module, tuple(inputs), mode=mode, attention="fused")
    assert is_fused(graph)
    made = plan(graph, strategy="fused")
    check = check_against_eager(module, tuple(inputs), graph, made, steps=2, fresh_inputs=False)
    assert check.passed, check
    assert check.allocator_calls == 0


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Calls(), [*operands(2, 3, 9, 4), torch.randn(3, 9, 9).requires_grad_()]),  # a learned bias
        (Calls(), [operands(2, 3, 9, 4)[0], *operands(1, 3, 9, 4)[1:]]),  # a broadcast batch
        (Calls(dropout_p=0.0), operands(2, 2, 3, 9, 4)),  # five dimensions
    ],
)
def test_what_the_operator_cannot_do_stays_as_it_was(module: nn.Module, inputs: list[torch.Tensor]) -> None:
    graph = trace(module, tuple(inputs), mode="joint", attention="fused")
    assert not is_fused(graph)
    assert check_against_eager(module, tuple(inputs), graph, plan(graph), steps=2).passed


def test_tracing_leaves_pytorch_as_it_was() -> None:
    before = F.scaled_dot_product_attention
    module, x = Shape(1, 1, 4, 4).build(sdpa=True)
    trace(module, (x,), attention="fused")
    assert F.scaled_dot_product_attention is before
    with pytest.raises(TraceError):
        trace(lambda a: a.nonzero(), (x,), attention="fused")
    assert F.scaled_dot_product_attention is before
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("batch_first", [True, False])
def test_pytorchs_own_modules_are_fused(batch_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
    x = torch.randn(3, 7, 16).requires_grad_()
    graph = trace(module, (x,), mode="joint", attention="fused")
    assert is_fused(graph)
    assert check_against_eager(module, (x,), graph, plan(graph, strategy="fused"), steps=2).passed


def test_i02_a_fused_projection_is_read_where_it_lies() -> None:
    """The views of q, k and v keep the projection's strides, and no copy of them is planned."""
    module, x = Shape(2, 4, 64, 64).build(sdpa=True)
    made = plan(trace(module, (x,), attention="fused"), strategy="fused")
    (backward,) = [o for o in made.graph.operations if o.operator == "arenaplan.attention_backward"]
    q = made.graph.tensors[backward.reads[1]]
    assert q.strides == (64 * 3 * 64, 16, 3 * 64, 1)
    assert not [o for o in made.graph.operations if o.operator == "arenaplan.copy"]


# -- whole models -----------------------------------------------------------------------------------------------


def losses(model: nn.Module, step: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in batches:
        found.append(float(step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def gpt2() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    case = zoo.gpt2("sdpa", labels=True)
    for part in case.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attn_dropout"):
            part.attn_dropout.p = 0.0
    return case.module, [case.inputs(seed) for seed in range(5)]


def eager_losses(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return losses(model, step, batches)


def test_gpt2_trains_as_eager_does() -> None:
    ours, batches = gpt2()
    eager = copy.deepcopy(ours)
    step = TrainingStep(ours, None, batches[0], attention="fused", strategy="fused")
    assert sum(o.operator == "arenaplan.attention" for o in step.plan.graph.operations) == 2
    for one, two in zip(losses(ours, step, batches), eager_losses(eager, batches), strict=True):
        assert one == pytest.approx(two, rel=2e-5)
    for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gpt2_compiled_trains_as_eager_does() -> None:
    ours, batches = gpt2()
    eager = copy.deepcopy(ours)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="arenaplan", options={"attention": "fused"})

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = compiled(**batch).loss
        loss.backward()
        return loss.detach()

    for one, two in zip(losses(ours, step, batches), eager_losses(eager, batches), strict=True):
        assert one == pytest.approx(two, rel=2e-5)


def test_compiled_attention_is_fused_with_dropout() -> None:
    from runtime import compiler

    module, x = Shape(2, 4, 43, 32, dropout=0.2).build(sdpa=True)
    seen = []
    original = compiler.plan

    def noted(graph: Any, **options: Any) -> Plan:
        seen.append(is_fused(graph))
        return original(graph, **options)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend="arenaplan", options={"attention": "fused"})
    incoming = torch.randn(x.shape)
    compiler.plan = noted
    try:
        for step in range(3):
            exact = by_definition(module, x, incoming, step)
            torch.manual_seed(step)
            y = compiled(x)
            gradients = torch.autograd.grad(y, [*module.parameters(), x], incoming)
            names = [*dict(module.named_parameters()), "input.0"]
            close({"output.0": y.detach(), **dict(zip(names, gradients, strict=True))}, exact, "float32")
    finally:
        compiler.plan = original
    assert seen == [True, True]


def test_an_unknown_option_of_the_backend_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(2, 2), backend="arenaplan", options={"attention": "flash"})
    with pytest.raises(Exception, match="flash"):
        compiled(torch.randn(1, 2))


# -- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dtype", "float32", "--causal", "--pass", "joint"],
        ["--dtype", "bfloat16", "--separate", "--dropout", "0.3"],
    ],
)
def test_the_command_runs_and_checks(options: list[str]) -> None:
    call = ["attention", "-B", "2", "-N", "4", "-L", "65", "-H", "64", "--strategy", "fused", "--run", "--json"]
    done = CliRunner().invoke(app, [*call, *options])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["strategy"] == "fused"
    assert report["allocator_calls"] == 0
    assert report["max_rel_error"] <= report["tolerance"]
    assert math.isfinite(report["eager_seconds"])


def test_the_command_plans_a_length_that_no_matrix_fits() -> None:
    call = ["attention", "-B", "1", "-N", "16", "-L", "131072", "-H", "1024", "--strategy", "fused", "--json"]
    report = json.loads(CliRunner().invoke(app, call).stdout)
    activation = 131072 * 1024 * 2
    assert report["extra_bytes"] <= 2.5 * activation
    assert report["formula_bytes"]["target"] == 16 * 131072**2 * 2
