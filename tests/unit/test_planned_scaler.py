"""The loss scale in a plan and in an ordinary loop: the same steps are skipped, whatever the caller does between."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

import runtime
from runtime import TrainingStep
from runtime.optimizer import FusedAdamW, FusedSGD, LossScaler


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))


def batch(number: int, *, overflow: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    return x, torch.full((3, 2), 1e30 if overflow else 1.0)


@pytest.mark.filterwarnings("ignore::runtime.errors.LossScaleWarning")
@pytest.mark.parametrize("kind", [FusedAdamW, FusedSGD])
def test_a_plan_and_a_loop_skip_the_same_steps_whatever_is_changed_between(kind: type[FusedAdamW]) -> None:
    chosen = random.Random(5)
    ours, theirs = net(), net()
    options = {"init_scale": 1024.0, "growth_factor": 1.5, "growth_interval": 3, "max_scale": 2.0**16}
    planned, plain = LossScaler(**options), LossScaler(**options)
    optimizer = kind(ours.parameters(), lr=1e-3, master="stochastic", max_grad_norm=0.01)
    step = TrainingStep(ours, F.mse_loss, batch(0), optimizer=optimizer, precision="fp16", scaler=planned)
    _, reference, amp = runtime.initialize(
        theirs, kind(theirs.parameters(), lr=1e-3, master="stochastic", max_grad_norm=0.01), "fp16", scaler=plain
    )
    for number in range(150):
        x, target = batch(number, overflow=chosen.random() < 0.25)
        step((x, target))
        reference.zero_grad()
        amp.backward(F.mse_loss(theirs(x), target))
        assert step.stepped == amp.step()
        assert planned.state == plain.state
        assert planned.skipped_steps == plain.skipped_steps
        assert optimizer.skipped_steps == reference.skipped_steps
        what = chosen.random()
        if what < 0.1:
            state = {**planned.state_dict(), "scale": chosen.choice([8.0, 64.0]), "good_steps": 1}
            planned.load_state_dict(state)
            plain.load_state_dict(state)
        elif what < 0.15:
            planned.growth_interval = plain.growth_interval = chosen.choice([1, 2, 5])
        if what < 0.05 or what > 0.95:  # the step is planned anew
            optimizer.seed = reference.seed = number
        elif what > 0.9:
            for model in (ours, theirs):
                model[0].weight.requires_grad_(not model[0].weight.requires_grad)


@pytest.mark.parametrize("change", ["seed", "group", "freeze"])
def test_a_resumed_scale_survives_what_is_planned_anew(change: str) -> None:
    def start() -> tuple[nn.Module, FusedAdamW, LossScaler, TrainingStep]:
        model = net()
        extra = model[2].bias
        rest = [parameter for parameter in model.parameters() if parameter is not extra]
        optimizer = FusedAdamW(rest if change == "group" else model.parameters(), lr=1e-2)
        scaler = LossScaler(256.0, growth_interval=3)
        step = TrainingStep(model, F.mse_loss, batch(0), optimizer=optimizer, precision="fp16", scaler=scaler)
        return model, optimizer, scaler, step

    def changed(model: nn.Module, optimizer: FusedAdamW) -> None:
        if change == "seed":
            optimizer.seed = 9
        elif change == "group":
            optimizer.add_param_group({"params": [model[2].bias]})
        else:
            model[0].weight.requires_grad_(requires_grad=False)

    model, optimizer, scaler, step = start()
    for number in range(2):
        step(batch(number))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    resumed = start()
    for holder, state in zip(resumed, saved, strict=False):
        holder.load_state_dict(state)
    for each in ((model, optimizer), resumed[:2]):
        changed(*each)
    for number in range(2, 5):
        assert resumed[3](batch(number)).item() == step(batch(number)).item()
        assert resumed[2].state == scaler.state
    assert scaler.get_scale() == 512.0
    for one, other in zip(model.parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)
