"""Root mean square normalisation as one operator: its kernels, and the plans that use it, against float64 and eager."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import planner.pipeline
from planner import Plan, plan, trace
from planner.graph import Operation, Tensor, TensorRef, dense_strides
from planner.operators import RMS_NORM, RMS_NORM_BACKWARD, may_overwrite
from planner.rewrite.canonical import canonical
from planner.rewrite.casts import add_casts
from planner.rewrite.dense import dense_operands
from planner.rewrite.rms_norm import fuse_rms_norm
from runtime import ArenaRuntime
from runtime.errors import ArenaError
from runtime.kernels import rms_norm
from runtime.measure import allocations
from tests.kernels.harness import perform
from tests.models.norms import NORMS, Block

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 1), (13, 7), (100, 1500), (70, 3)]


@pytest.fixture(params=["compiled", "aten"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the compiled loops, and as it is where numba is missing."""
    if request.param == "aten":
        monkeypatch.setattr(rms_norm, "loop", lambda *_: None)
    return str(request.param)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative, in the norm of all elements."""
    return ((ours.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [None, 0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_forward_against_float64(
    kernel: str, dtype: torch.dtype, overwrite: int | None, rows: int, width: int, weighted: bool
) -> None:
    x, weight = draw(rows, width).to(dtype), draw(width, seed=1).to(dtype) if weighted else None
    expected = functional.rms_norm(x.double(), (width,), None if weight is None else weight.double(), 1e-5)
    rstd = (x.double().pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
    shaped: list[torch.Tensor | None] = [expected.to(dtype), rstd.to(statistics(dtype))]
    outcome = perform(RMS_NORM, [x, [width], weight, 1e-5], {}, shaped, overwrite=overwrite)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes == 0
    assert error(outcome.results[0], expected) < TOLERANCE[dtype]
    assert error(outcome.results[1], rstd) < TOLERANCE[statistics(dtype)]


@pytest.mark.parametrize("overwrite", [None, 0, 1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES[1:])
@pytest.mark.parametrize("wanted", ["weight and its gradient", "weight", "no weight"])
def test_backward_against_float64(
    kernel: str, dtype: torch.dtype, overwrite: int | None, rows: int, width: int, wanted: str
) -> None:
    x, dy = draw(rows, width).to(dtype), draw(rows, width, seed=3).to(dtype)
    weight = None if wanted == "no weight" else draw(width, seed=1).to(dtype)
    wide, line = x.double().requires_grad_(), torch.ones(width).double() if weight is None else weight.double()
    functional.rms_norm(wide, (width,), line.requires_grad_(), 1e-5).backward(dy.double())
    rstd = (x.double().pow(2).mean(1, keepdim=True) + 1e-5).rsqrt().to(statistics(dtype))
    summed = wanted == "weight and its gradient"
    assert wide.grad is not None
    assert line.grad is not None
    shaped = [wide.grad.to(dtype), line.grad.to(dtype) if summed else None]
    values: list[Any] = [dy, x, [width], rstd, weight]
    outcome = perform(RMS_NORM_BACKWARD, values, {}, shaped, overwrite=overwrite)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes == 0
    for ours, reference in zip(outcome.results, (wide.grad, line.grad), strict=False):
        assert error(ours, reference) < 2 * TOLERANCE[dtype]


def test_dtypes_may_differ(kernel: str) -> None:
    """As under autocast: 16-bit rows, a float32 weight and float32 gradients."""
    x, weight, dy = draw(40, 9).bfloat16(), draw(9, seed=1).float(), draw(40, 9, seed=2).float()
    wide, line = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = functional.rms_norm(wide, (9,), line, 1e-5)
    expected.backward(dy.double())
    rstd = (x.double().pow(2).mean(1, keepdim=True) + 1e-5).rsqrt().float()
    shaped: list[torch.Tensor | None] = [expected.detach().float(), rstd]
    outcome = perform(RMS_NORM, [x, [9], weight, 1e-5], {}, shaped)
    assert error(outcome.results[0], expected.detach()) < 1e-6
    assert wide.grad is not None
    assert line.grad is not None
    backward = perform(RMS_NORM_BACKWARD, [dy, x, [9], rstd, weight], {}, [wide.grad.bfloat16(), line.grad.float()])
    assert error(backward.results[0], wide.grad) < 4e-3
    assert error(backward.results[1], line.grad) < 1e-6


def test_results_do_not_depend_on_threads() -> None:
    x, dy, weight = draw(3000, 33).float(), draw(3000, 33, seed=1).float(), draw(33, seed=2).float()
    rstd = (x.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
    shaped: list[torch.Tensor | None] = [torch.empty(3000, 33), torch.empty(33)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(perform(RMS_NORM_BACKWARD, [dy, x, [33], rstd, weight], {}, shaped, count=False).results)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_special_values(kernel: str) -> None:
    """A row with NaN or infinity gives what eager gives, and touches no other row."""
    x = draw(64, 8).float()
    x[3, 2], x[40, 1] = float("nan"), float("inf")
    expected = functional.rms_norm(x, (8,), None, 1e-5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shaped: list[torch.Tensor | None] = [expected.to(dtype), torch.empty(64, 1)]
        ours = perform(RMS_NORM, [x.to(dtype), [8], None, 1e-5], {}, shaped, count=False).results[0]
        torch.testing.assert_close(ours, expected.to(dtype), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(
    "values",
    [
        [torch.zeros(4, 6), [5], None, 1e-5],
        [torch.zeros(4, 6), [6], torch.zeros(5), 1e-5],
        [torch.zeros(4, 6), [6], None, None],
        [torch.zeros(4, 6, dtype=torch.int32), [6], None, 1e-5],
    ],
)
def test_operands_that_do_not_fit_are_refused(values: list[Any]) -> None:
    with pytest.raises(ArenaError, match="op"):
        perform(RMS_NORM, values, {}, [torch.zeros(4, 6), torch.zeros(4, 1)], count=False)


@pytest.mark.parametrize(("operator", "allowed"), [(RMS_NORM, {0}), (RMS_NORM_BACKWARD, {0, 1})])
def test_what_may_be_overwritten(operator: str, allowed: set[int]) -> None:
    """The result on x, and the gradient on x or on the incoming one; never on the weight or the statistics."""
    shape = (1, 8)
    tensors = [Tensor(f"t{k}", k, 0, shape, dense_strides(shape), "float32") for k in range(5)]
    forward = (TensorRef(0), (8,), TensorRef(1), 1e-5)
    backward = (TensorRef(0), TensorRef(1), (8,), TensorRef(2), TensorRef(3))
    operation = Operation("op", operator, forward if operator == RMS_NORM else backward, (), (4, None))
    places = {index for index in operation.reads if may_overwrite(operation, tensors[4], tensors[index], index)}
    assert places == allowed


# -- plans -------------------------------------------------------------------------------------------------------------


def operators(made: Plan) -> list[str]:
    return [operation.operator for operation in made.graph.operations]


def gradients(module: nn.Module, x: torch.Tensor, incoming: torch.Tensor) -> dict[str, torch.Tensor]:
    """Eager's result and gradients by name; what has none is left out."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    output = module(x)
    output.backward(incoming)
    named = {name: parameter.grad for name, parameter in module.named_parameters()} | {"input.0": x.grad}
    return {"output": output.detach(), **{name: value for name, value in named.items() if value is not None}}


