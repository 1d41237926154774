"""Mistakes found by trying to break the project; each test is the smallest program that showed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from planner import plan, trace
from planner.errors import GraphError, PlannerError, TraceError
from runtime import ArenaRuntime
from runtime.cli import app
from runtime.measure import allocations
from tests.helpers import forward_equals_eager, joint_equals_eager


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", ["joint", "backward"])
def test_r01_a_recomputed_dropout_is_refused_rather_than_drawn_again(mode: str) -> None:
    """pytorch/pytorch#190758."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda z: self.dropout(z) * z, x, use_reentrant=False)

    with pytest.raises(TraceError, match="checkpoint"):
        trace(Model(), (torch.ones(8, requires_grad=True),), mode=mode)


def test_a_checkpoint_without_random_numbers_is_planned() -> None:
    joint_equals_eager(
        lambda x: checkpoint(lambda z: z.sin().exp() * z, x, use_reentrant=False),
        lambda s: (draw(4, 4, seed=s).requires_grad_(),),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 100000.0,
        lambda x: x / 1e-4,
        lambda x: x * 0.1 + 0.3,
        lambda x: x / 3.3 - 0.7,
        lambda x: 1.7 - x,
        lambda x: torch.lerp(x, x * 2, 0.3),
        lambda x: torch.add(x, x, alpha=0.1),
        lambda x: x.mul_(0.1),
        lambda x: (x * 0.37).add_(0.11),
    ],
)
def test_numbers_beside_16_bit_tensors_keep_their_precision(dtype: torch.dtype, function) -> None:
    made = forward_equals_eager(function, lambda s: (draw(5, 7, seed=s).mul(1e-3).to(dtype),), exact=True)
    run = ArenaRuntime(made)
    x = draw(5, 7).to(dtype)
    run(x.clone())
    assert allocations(lambda: run.execute(threads=1)).calls == 0


@pytest.mark.parametrize("change", [lambda b, x: b.add_(x), lambda b, _: b.fill_(7.0), lambda b, _: b[0].zero_()])
def test_a_captured_tensor_changed_in_place_is_refused(change) -> None:
    buffer = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        change(buffer, x)
        return buffer * x

    with pytest.raises(TraceError, match="register it as a buffer"):
        trace(function, (torch.ones(3),), mode="forward")
    assert buffer.eq(0).all()


def test_a13_a_buffer_assigned_anew_is_updated() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + x
            return x * self.total

    ours, eager = Model(), Model()
    run = ArenaRuntime(plan(trace(ours, (torch.ones(3),), mode="forward")))
    for step in range(3):
        torch.testing.assert_close(run(draw(3, seed=step)), eager(draw(3, seed=step)))
    torch.testing.assert_close(ours.total, eager.total)


def test_an_attribute_that_is_no_buffer_is_refused_and_left_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + x
            return x * self.total

    model = Model()
    with pytest.raises(TraceError, match=r"total.*register_buffer"):
        trace(model, (torch.ones(3),), mode="forward")
    assert type(model.total) is torch.Tensor
    assert model.total.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.randint(3, x.shape),
        lambda x: torch.mul(x, x, out=torch.empty(3)),
        lambda x: x + torch.rand(3, generator=torch.Generator()),
    ],
)
def test_what_the_runtime_does_not_offer_is_refused_when_traced(function) -> None:
    with pytest.raises(TraceError):
        trace(function, (torch.ones(3),), mode="forward")


def test_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4)
    joint_equals_eager(lambda x: layer(x)[0], lambda s: (draw(5, 2, 3, seed=s).requires_grad_(),), strategies=("auto",))


def test_an_expanded_input() -> None:
    forward_equals_eager(lambda x: x.sin(), lambda s: (draw(1, 5, seed=s).expand(4, 5),))


def test_an_embedding_plan_runs_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    print('hello')\n"
        "    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4)), (torch.tensor([1, 2, 2]),)\n"
    )
    saved = str(tmp_path / "plan.json")
    made = CliRunner().invoke(app, ["plan", f"{tmp_path}/m.py:make", "--pass", "joint", "-o", saved, "--json", "--run"])
    assert made.exit_code == 0, made.output
    json.loads(made.stdout)
    assert "hello" in made.stderr
    result = CliRunner().invoke(app, ["run", saved, "--check", "--json"])
    assert result.exit_code == 0, result.output


def test_a_batch_norm_in_evaluation() -> None:
    layer = nn.BatchNorm1d(4).eval()
    with torch.no_grad():
        layer.running_mean.uniform_()
    joint_equals_eager(layer, lambda s: (draw(3, 4, seed=s).requires_grad_(),))


def test_complex_conjugates_in_a_step() -> None:
    joint_equals_eager(
        lambda x: (x.conj() * x).real, lambda s: (torch.view_as_complex(draw(4, 2, seed=s)).requires_grad_(),)
    )


def test_a_product_with_an_expanded_operand_allocates_nothing() -> None:
    graph = trace(nn.Linear(4, 4), (draw(3, 4),), loss=lambda y: y.sum(), mode="joint")
    made = plan(graph)
    run = ArenaRuntime(made)
    run(draw(3, 4))
    assert allocations(lambda: run.execute(threads=1)).calls == 0
    assert made.unplanned == ()


def test_inputs_that_aliased_when_traced_are_checked_in_the_forward() -> None:
    x = torch.randn(3, requires_grad=True)
    graph = trace(lambda a, b: a * b, (x, x))
    assert graph.forward is not None
    with pytest.raises(TraceError, match="shared memory"):
        graph.forward(torch.ones(3), torch.ones(3) * 2)


def test_forward_takes_keyword_inputs() -> None:
    graph = trace(lambda *, x: x.sin(), {"x": draw(3).requires_grad_()})
    assert graph.forward is not None
    outputs, saved = graph.forward(x=draw(3))
    torch.testing.assert_close(outputs, draw(3).sin())
    torch.testing.assert_close(ArenaRuntime(plan(graph))(*saved, torch.ones(3))["input.x"], draw(3).cos())


@pytest.mark.parametrize("wrt", ["0.bias", [], ["input.0", "input.0"]])
def test_targets_must_be_a_list_of_different_names(wrt) -> None:
    with pytest.raises(TraceError, match="wrt"):
        trace(lambda x: x.sin(), (draw(3).requires_grad_(),), wrt=wrt)


@pytest.mark.parametrize("options", [{"alignment": 256.0}, {"time_limit": -1}, {"time_limit": float("nan")}])
def test_wrong_options_of_plan_are_refused(options) -> None:
    with pytest.raises(PlannerError):
        plan(trace(lambda x: x.sin(), (draw(3),), mode="forward"), **options)


def test_names_that_would_drive_a_terminal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(trace(lambda x: x.sin(), (draw(3),), mode="forward")).save(path)
    document = json.loads(path.read_text())
    document["storages"][0]["name"] = "\x1b[2J"
    path.write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert issubclass(GraphError, PlannerError)


@pytest.mark.parametrize(
    "operator", ["aten.relu.default", "aten.resize_.default", "aten.as_strided.default", "aten.sum.default"]
)
def test_a_plan_whose_operator_does_not_fit_its_tensors_does_not_run(operator: str) -> None:
    from dataclasses import replace

    from runtime.errors import ArenaError

    made = plan(trace(lambda a, b: a @ b, (draw(16, 32), draw(32, 16)), mode="forward"))
    (operation,) = made.graph.operations
    changed = replace(operation, operator=operator, arguments=operation.arguments[:1])
    with pytest.raises((ArenaError, PlannerError)):
        ArenaRuntime(replace(made, graph=replace(made.graph, operations=(changed,))))
