"""``torch.compile(model, backend="arenaplan")``: ordinary training loops run unchanged beside eager."""

from __future__ import annotations

import copy
import gc
from importlib.metadata import entry_points

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime import compiler
from runtime.compiler import backend


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net(seed: int = 0, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
    )


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=backend)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_the_backend_is_found_by_name() -> None:
    names = {point.name for point in entry_points(group="torch_dynamo_backends")}
    if "arenaplan" not in names:
        pytest.skip("the package is not installed, only on the path")
    assert "arenaplan" in torch._dynamo.list_backends()
    model = nn.Linear(6, 3)
    x = batch(0)[0]
    torch.testing.assert_close(torch.compile(model, backend="arenaplan")(x), model(x))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_loop_follows_eager(optimizer: type[torch.optim.Optimizer]) -> None:
    ours, eager = net(), net()
    run = compiled(ours)
    optimizers = [optimizer(m.parameters(), lr=0.02) for m in (ours, eager)]
    for step in range(6):
        x, target = batch(step)
        losses = []
        for call in (run, eager):
            torch.manual_seed(step)
            loss = F.cross_entropy(call(x), target)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        for one, two in zip(gradients(ours), gradients(eager), strict=True):
            torch.testing.assert_close(one, two)
        for made in optimizers:
            made.step()
            made.zero_grad(set_to_none=step % 2 == 0)
    for (name, one), two in zip(ours.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-6, msg=name)


def test_gradients_accumulate_and_are_the_callers_own() -> None:
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    run = compiled(ours)
    for step in range(3):
        x, target = batch(step)
        F.cross_entropy(run(x), target).backward()
        F.cross_entropy(eager(x), target).backward()
        held = [gradient.clone() for gradient in gradients(ours)]
        run(batch(9)[0])
        for one, two, three in zip(gradients(ours), gradients(eager), held, strict=True):
            torch.testing.assert_close(one, two)
            torch.testing.assert_close(one, three, rtol=0, atol=0)


def test_outputs_are_not_overwritten_by_later_calls() -> None:
    model = net(dropout=0.0).eval()
    run = compiled(model)
    with torch.no_grad():
        first = run(batch(0)[0])
        kept = first.clone()
        run(batch(1)[0])
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


def test_a_second_forward_before_the_first_backward() -> None:
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    run = compiled(ours)
    for call in (run, eager):
        first, second = call(batch(0)[0]), call(batch(1)[0])
        second.pow(3).sum().backward()
        first.pow(3).sum().backward()
    for one, two in zip(gradients(ours), gradients(eager), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=5e-5)


def test_a_retained_graph_can_go_backward_again() -> None:
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    run = compiled(ours)
    for call in (run, eager):
        loss = call(batch(0)[0]).pow(3).sum()
        for repeat in range(3):
            loss.backward(retain_graph=repeat < 2)
    for one, two in zip(gradients(ours), gradients(eager), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=5e-5)


def test_batches_of_other_shapes() -> None:
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    run = compiled(ours)
    for step, rows in enumerate([4, 9, 4, 3, 9, 17, 2]):
        for call in (run, eager):
            F.cross_entropy(call(batch(step, rows)[0]), batch(step, rows)[1]).backward()
        for one, two in zip(gradients(ours), gradients(eager), strict=True):
            torch.testing.assert_close(one, two)


def test_dynamic_dimensions_are_planned_shape_by_shape() -> None:
    model = net(dropout=0.0)
    run = torch.compile(model, backend=backend, dynamic=True)
    for rows in (4, 9, 5):
        x = batch(0, rows)[0]
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(run(x), expected)


def test_several_outputs_of_which_some_are_used() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.a(x)
            return {"a": y, "view": y[:2].t(), "b": self.b(x).relu(), "count": x.shape[0], "c": self.c(x).argmax(-1)}

    torch.manual_seed(0)
    ours = Model()
    eager = copy.deepcopy(ours)
    run = compiled(ours)
    for _ in range(3):
        for call in (run, eager):
            out = call(batch(0)[0])
            (out["a"].sum() + out["view"].square().sum()).backward()
        assert out["count"] == 8
        for one, two in zip(gradients(ours), gradients(eager), strict=True):
            assert (one is None or not one.any()) == (two is None or not two.any())
            if two is not None:
                torch.testing.assert_close(one, two)


def test_evaluation_between_training_steps() -> None:
    ours, eager = net(), net()
    run = compiled(ours)
    for step in range(3):
        for model, call in ((ours, run), (eager, eager)):
            model.train()
            torch.manual_seed(step)
            call(batch(step)[0]).pow(3).sum().backward()
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(run(batch(step)[0]), eager(batch(step)[0]))


def test_two_models_at_once() -> None:
    models = [net(1, 0.0), net(2, 0.0)]
    copies = copy.deepcopy(models)
    runs = [compiled(model) for model in models]
    x, target = batch(0)
    for pair in (runs, copies):
        (F.cross_entropy(pair[0](x), target) * 2 + F.cross_entropy(pair[1](x), target)).backward()
    for one, two in zip(models, copies, strict=True):
        for a, b in zip(gradients(one), gradients(two), strict=True):
            torch.testing.assert_close(a, b)


def test_an_input_changed_in_place() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return (x * y).relu()

    run = torch.compile(function, backend=backend)
    x = torch.randn(4, 3, requires_grad=True)
    ours, eager = torch.zeros(4, 3), torch.zeros(4, 3)
    for _ in range(3):
        torch.testing.assert_close(run(x, ours), function(x, eager))
        torch.testing.assert_close(ours, eager)


def test_a_forward_that_nobody_goes_back_through_gives_its_arena_back() -> None:
    model = net(dropout=0.0)
    run = compiled(model)
    run(batch(0)[0])
    gc.collect()
    before = len(compiler._POOL.arena_sizes())
    for step in range(8):
        run(batch(step)[0])
        gc.collect()
    assert len(compiler._POOL.arena_sizes()) == before


def test_a_double_backward_is_refused() -> None:
    run = torch.compile(lambda x: x**5, backend=backend)
    x = torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def _doubled(h: torch.Tensor) -> None:
    h.t()[3].mul_(2)


def _negated(h: torch.Tensor) -> None:
    h[:, ::2].neg_()


def _overwritten(h: torch.Tensor) -> None:
    h[1:3] = 0


@pytest.mark.parametrize("change", [_doubled, _negated, _overwritten])
def test_a_view_of_an_intermediate_changed_in_place(change) -> None:
    """Its backward has a functional ``aten.copy`` into a tensor that is never filled, and is not read."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 49).view(7, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * self.weight
            change(h)
            return h

    ours, eager = Model(), Model()
    compiled = torch.compile(ours, backend="arenaplan")
    for seed in range(2):
        x = torch.randn(7, 7, generator=torch.Generator().manual_seed(seed))
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad, rtol=0, atol=0)