def joint(module: nn.Module, x: torch.Tensor, incoming: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """The second planned step's, in a poisoned arena."""
    run = ArenaRuntime(plan(trace(module, (x.detach().requires_grad_(),), mode="joint"), time_limit=1), **options)
    for _ in range(2):
        output, found = run(x.detach(), incoming, poison=True, copy=True)
    if not run.plan.unplanned:
        assert allocations(run.execute).calls == 0
    return {"output": output, **{name: value for name, value in found.items() if value is not None}}


def no_further(ours: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """As close to float64 as eager, up to the rounding of one result."""
    assert set(ours) == set(eager) == set(exact)
    for name, reference in exact.items():
        dtype = eager[name].dtype
        slack = torch.finfo(dtype).eps * (
            4 if dtype == torch.float64 else 0.25
        )  # float64 eager is the reference itself
        assert error(ours[name], reference) <= 1.25 * error(eager[name], reference) + slack, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_a_joint_plan_is_no_further_from_float64_than_eager(kernel: str, kind: str, dtype: torch.dtype) -> None:
    module = Block(kind, 40).to(dtype)
    x, incoming = draw(2, 35, 40).to(dtype), draw(2, 35, 40, seed=1).to(dtype)
    exact = gradients(copy.deepcopy(module).double(), x.double(), incoming.double())
    no_further(joint(module, x, incoming), gradients(module, x, incoming), exact)
    if kind == "plain" and dtype.itemsize == 2:
        return  # statistics in 16 bits stay as they are written
    found = operators(plan(trace(module, (x.requires_grad_(),), mode="joint"), time_limit=1))
    assert found.count(RMS_NORM) >= 2
    assert found.count(RMS_NORM_BACKWARD) == 2
    assert not [name for name in found if "rsqrt" in name or "pow" in name]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", ["module", "llama"])
def test_under_autocast(kind: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(kind, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                result: torch.Tensor = self.block(x).float()
            return result

    module, x, incoming = Wrapped(), draw(50, 24).float(), draw(50, 24, seed=1).float()
    exact = gradients(copy.deepcopy(module.block).double(), x.double(), incoming.double())
    renamed = {name if name in ("output", "input.0") else f"block.{name}": value for name, value in exact.items()}
    ours, eager = joint(module, x, incoming), gradients(module, x, incoming)
    for name, reference in renamed.items():
        assert error(ours[name], reference) <= 1.25 * error(eager[name], reference), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["module", "llama"])
def test_a_backward_plan(kind: str, dtype: torch.dtype) -> None:
    module = Block(kind, 40).to(dtype)
    x, incoming = draw(70, 40).to(dtype).requires_grad_(), draw(70, 40, seed=1).to(dtype)
    graph = trace(module, (x,), mode="backward")
    fused = fuse_rms_norm(dense_operands(add_casts(canonical(graph))))
    assert [operation.operator for operation in fused.operations].count(RMS_NORM_BACKWARD) == 2
    made = plan(fused, time_limit=1)
    assert operators(made).count(RMS_NORM_BACKWARD) == 2
    assert plan(graph, time_limit=1).arena_nbytes <= made.arena_nbytes
    assert graph.forward is not None
    eager = gradients(module, x, incoming)
    exact = gradients(copy.deepcopy(module).double(), x.double(), incoming.double())
    run = ArenaRuntime(made)
    for _ in range(2):
        _, saved = graph.forward(x.detach())
        found = run(*saved, incoming, poison=True, copy=True)
    no_further({"output": eager["output"], **found}, eager, exact)


@pytest.mark.parametrize("mode", ["forward", "joint", "backward", "checkpointed"])
@pytest.mark.parametrize("kind", ["module", "llama", "gemma"])
def test_norms_right_after_one_another(kind: str, mode: str) -> None:
    """A cast between two of them ends one chain and begins the other; it is taken into one only."""
    dtype = torch.bfloat16
    module = nn.Sequential(*(NORMS[kind](12) for _ in range(3))).to(dtype)
    with torch.no_grad():
        for index, norm in enumerate(module):
            norm.weight.copy_(1 + 0.2 * draw(12, seed=10 + index))

    def function(x: torch.Tensor) -> torch.Tensor:
        result = module[1](module[0](x))
        if mode == "checkpointed":
            return checkpoint(module[2], result, use_reentrant=False)  # type: ignore[no-any-return]
        return module[2](result)  # type: ignore[no-any-return]

    x, incoming = draw(9, 12).to(dtype).requires_grad_(), draw(9, 12, seed=1).to(dtype)
    expected = function(x)
    (gradient,) = torch.autograd.grad(expected, (x,), incoming)
    kept = "joint" if mode == "checkpointed" else mode
    made = plan(trace(function, (x,), mode=kept), time_limit=1)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    run = ArenaRuntime(made)
    for _ in range(2):
        if kept == "forward":
            found = [(run(x.detach(), poison=True), expected)]
        elif kept == "joint":
            output, gradients_ = run(x.detach(), incoming, poison=True)
            found = [(output, expected), (gradients_["input.0"], gradient)]
        else:
            _, saved = made.graph.forward(x.detach())
            found = [(run(*saved, incoming, poison=True)["input.0"], gradient)]
        for ours, reference in found:
            torch.testing.assert_close(ours, reference.detach(), **tolerance)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize("kind", NORMS)
def test_nothing_to_normalise(kind: str, shape: tuple[int, int]) -> None:
    module, x = NORMS[kind](shape[1]), torch.ones(shape)
    ours, eager = joint(module, x, torch.ones(shape)), gradients(module, x, torch.ones(shape))
    assert ours.keys() == eager.keys()
    assert all(torch.equal(ours[name], value) for name, value in eager.items())


def test_a_forward_plan_keeps_no_normalised_copy() -> None:
    module, x = nn.RMSNorm((5, 8)).eval(), draw(3, 4, 5, 8).float()
    made = plan(trace(module, (x,), mode="forward"))
    assert operators(made) == [RMS_NORM]
    torch.testing.assert_close(ArenaRuntime(made)(x, poison=True), module(x).detach(), rtol=1e-6, atol=1e-6)


def test_nothing_but_x_and_a_number_a_row_waits_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the float32 copy of x and the normalised x are gone: 6 of 8 bytes an element of what is kept."""
    module = Block("llama", 512).bfloat16().to("meta")
    graph = trace(
        module, (torch.empty(4096, 512, dtype=torch.bfloat16, device="meta", requires_grad=True),), mode="joint"
    )
    fused = plan(graph, time_limit=1)
    monkeypatch.setattr(planner.pipeline, "fuse_rms_norm", lambda base: base)
    apart = plan(graph, time_limit=1)
    assert fused.arena_nbytes < 0.75 * apart.arena_nbytes


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_of_several_layers_takes_less_memory(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    """With recomputation too: the work the operator spares may be spent on it."""
    module = nn.Sequential(*(Block("llama", 64) for _ in range(4))).to("meta")
    graph = trace(module, (torch.empty(512, 64, device="meta", requires_grad=True),), mode="joint")
    fused = plan(graph, recompute=recompute, time_limit=1)
    monkeypatch.setattr(planner.pipeline, "fuse_rms_norm", lambda base: base)
    assert fused.arena_nbytes <= plan(graph, recompute=recompute, time_limit=1).arena_nbytes


def test_a_plan_file_keeps_the_operator(tmp_path: Path) -> None:
    module, x, incoming = Block("module", 24), draw(9, 24).float(), draw(9, 24, seed=1).float()
    made = plan(trace(module, (x.detach().requires_grad_(),), mode="joint"))
    made.save(tmp_path / "norm.plan.json")
    loaded = Plan.load(tmp_path / "norm.plan.json")
    assert operators(loaded) == operators(made)
    state = dict(module.named_parameters())
    one = ArenaRuntime(made)(x, incoming, copy=True)
    two = ArenaRuntime(loaded, state=state)(x, incoming, copy=True)
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def both(x: torch.Tensor) -> Any:
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normal * torch.ones(x.shape[-1]), normal


def squares_kept(x: torch.Tensor) -> Any:
    squares = x.pow(2)
    return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6), squares


def another_axis(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)


def another_factor(x: torch.Tensor) -> torch.Tensor:
    return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def another_power(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)


def twice_the_statistics(x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale + scale


def changed_between(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    with torch.no_grad():
        y.mul_(2)
    return y * scale


@pytest.mark.parametrize(
    "function",
    [both, squares_kept, another_axis, another_factor, another_power, twice_the_statistics, changed_between],
)
@pytest.mark.parametrize("mode", ["forward", "joint"])
def test_chains_that_only_look_alike_equal_eager(function: Any, mode: str) -> None:
    x = draw(6, 6).float()
    if mode == "joint" and function is changed_between:
        pytest.skip("eager refuses to differentiate it")
    graph = trace(function, (x.clone().requires_grad_(mode == "joint"),), mode=mode)
    leaf = x.clone().requires_grad_(mode == "joint")
    expected = function(leaf)
    expected = expected if isinstance(expected, tuple) else (expected,)
    run = ArenaRuntime(plan(graph, time_limit=1))
    if mode == "forward":
        found = run(x, poison=True)
        found = found if isinstance(found, tuple) else (found,)
    else:
        incoming = [draw(*item.shape, seed=9).float() for item in expected]
        outputs, grads = run(x, *incoming, poison=True)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        (gradient,) = torch.autograd.grad(expected, leaf, incoming)
        torch.testing.assert_close(grads["input.0"], gradient, rtol=1e-5, atol=1e-5)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two.detach(), rtol=1e-5, atol=1e-6)


def test_a_strided_gradient_is_copied_first() -> None:
    """As behind a head's own normalisation: the gradient comes transposed."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normal: torch.Tensor = self.norm(x.view(2, 5, 3, 8))
            return (normal.transpose(1, 2) @ torch.ones(8, 4)).relu()

    module, x, incoming = Heads(), draw(2, 5, 24).float(), draw(2, 3, 5, 4, seed=1).float()
    ours, eager = joint(module, x, incoming), gradients(module, x, incoming)
    for name, value in eager.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)
    assert RMS_NORM_BACKWARD in operators(plan(trace(module, (x.requires_grad_(),), mode="joint"), time_limit=1))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(NORMS)),
    lead=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    frozen=st.sampled_from(["nothing", "weights", "input"]),
    alignment=st.sampled_from([16, 256]),
)
def test_any_shape(kind: str, lead: list[int], width: int, dtype: torch.dtype, frozen: str, alignment: int) -> None:
    module = Block(kind, width).to(dtype)
    if frozen == "weights":
        for parameter in (*module.first.parameters(), *module.last.parameters()):
            parameter.requires_grad_(requires_grad=False)
    x, incoming = draw(*lead, width).to(dtype), draw(*lead, width, seed=1).to(dtype)
    leaf = x.clone().requires_grad_(frozen != "input")
    run = ArenaRuntime(plan(trace(module, (leaf,), mode="joint"), alignment=alignment, time_limit=1))
    output, found = run(x, incoming, poison=True)
    expected = module(leaf)
    wanted = {name: item for name, item in module.named_parameters() if item.requires_grad}
    wanted |= {"input.0": leaf} if frozen != "input" else {}
    grads = torch.autograd.grad(expected, list(wanted.values()), incoming, allow_unused=True)
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(output, expected.detach(), **bound)
    for name, gradient in zip(wanted, grads, strict=True):
        scale = max(1.0, 0.0 if gradient is None else gradient.abs().max().item())
        if gradient is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name] / scale, gradient / scale, **bound)
