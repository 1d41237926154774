"""The planned update by the Triton kernels, in the interpreter: beside the CPU's and torch's; what the host sees."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from planned_helpers import KINDS, beside_its_own_step, data, loss32, net

from planner.operators import CHECK_GRADIENTS, UPDATE
from planner.plan import Plan
from runtime import ArenaRuntime, TrainingStep
from runtime.errors import LossScaleWarning
from runtime.kernels.triton.launch import INTERPRETED, Launch
from runtime.kernels.triton.update import scratch_nbytes
from runtime.optimizer import FusedAdamW, FusedOptimizer, FusedSGD, LossScaler
from runtime.optimizer.planned import PlannedUpdate

pytestmark = pytest.mark.usefixtures("one_thread")
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def snapshot(optimizer: FusedOptimizer) -> list[torch.Tensor]:
    held = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        held += [value.clone() for value in state.values()]
    return held + [block.clone() for block in optimizer.state_blocks().values()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_the_optimizers_own_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    """Beside the optimizer's own step on the CPU, on the gradients of the same kernels."""
    planned, stepped = beside_its_own_step(kind, dtype, 3, norm_rel=1e-12, kernels="triton")
    if kind == "clipped":  # the norm is summed in another order
        for one, two in zip(snapshot(planned), snapshot(stepped), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    else:
        assert equal(snapshot(planned), snapshot(stepped))


def train(
    kernels: str, precision: str, spoilt: int | None = 2, **options: Any
) -> tuple[list[float], list[dict[str, Any]], FusedOptimizer, TrainingStep]:
    """Five steps with a schedule, clipping and loss scaling, one with an infinite input."""
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.3, skip_nonfinite=True, **options)
    scaler = LossScaler(1024.0, growth_interval=2, enabled=precision == "fp16")
    step = TrainingStep(
        model, loss32, data(0), optimizer=optimizer, precision=precision, scaler=scaler, kernels=kernels
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    losses, scales = [], []
    for number in range(5):
        x, target = data(number)
        if number == spoilt:
            x[0, 0] = math.inf
        before = snapshot(optimizer)
        losses.append(step((x, target)).item())
        assert step.stepped is (number != spoilt)
        assert equal(before, snapshot(optimizer)) is (number == spoilt)
        scales.append({**scaler.state_dict(), "skipped": optimizer.skipped_steps})
        schedule.step()
    return losses, scales, optimizer, step


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_five_steps_with_an_overflow_a_schedule_and_clipping_are_the_cpus(precision: str) -> None:
    ours, theirs = train("triton", precision), train("auto", precision)
    assert ours[1] == theirs[1]  # scale, growth and back-off, after every step
    assert ours[1][-1]["skipped"] == 1
    if precision == "fp16":  # doubled after two good steps, halved, doubled after two more
        assert [state["scale"] for state in ours[1]] == [1024, 2048, 1024, 1024, 2048]
    good = [number for number in range(5) if number != 2]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert [ours[0][i] for i in good] == pytest.approx([theirs[0][i] for i in good], abs=tolerance)
    for one, two in zip(ours[2].param_groups[0]["params"], theirs[2].param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
    assert {float(state["step"]) for state in ours[2].state.values()} == {4.0}


def test_five_steps_in_fp32_are_torchs_adamw() -> None:
    eager = net()
    reference = torch.optim.AdamW(eager.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.7)
    losses = []
    for number in range(5):
        x, target = data(number)
        if number != 2:
            loss = loss32(eager(x), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.3)
            reference.step()
            reference.zero_grad()
            losses.append(loss.item())
        schedule.step()
    ours, _, optimizer, _ = train("triton", "fp32")
    assert [ours[i] for i in (0, 1, 3, 4)] == pytest.approx(losses, abs=1e-5)
    for one, two in zip(optimizer.param_groups[0]["params"], eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def no_reads(run: Callable[[], Any]) -> Any:
    """Run with every way from a tensor to the host closed; the kernels themselves are left out."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host waits for the device")

    ways = "item tolist numpy cpu __bool__ __float__ __int__ __index__ __array__ nonzero is_nonzero equal".split()
    with mock.patch.multiple(torch.Tensor, **dict.fromkeys(ways, refuse)), mock.patch.object(Launch, "__call__"):
        return run()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_wait_for_nothing_until_somebody_looks(precision: str) -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    example = data(0)
    step = TrainingStep(model, loss32, example, optimizer=optimizer, precision=precision, kernels="triton")
    step(example)

    def several() -> None:
        for _ in range(3):
            step(example)
            schedule.step()

    no_reads(several)
    with pytest.raises(AssertionError, match="waits"):
        no_reads(lambda: step.stepped)


def test_what_several_steps_did_is_read_once() -> None:
    spoilt, sound = data(0), data(1)
    spoilt[0][0, 0] = math.inf
    model = net()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    step = TrainingStep(model, loss32, sound, optimizer=optimizer, precision="fp16", kernels="triton")
    with mock.patch.object(PlannedUpdate, "settle", autospec=True, side_effect=PlannedUpdate.settle) as reads:
        for example in (spoilt, sound, spoilt, spoilt):
            step(example)
        assert reads.call_count == 0
        scaler = step.scaler
        assert scaler is not None
        assert (scaler.skipped_steps, scaler.skipped_in_a_row, scaler.get_scale()) == (3, 2, 2.0**13)
        assert (optimizer.skipped_steps, optimizer.last_step_skipped, step.stepped) == (3, True, False)
        assert reads.call_count == 1
        step(sound)
        assert step.stepped
        assert optimizer.skipped_steps == 3
        assert reads.call_count == 2


def test_launches_once_bound_do_the_next_steps_as_a_replayed_graph_does() -> None:
    """What a CUDA graph keeps of a launch is the kernel, the grid and the arguments: here they are called anew.

    Between replays the host only sends what changed, to the memory that the launches read.
    """
    ours, theirs = net(), net()
    optimizers = [FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.3) for model in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    steps = [
        TrainingStep(
            model,
            loss32,
            data(0),
            optimizer=optimizer,
            precision="fp16",
            scaler=LossScaler(256.0, growth_interval=2),
            kernels="triton",
        )
        for model, optimizer in zip((ours, theirs), optimizers, strict=True)
    ]
    replayed = steps[0]
    run = replayed._run(data(0))
    captured = list(run._program)
    kinds = [operation.operator for operation in run.plan.graph.operations]
    assert kinds[-2:] == [CHECK_GRADIENTS, UPDATE]
    assert [item.kernel.fn.__name__ for item in captured[-4:] if isinstance(item, Launch)] == [
        "scan_kernel",
        "decide_kernel",
        "update_kernel",
        "advance_kernel",
    ]
    scales = []
    for number in range(5):
        example = data(number)
        if number == 3:
            example[0][0, 0] = math.inf
        assert replayed._update is not None
        no_reads(replayed._update.prepare)
        run.load(*example)
        for item in captured:
            item()  # type: ignore[operator]
        no_reads(replayed._update.finish)
        steps[1](example)
        for schedule in schedules:
            schedule.step()
        scales.append(float(replayed._program.loss_scale))
    assert scales == [256, 512, 512, 256, 256]
    assert equal(snapshot(optimizers[0]), snapshot(optimizers[1]))
    assert replayed.scaler is not None
    assert steps[1].scaler is not None
    assert replayed.scaler.state_dict() == steps[1].scaler.state_dict()
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**5)


def test_a_learning_rate_of_zero_between_steps_takes_effect() -> None:
    model = net()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, kernels="triton")
    step(data(0))
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    step(data(0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[:4], strict=False))
    optimizer.param_groups[0]["lr"] = 0.1
    step(data(0))
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before[:4], strict=False))


def test_the_scalers_settings_and_loaded_states_reach_the_device() -> None:
    model = net()
    step = TrainingStep(
        model, loss32, data(0), optimizer=FusedAdamW(model.parameters()), precision="fp16", kernels="triton"
    )
    scaler = step.scaler
    assert scaler is not None
    step(data(0))
    scaler.growth_interval, scaler.growth_factor = 2, 4.0
    step(data(0))
    assert scaler.get_scale() == 2.0**18
    scaler.load_state_dict({"scale": 32.0, "good_steps": 0, "growth_interval": 3})
    for number in range(3):
        assert scaler.get_scale() == 32.0, number
        step(data(0))
    assert scaler.get_scale() == 128.0
    copied = copy.deepcopy(scaler)
    step(data(0))
    assert copied.state_dict() != scaler.state_dict()
    assert copied.get_scale() == 128.0


def test_overflow_at_the_floor_warns_once_when_somebody_looks() -> None:
    model = net()
    scaler = LossScaler(1.0)
    step = TrainingStep(
        model,
        loss32,
        data(0),
        optimizer=FusedAdamW(model.parameters()),
        precision="fp16",
        scaler=scaler,
        kernels="triton",
    )
    spoilt = data(0)
    spoilt[0][0, 0] = math.inf
    step(spoilt)
    with pytest.warns(LossScaleWarning, match="floor"):
        assert scaler.get_scale() == 1.0
    step(spoilt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaler.skipped_in_a_row == 2


def test_a_resumed_run_repeats_the_steps() -> None:
    def made() -> tuple[nn.Module, TrainingStep]:
        model = net()
        optimizer = FusedAdamW(model.parameters(), lr=0.01, states="8bit", master="stochastic", seed=5)
        scaler = LossScaler(256.0, growth_interval=2)
        return model, TrainingStep(
            model, loss32, data(0), optimizer=optimizer, precision="fp16", scaler=scaler, kernels="triton"
        )

    model, step = made()
    for number in range(3):
        step(data(number))
    assert step.amp is not None
    assert step.optimizer is not None
    saved = copy.deepcopy((model.state_dict(), step.optimizer.state_dict(), step.amp.state_dict()))
    expected = [step(data(number)).item() for number in (3, 4)]
    model, step = made()
    step(data(9))
    assert step.amp is not None
    assert step.optimizer is not None
    model.load_state_dict(saved[0])
    step.optimizer.load_state_dict(saved[1])
    step.amp.load_state_dict(saved[2])
    assert [step(data(number)).item() for number in (3, 4)] == expected


def test_other_shapes_and_groups_share_the_states_and_the_scale() -> None:
    ends = []
    for kernels in ("triton", "auto"):
        model = net()
        first, *others = model.parameters()
        optimizer = FusedAdamW([first], lr=0.01)
        step = TrainingStep(
            model, loss32, data(0), optimizer=optimizer, scaler=LossScaler(8.0, growth_interval=2), kernels=kernels
        )
        for number, rows in enumerate((8, 3, 40)):
            step(data(number, rows))
        optimizer.add_param_group({"params": others, "lr": 0.02})
        for number, rows in enumerate((40, 3)):
            step(data(number, rows))
        assert step.scaler is not None
        ends.append((step.scaler.state_dict(), optimizer.skipped_steps, snapshot(optimizer)))
    assert ends[0][:2] == ends[1][:2]
    assert ends[0][0]["scale"] == 32.0
    for one, two in zip(ends[0][2], ends[1][2], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_fp64_parameters_and_mixed_dtypes_take_the_kernels_they_can() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
            self.narrow = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.narrow).double().mul(self.wide).sum()

    ends = []
    for kernels in ("triton", "auto"):
        model = Mixed()
        step = TrainingStep(
            model, None, (torch.ones(3, 6),), optimizer=FusedAdamW(model.parameters(), lr=0.1), kernels=kernels
        )
        for _ in range(3):
            step((torch.ones(3, 6),))
            assert step.stepped
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, two in zip(*ends, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_what_lies_outside_the_arena_is_listed() -> None:
    model = net()
    optimizer = FusedAdamW(model.parameters())
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, kernels="triton")
    program = step._run(data(0))._program
    arena = step._arena
    assert arena is not None
    first = arena.bytes.data_ptr()
    outside = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for item in program[-4:]
        if isinstance(item, Launch)
        for tensor in item.arguments
        if isinstance(tensor, torch.Tensor) and not first <= tensor.data_ptr() < first + arena.nbytes
    }
    (listed,) = [entry.nbytes for entry in step.plan.unplanned if entry.operator == UPDATE]
    assert sum(outside.values()) == listed == scratch_nbytes([[p.numel() for p in model.parameters()]])


def test_a_saved_plan_runs_with_and_without_the_kernels(tmp_path: Any) -> None:
    """One plan, whoever runs it: the scale adapts, steps are counted, parameters move alike."""
    model = net()
    scaler = LossScaler(64.0, growth_interval=1)
    optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.1)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, scaler=scaler)
    step(data(0))
    step.plan.save(tmp_path / "step.json")
    ends = []
    for kernels in ("triton", "aten"):
        state = {port.name: tensor.clone() for port, _, tensor in step._run(data(0))._states if tensor is not None}
        run = ArenaRuntime(Plan.load(tmp_path / "step.json"), state=state, kernels=kernels)
        for number in (1, 2):
            example = list(data(number))
            run.load(*example)
            run.execute()
            run.write_back(example)
        assert float(state["loss_scale"]) == 128.0 * 4
        ends.append(state)
    for name, one in ends[0].items():
        torch.testing.assert_close(one, ends[1][name], rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device, or TRITON_INTERPRET is not 0")
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_steps_on_a_gpu_wait_and_allocate_nothing_and_are_the_cpus(precision: str, cuda_graph: bool) -> None:
    """From the third step on, when kernels are compiled and the graph is captured; an overflow is among them."""
    ends = []
    for device in ("cuda", "cpu"):
        model = net().to(device)
        optimizer = FusedAdamW(model.parameters(), lr=0.01, max_grad_norm=0.3, skip_nonfinite=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        scaler = LossScaler(1024.0, growth_interval=2, enabled=precision == "fp16")
        batches = [tuple(item.to(device) for item in data(number)) for number in range(8)]
        batches[4][0][0, 0] = math.inf
        step = TrainingStep(
            model,
            loss32,
            batches[0],
            optimizer=optimizer,
            precision=precision,
            scaler=scaler,
            device=device,
            cuda_graph=cuda_graph and device == "cuda",
        )
        losses, before = [], 0
        try:
            for number, example in enumerate(batches):
                if device == "cuda" and number == 2:
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_stats()["allocation.all.allocated"]
                    torch.cuda.set_sync_debug_mode("error")
                losses.append(step(example))
                schedule.step()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        if device == "cuda":
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        ends.append(([loss.item() for loss in losses], scaler.state_dict(), optimizer.skipped_steps, model))
    assert ends[0][1:3] == ends[1][1:3]
    assert ends[0][2] == 1
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert ends[0][0] == pytest.approx(ends[1][0], abs=tolerance, nan_ok=True)
    for one, two in zip(ends[0][3].parameters(), ends[1][3].parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=tolerance, atol=tolerance)
