"""What a training step's plan depends on besides shapes: modes, frozen parameters, overlapping batches, a seed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
import torch.utils.checkpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import runtime
from planner.errors import TraceError
from runtime import TrainingStep
from runtime.errors import ArenaMemoryError, InputError, OptimizerError
from runtime.optimizer import FusedAdamW


def square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def test_train_and_eval_are_followed_gradients_adding_up() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    eager, x = copy.deepcopy(ours), torch.randn(4, 8)
    step = TrainingStep(ours, square, x)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (ours, eager)]
    for number, train in enumerate((True, False, False, True, True, False, True)):
        losses = []
        for model in (ours, eager):
            model.train(train)
            torch.manual_seed(number)
            losses.append(step(x) if model is ours else square(eager(x)))
        losses[1].backward()
        torch.testing.assert_close(losses[0], losses[1].detach())
        for (name, one), other in zip(ours.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=name)
        for one, other in zip(ours.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        if number % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_one_module_in_eval_mode_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    x = torch.ones(2, 4)
    step = TrainingStep(model, square, x)
    model[1].eval()
    assert step(x).item() == step(x).item() == pytest.approx(square(model(x)).item())


@pytest.mark.parametrize("planned", [True, False])
def test_freezing_and_thawing_are_followed(planned: bool) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    eager, x = copy.deepcopy(ours), torch.randn(4, 8)
    optimizer, theirs = FusedAdamW(ours.parameters(), lr=0.1), torch.optim.AdamW(eager.parameters(), lr=0.1)
    step = TrainingStep(ours, square, x, optimizer=optimizer if planned else None)
    for frozen in (False, True, True, False, False, True):
        for model in (ours, eager):
            model[0].requires_grad_(not frozen)
        theirs.zero_grad()
        square(eager(x)).backward()
        theirs.step()
        before = ours[0].weight.detach().clone()
        step(x)
        if not planned:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(before, ours[0].weight) is frozen
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3]


def language_model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    return model, copy.deepcopy(model)


def prediction(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


TEXT = torch.randint(0, 11, (2000,), generator=torch.Generator().manual_seed(0))


def cut(start: int) -> torch.Tensor:
    return TEXT[start : start + 12].view(3, 4)


@pytest.mark.parametrize("example", [(0, 1900), (0, 1), (0, 0), (5, 0)])
def test_a_batch_may_overlap_itself_or_not(example: tuple[int, int]) -> None:
    """A language model's target is often its input, and batches are often cut out of one long tensor."""
    ours, eager = language_model()
    step = TrainingStep(ours, prediction, (cut(example[0]), cut(example[1])))
    assert step.plan.arena_nbytes < 2**14, "the text between two parts of it is not planned in"
    for x, target in ((3, 4), (8, 9), (100, 400), (7, 7), (9, 7), (1900, 20)):
        given = (cut(x), cut(target))
        for batch in (given, (given[0].clone(), given[1].clone())):
            expected = prediction(eager(batch[0]), batch[1]).detach()
            torch.testing.assert_close(step(batch), expected)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(InputError, match=r"LBFGS.step needs a closure"):
        TrainingStep(model, square, torch.ones(2, 4), optimizer=torch.optim.LBFGS(model.parameters()))


class Checkpointed(nn.Module):
    """Blocks with a norm and a power, which the rules of mixed precision compute in FP32, run again in the backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 11)
        self.how = how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            if self.how == "kept":
                h = h + block(h)
            else:
                made: Any = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=self.how == "reentrant")
                h = h + made
        out: torch.Tensor = self.head(h)
        return out


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_checkpointed_modules_run_again_by_the_same_rules(precision: str, how: str) -> None:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    curves = []
    for kind in ("kept", how):
        model = Checkpointed(kind)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        _, _, amp = runtime.initialize(model, optimizer, precision)
        losses = []
        for _ in range(5):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            amp.backward(loss)
            assert amp.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert curves[0][0] == curves[1][0]
    assert all(torch.equal(one, other) for one, other in zip(curves[0][1], curves[1][1], strict=True))
    assert not _get_current_function_mode_stack()


class Undecided(nn.Module):
    """Its result depends on the values of a tensor, which no plan can follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out: torch.Tensor = self.second(h if float(h.detach().sum()) > 0 else -h)
        return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_step_that_cannot_be_planned_leaves_model_and_optimizer_as_they_were(precision: str, fused: bool) -> None:
    ours, eager = Undecided(), Undecided()
    kind = FusedAdamW if fused else torch.optim.AdamW
    optimizer, theirs = kind(ours.parameters(), lr=0.1), torch.optim.AdamW(eager.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    for number in range(3):
        if number == 1:
            with pytest.raises(TraceError):
                TrainingStep(ours, square, x, optimizer=optimizer, precision=precision)
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert one.dtype is torch.float32
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        for model, each in ((ours, optimizer), (eager, theirs)):
            each.zero_grad()
            square(model(x)).backward()
            each.step()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in ours.modules())
    assert not ours._state_dict_hooks


@pytest.mark.parametrize("master", ["split", "fp32", "none"])
def test_a_plan_whose_arena_cannot_be_had_leaves_model_and_optimizer_as_they_were(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> None:
        raise ArenaMemoryError("none left")

    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(requires_grad=False))
    model[0].weight = model[1].weight = tied
    before = copy.deepcopy(model)
    optimizer = FusedAdamW(model.parameters(), lr=0.1, master=master)
    monkeypatch.setattr("runtime.training.Arena", none_left)
    with pytest.raises(ArenaMemoryError):
        TrainingStep(model, square, torch.ones(2, 4), optimizer=optimizer, precision="fp16")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other) or (master == "none" and torch.equal(one, other.half().float()))
    square(model(torch.ones(2, 4))).backward()
    optimizer.step()
    assert not torch.equal(tied, before[0].weight)


@pytest.mark.parametrize("planned", [True, False])
def test_a_model_converted_behind_the_plans_back_is_refused(planned: bool) -> None:
    model = nn.Linear(4, 2)
    step = TrainingStep(model, square, torch.ones(2, 4), optimizer=FusedAdamW(model.parameters()) if planned else None)
    step(torch.ones(2, 4))
    model.half()
    with pytest.raises(InputError, match=r"model\.weight: it is torch\.float16 \(2, 4\) now, the plan was made for"):
        step(torch.ones(2, 4))
    model.float()
    assert step(torch.ones(2, 4)).isfinite()


def test_an_optimizer_of_another_model_changes_nothing() -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    with pytest.raises(OptimizerError, match="is no parameter of the model"):
        TrainingStep(model, square, torch.ones(2, 4), optimizer=FusedAdamW(other.parameters()), precision="fp16")
    assert model.weight.dtype is other.weight.dtype is torch.float32
    assert not model._forward_pre_hooks


def test_a_hook_that_fails_leaves_the_modes_as_they_were() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of the caller's")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    handle = model.register_forward_pre_hook(fail)
    optimizer = FusedAdamW(model.parameters())
    _, _, amp = runtime.initialize(model, optimizer, "bf16")
    with torch.device("cpu"):
        before = _get_current_function_mode_stack()
        with pytest.raises(ValueError, match="of the caller's"):
            model(torch.ones(2, 4))
        assert _get_current_function_mode_stack() == before
    handle.remove()
    amp.backward(square(model(torch.ones(2, 4))))
    assert amp.step()
