"""`runtime.initialize` and `TrainingStep(precision=…)`: curves beside FP32, islands, loss scaling, resuming."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

import runtime
from runtime import TrainingStep
from runtime.errors import InputError, LossScaleWarning, OptimizerError
from runtime.mixed_precision import Islands
from runtime.optimizer import FusedAdam, FusedAdamW, FusedSGD, LossScaler
from tests.small_gpt import SmallGPT, batch, loss_of

#: Largest distance of a 16-bit run's losses from those in FP32 over 200 steps; measured: 1.5e-3 and 4.5e-3.
TOLERANCE = {"fp16": 5e-3, "bf16": 2e-2}
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


def reference(steps: int) -> list[float]:
    """Losses of eager PyTorch in FP32 with its own AdamW."""
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(steps):
        tokens, target = batch(number)
        loss = loss_of(model(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(
    precision: str, steps: int, *, planned: bool, scaler: LossScaler | None = None
) -> tuple[list[float], list[bool]]:
    """Losses, and whether each step was taken."""
    model = SmallGPT()
    optimizer = FusedAdamW(model.parameters(), lr=3e-3)
    losses, taken = [], []
    if planned:
        step = TrainingStep(model, loss_of, batch(0), optimizer=optimizer, precision=precision, scaler=scaler)
        for number in range(steps):
            losses.append(step(batch(number)).item())
            taken.append(step.stepped)
        return losses, taken
    _, _, amp = runtime.initialize(model, optimizer, precision, scaler=scaler)
    for number in range(steps):
        tokens, target = batch(number)
        loss = loss_of(model(tokens), target)
        amp.backward(loss)
        taken.append(amp.step())
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, taken


def distance(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "eager"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_twenty_steps_follow_fp32(precision: str, planned: bool) -> None:
    losses, taken = train(precision, 20, planned=planned)
    assert all(taken)
    assert distance(losses, reference(20)) < TOLERANCE[precision]


@pytest.mark.slow
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "eager"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_hundred_steps_follow_fp32(precision: str, planned: bool) -> None:
    losses, taken = train(precision, 200, planned=planned)
    wanted = reference(200)
    assert all(taken)
    assert wanted[-1] < 0.5 * wanted[0], "it learns"
    assert distance(losses, wanted) < TOLERANCE[precision]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "eager"])
def test_a_scale_forced_too_high_backs_off_and_recovers(planned: bool) -> None:
    scaler = LossScaler(2.0**24, growth_interval=8)
    losses, taken = train("fp16", 40, planned=planned, scaler=scaler)
    skipped = taken.count(False)
    assert not taken[0]
    assert scaler.skipped_steps == skipped
    assert scaler.get_scale() < 2.0**24
    first = taken.index(True)
    new = runtime.initialize(model := SmallGPT(), FusedSGD(model.parameters()), "fp16").model
    unchanged = [loss_of(new(tokens), target).item() for tokens, target in map(batch, range(first))]
    assert losses[:first] == pytest.approx(unchanged, abs=5e-4), "a skipped step changes nothing"
    assert losses[-1] < losses[0] - 0.5, "it learns once the scale fits"
    wanted = reference(40)
    assert distance(losses[:1], wanted[:1]) < TOLERANCE["fp16"], "the loss itself is never scaled"


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "eager"])
def test_an_overflow_changes_nothing(planned: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
    x, target = torch.randn(8, 6), torch.randint(0, 3, (8,))
    bad = x.clone()
    bad[-1, -1] = math.nan
    if planned:
        step = TrainingStep(model, F.cross_entropy, (x, target), optimizer=optimizer, precision="fp16")
        amp = step.amp
    else:
        _, _, amp = runtime.initialize(model, optimizer, "fp16")
    assert amp is not None

    def run(inputs: torch.Tensor) -> bool:
        if planned:
            step((inputs, target))
            return step.stepped
        amp.backward(F.cross_entropy(model(inputs), target))
        done = amp.step()
        optimizer.zero_grad()
        return done

    def everything() -> list[torch.Tensor]:
        states = optimizer.state_dict()["state"]
        return [p.detach().clone() for p in model.parameters()] + [t for s in states.values() for t in s.values()]

    assert run(x)
    before, scale = everything(), amp.scaler.get_scale()
    assert not run(bad)
    assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))
    assert amp.scaler.get_scale() == scale / 2
    assert (optimizer.skipped_steps, optimizer.last_step_skipped, optimizer.grad_norm) == (1, True, None)
    assert run(x)
    assert not all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))
    assert optimizer.grad_norm is not None


def test_at_the_floor_the_scaler_says_that_the_scale_is_not_the_cause() -> None:
    model = nn.Linear(6, 3)
    bad, target = torch.full((4, 6), math.nan), torch.zeros(4, dtype=torch.int64)
    optimizer, scaler = FusedSGD(model.parameters()), LossScaler(2.0, min_scale=1.0)
    step = TrainingStep(model, F.cross_entropy, (bad, target), optimizer=optimizer, precision="fp16", scaler=scaler)
    step((bad, target))
    with pytest.warns(LossScaleWarning, match="not the cause"):
        step((bad, target))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planned", "eager"])
def test_save_kill_resume_gives_the_same_curve_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """The process is killed with SIGKILL between two checkpoints; losses, scales and parameters then agree exactly."""

    def start(checkpoint: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.resumed_training", kind, str(checkpoint), "24", "5"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    with start(tmp_path / "whole.pt") as whole:
        wanted = (whole.communicate(timeout=300)[0]).splitlines()
    with start(tmp_path / "killed.pt") as killed:
        assert killed.stdout is not None
        seen = [killed.stdout.readline().strip() for _ in range(13)]
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with start(tmp_path / "killed.pt") as resumed:
        rest = (resumed.communicate(timeout=300)[0]).splitlines()
    first = int(rest[0].split()[0])
    assert len(wanted) == 25
    assert seen == wanted[:13]
    assert first in (10, 15, 20)
    assert rest == wanted[first:]
    scales = [float(line.split()[2]) for line in wanted[:-1]]
    assert min(scales) < scales[0], "the scale fell"
    assert max(scales[first:]) > min(scales), "and rose after the kill"


def test_the_islands() -> None:
    """What is 16-bit and what FP32 inside, on operands whose results in 16 bits would be wrong."""
    x = torch.full((4, 300), 300.0).half()
    linear, norm = nn.Linear(300, 300).half(), nn.LayerNorm(300).half()
    with Islands(torch.float16):
        assert x.pow(2).mean(-1).tolist() == [9e4] * 4, "65504 is float16's largest"
        assert x.sum().item() == 3.6e5
        assert F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)).item() == pytest.approx(math.log(300), rel=1e-6)
        assert x.log_softmax(-1).dtype is torch.float32
        assert x.softmax(-1).dtype is torch.float16
        assert F.mse_loss(x, torch.zeros(4, 300)).item() == 9e4
        assert linear(x.float()).dtype is torch.float16
        assert (x.float() @ x.T).dtype is torch.float16
        assert (x.float() @ x.float().T).dtype is torch.float32, "two FP32 operands are the caller's own island"
        assert norm(x).dtype is torch.float16


def test_mean_and_deviation_of_a_norm_are_kept_in_fp32() -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(256)
    x = (torch.randn(64, 256) * 3 + 5).half()
    incoming = torch.randn(64, 256).half()

    def gradient(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        leaf = x.detach().clone().to(dtype).requires_grad_()
        module(leaf).backward(incoming.to(dtype))
        assert leaf.grad is not None
        return leaf.grad.double()

    wanted = gradient(copy.deepcopy(norm).half().double(), torch.float64)
    plain = gradient(copy.deepcopy(norm).half(), torch.float16)
    with Islands(torch.float16):
        ours = gradient(copy.deepcopy(norm).half(), torch.float16)
    assert (ours - wanted).norm() < 0.75 * (plain - wanted).norm()
    assert (ours - wanted).norm() < 3e-4 * wanted.norm()


def test_masters_hold_the_fp32_weights_exactly() -> None:
    model = SmallGPT()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model, optimizer, amp = runtime.initialize(model, FusedAdamW(model.parameters(), master="fp32"), "bf16")
    assert isinstance(optimizer, FusedAdamW)
    assert not amp.scaler.enabled
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.dtype is torch.bfloat16
        # A master half-way above an even parameter is one unit lower: `runtime.optimizer.convert.to_grid`.
        torch.testing.assert_close(optimizer.master(parameter), value, rtol=2e-7, atol=0)
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.optim.AdamW, FusedAdamW), (torch.optim.Adam, FusedAdam), (torch.optim.SGD, FusedSGD)],
)
def test_torchs_optimizers_are_replaced_with_settings_and_state(
    given: type[torch.optim.Optimizer], wanted: type[torch.optim.Optimizer]
) -> None:
    model = nn.Linear(6, 3)
    old = given(
        [{"params": [model.weight], "lr": 0.02}, {"params": [model.bias], "weight_decay": 0.3}],
        lr=0.01,
        **({"momentum": 0.9} if given is torch.optim.SGD else {"betas": (0.8, 0.95)}),
    )
    model(torch.randn(4, 6)).sum().backward()
    old.step()
    twin = copy.deepcopy((model, old))
    _, new, _ = runtime.initialize(model, old, "bf16", master="fp32")
    assert type(new) is wanted
    model.zero_grad()
    for kind, (net, optimizer) in enumerate(((model, new), twin)):
        optimizer.zero_grad()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if kind == 0:
            masters = [new.master(p) for p in net.parameters()]
    for ours, theirs in zip(masters, twin[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_fp32_converts_nothing() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    made = runtime.initialize(model, optimizer, "fp32")
    assert made.model is model
    assert made.optimizer is optimizer
    before = model.weight.detach().clone()
    made.amp.backward(model(torch.ones(2, 6)).sum())
    assert made.amp.step()
    assert model.weight.dtype is torch.float32
    assert not torch.equal(model.weight, before)


def test_a_model_goes_through_it_once_and_can_be_copied() -> None:
    model = SmallGPT()
    _, optimizer, _ = runtime.initialize(model, FusedSGD(model.parameters()), "fp16")
    runtime.initialize(model, optimizer, "fp16")
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    tokens, _ = batch(0)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(tokens), model(tokens), rtol=0, atol=0)
    assert twin(tokens).dtype is torch.float32


def test_the_rules_end_with_a_forward_that_fails() -> None:
    model = nn.Linear(6, 3)
    runtime.initialize(model, FusedSGD(model.parameters()), "fp16")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert torch.ones(2).half().pow(2).dtype is torch.float16


def test_micro_batches_add_up_at_one_scale() -> None:
    model = SmallGPT()
    twin = copy.deepcopy(model)
    tokens, target = batch(0, rows=8)
    _, optimizer, amp = runtime.initialize(model, FusedSGD(model.parameters(), lr=0.1, master="fp32"), "fp16")
    for rows in (slice(0, 4), slice(4, 8)):
        amp.backward(loss_of(model(tokens[rows]), target[rows]) / 2)
    assert amp.step()
    _, other, whole = runtime.initialize(twin, FusedSGD(twin.parameters(), lr=0.1, master="fp32"), "fp16")
    whole.backward(loss_of(twin(tokens), target))
    assert whole.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(optimizer.master(one), other.master(two), rtol=0, atol=1e-4)


def test_what_cannot_be_done_is_refused() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(OptimizerError, match="'fp16', 'bf16'"):
        runtime.initialize(model, FusedSGD(model.parameters()), "half")
    with pytest.raises(OptimizerError, match="no fused form"):
        runtime.initialize(model, torch.optim.Adagrad(model.parameters()), "fp16")
    with pytest.raises(InputError, match="precision='fp16'"):
        TrainingStep(model, F.cross_entropy, (torch.ones(2, 6), torch.zeros(2, dtype=torch.int64)), precision="fp16")
    _, _, amp = runtime.initialize(model, FusedSGD(model.parameters()), "fp16")
    with pytest.raises(OptimizerError, match="'bf16'"):
        amp.load_state_dict({"precision": "bf16", "scaler": {}})
