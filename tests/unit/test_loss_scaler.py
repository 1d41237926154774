"""`LossScaler`: what it does to the scale, to the step, and what it says."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from optimizer_helpers import set_gradients
from torch import nn

from runtime.errors import LossScaleWarning, OptimizerError
from runtime.optimizer import FusedAdamW, LossScaler


def parameter_with(gradient):
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), gradient, dtype=torch.float16)
    return parameter


@pytest.mark.parametrize("kind", [FusedAdamW, torch.optim.AdamW])
def test_the_scale_grows_backs_off_and_counts(kind):
    parameter = parameter_with(1.0)
    optimizer = kind([parameter], lr=0.1)
    scaler = LossScaler(1024.0, growth_interval=3)
    scales = []
    for step in range(9):
        parameter.grad = torch.full((4,), math.inf if step == 5 else 512.0, dtype=torch.float16)
        before = parameter.detach().clone()
        done = scaler.step(optimizer)
        assert done is (step != 5)
        assert torch.equal(parameter.detach(), before) is (step == 5)
        scales.append(scaler.update())
    assert scales == [1024, 1024, 2048, 2048, 2048, 1024, 1024, 1024, 2048]
    assert scaler.skipped_steps == 1
    assert float(optimizer.state[parameter]["step"]) == 8.0


def test_steps_equal_unscaled_ones():
    plain, scaled = (nn.Parameter(torch.ones(100, dtype=torch.float16)) for _ in range(2))
    first, second = FusedAdamW([plain]), FusedAdamW([scaled])
    scaler = LossScaler(2.0**10)
    for step in range(20):
        set_gradients([plain], step, 1e-2)
        scaled.grad = plain.grad.detach() * 1024
        first.step()
        assert scaler.step(second)
        scaler.update()
    assert torch.equal(plain, scaled)


def test_a_float16_loss_is_scaled_in_fp32():
    scaled = LossScaler(2.0**20).scale(torch.tensor(3.0, dtype=torch.float16, requires_grad=True))
    assert scaled.dtype is torch.float32
    assert float(scaled.detach()) == 3 * 2**20


def test_unscaled_gradients_may_be_clipped_by_the_caller():
    parameter = parameter_with(1024.0)
    optimizer = FusedAdamW([parameter], lr=0.1)
    scaler = LossScaler(1024.0)
    assert scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.ones(4, dtype=torch.float16))
    with pytest.raises(OptimizerError, match="twice"):
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer)
    scaler.update()
    parameter.grad = torch.full((4,), math.nan, dtype=torch.float16)
    assert not scaler.unscale_(optimizer)
    before = parameter.detach().clone()
    assert not scaler.step(optimizer)
    assert torch.equal(parameter, before)
    assert scaler.update() == 512.0


def test_at_the_floor_it_says_so_once_and_goes_on():
    parameter = parameter_with(math.nan)
    optimizer = FusedAdamW([parameter])
    scaler = LossScaler(8.0, min_scale=2.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(10):
            assert not scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0
    assert (scaler.skipped_steps, scaler.skipped_in_a_row) == (10, 10)
    assert [item.category for item in seen] == [LossScaleWarning]
    assert "floor of 2" in str(seen[0].message)
    assert "3 steps skipped in a row" in str(seen[0].message)
    parameter.grad = torch.ones(4, dtype=torch.float16)
    assert scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped_in_a_row == 0


def test_the_ceiling_holds():
    scaler = LossScaler(2.0, growth_interval=1, max_scale=8.0)
    optimizer = FusedAdamW([parameter_with(1.0)])
    for _ in range(5):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0


def test_state_goes_on_where_it_was():
    scaler = LossScaler(1024.0, growth_interval=4, backoff_factor=0.25)
    parameter = parameter_with(1.0)
    optimizer = FusedAdamW([parameter])
    for value in (1.0, math.inf, 1.0, 1.0, 1.0):
        parameter.grad = torch.full((4,), value, dtype=torch.float16)
        scaler.step(optimizer)
        scaler.update()
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    parameter.grad = torch.ones(4, dtype=torch.float16)
    other.step(optimizer)
    assert other.update() == 512.0
    torch_state = torch.amp.GradScaler("cpu", init_scale=64.0).state_dict()
    other.load_state_dict(torch_state)
    assert other.get_scale() == 64.0


def test_two_optimizers_share_a_scale():
    good, bad = parameter_with(1.0), parameter_with(math.inf)
    scaler = LossScaler(4.0)
    assert scaler.step(FusedAdamW([good]))
    assert not scaler.step(FusedAdamW([bad]))
    assert scaler.update() == 2.0
    assert scaler.skipped_steps == 1


def test_disabled_it_does_nothing():
    scaler = LossScaler(enabled=False)
    parameter = parameter_with(1.0)
    loss = parameter.sum()
    assert scaler.scale(loss) is loss
    assert scaler.unscale_(torch.optim.SGD([parameter]))
    assert scaler.step(FusedAdamW([parameter]))
    assert scaler.update() == scaler.get_scale() == 1.0


@pytest.mark.parametrize(
    "options",
    [
        *({"init_scale": scale} for scale in (0.5, float("nan"), "8")),
        {"init_scale": float("inf"), "max_scale": float("inf")},
        {"min_scale": 0.0},
        *({"growth_factor": factor} for factor in (1.0, float("inf"), float("nan"))),
        *({"backoff_factor": factor} for factor in (1.0, 0.0, float("nan"))),
        *({"growth_interval": interval} for interval in (0, 2.5, float("nan"))),
    ],
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(OptimizerError):
        LossScaler(**options)


@pytest.mark.parametrize(
    "state",
    [
        *({"scale": scale} for scale in (0.0, -1.0, float("nan"), float("inf"), "8")),
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_interval": 0},
        {"min_scale": 0.0},
        {"min_scale": 2.0**20, "max_scale": 2.0**10},
    ],
)
def test_a_state_that_no_loss_can_be_scaled_with_is_refused_and_changes_nothing(state):
    scaler = LossScaler(8.0)
    before = scaler.state_dict()
    with pytest.raises(OptimizerError):
        scaler.load_state_dict({"skipped_steps": 3, **state})
    assert scaler.state_dict() == before


def test_a_loaded_scale_is_brought_within_the_bounds():
    scaler = LossScaler(8.0, min_scale=1.0, max_scale=1024.0)
    for given, taken in ((0.5, 1.0), (64.0, 64.0), (2.0**30, 1024.0)):
        scaler.load_state_dict({"scale": given})
        assert scaler.get_scale() == taken


def test_sparse_gradients_of_other_optimizers_are_unscaled():
    embedding = nn.Embedding(5, 2, sparse=True)
    scaler = LossScaler(8.0)
    scaler.scale(embedding(torch.tensor([1, 1])).sum()).backward()
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    assert scaler.unscale_(optimizer)
    assert torch.equal(embedding.weight.grad.to_dense()[1], torch.tensor([2.0, 2.0]))
    assert scaler.step(optimizer)


def test_a_grad_scaler_of_torch_may_take_over():
    parameter = parameter_with(1.0)
    optimizer = FusedAdamW([parameter])
    ours = LossScaler(4.0)
    assert ours.step(optimizer)
    ours.update()
    ours.unscale_(optimizer)
    assert ours.step(optimizer)
    ours.update()
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0)
    theirs.scale(torch.ones(()))
    theirs.step(optimizer)
    theirs.update()
    assert float(optimizer.state[parameter]["step"]) == 3.0
