"""The Triton update in the interpreter: the compiled update's bits, whatever the choice; launches; 64-bit offsets."""

from __future__ import annotations

import math
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from optimizer_helpers import HALVES, PAIRS, same, set_gradients, small_model, snapshot
from slots import Slots
from torch import nn

pytest.importorskip("triton")

from triton.runtime import interpreter

from runtime.kernels.triton.launch import Launch
from runtime.optimizer import FusedAdamW, FusedSGD, LossScaler, backends, codes
from runtime.optimizer.triton_backend import TritonBackend
from runtime.optimizer.triton_kernel import update_kernel, update_setting


@contextmanager
def through_triton():
    """Optimizers built here run on the Triton kernels, in the interpreter."""
    made = []

    def backend_for(device, dtype):
        made.append(TritonBackend())
        return made[-1]

    with mock.patch.object(backends, "backend_for", backend_for):
        yield made


def both(build, run):
    """What two optimizers hold, one on each form of the update, after the same steps."""
    ends = []
    for triton in (False, True):
        torch.manual_seed(0)
        with through_triton() if triton else mock.MagicMock():
            parameters, optimizer = build()
        run(parameters, optimizer)
        ends.append(snapshot(optimizer))
    return ends


SHAPES = [(300,), (1,), (0, 3), (7, 43), (1500,), (3, 256), (65,)]


def test_infinities_and_zeros_give_the_same_bits():
    special = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1.0, math.nan])
    for name, dtype in (("adamw", torch.float16), ("sgd", torch.float16), ("momentum", torch.float32)):
        kind, _, options = PAIRS[name]

        def build(kind=kind, dtype=dtype, options=options):
            parameter = nn.Parameter(special.repeat(60).to(dtype))
            return [parameter], kind([parameter], **{**options, "weight_decay": 0.0}, skip_nonfinite=False)

        def run(parameters, optimizer):
            for _ in range(2):
                parameters[0].grad = special.repeat_interleave(60).to(parameters[0].dtype)
                optimizer.step()

        one, other = both(build, run)
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            assert torch.equal(ours[~ours.isnan()].signbit(), theirs[~ours.isnan()].signbit())


CHOICES = [(dtype, master) for dtype in HALVES for master in ("none", "fp32", "split", "stochastic")]
CHOICES.append((torch.float32, "split"))


@pytest.mark.parametrize(("dtype", "master"), CHOICES)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_triton_and_compiled_adamw_give_the_same_bits(states, dtype, master):
    compare("adamw", dtype, master, states)


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_triton_and_compiled_updates_of_the_others_give_the_same_bits(name, states):
    compare(name, torch.bfloat16, "split", states)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "master"), CHOICES)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "nesterov"])
def test_all_triton_and_compiled_updates_give_the_same_bits(name, states, dtype, master):
    compare(name, dtype, master, states)


def compare(name, dtype, master, states):
    ours, _, options = PAIRS[name]

    def build():
        parameters = [nn.Parameter((torch.randn(shape) * 10.0**-(i)).to(dtype)) for i, shape in enumerate(SHAPES)]
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-3}]
        return parameters, ours(groups, **options, master=master, states=states, seed=2**31 + 3)

    def run(parameters, optimizer):
        for step in range(3):
            set_gradients(parameters, step, 10.0 ** (1 - step))
            optimizer.step()

    assert same(*both(build, run))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [(0, 0), (2, 1023), (2, -1)])
@pytest.mark.parametrize(
    ("dtype", "states"), [(torch.float16, "8bit"), (torch.bfloat16, "fp32"), (torch.float32, "fp32")]
)
def test_an_overflow_anywhere_changes_nothing(bad, place, dtype, states):
    parameters = [nn.Parameter(torch.randn(n).to(dtype)) for n in (3, 64, 2500)]
    with through_triton():
        optimizer = FusedAdamW(parameters, states=states, skip_nonfinite=True, max_grad_norm=1.0)
    set_gradients(parameters, 0)
    optimizer.step()
    set_gradients(parameters, 1)
    parameters[place[0]].grad[place[1]] = bad
    before = snapshot(optimizer)
    optimizer.step()
    assert same(before, snapshot(optimizer))
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1


def test_scaling_clipping_and_found_inf_on_the_device():
    def build():
        parameters = [nn.Parameter(torch.randn(n).to(dtype)) for n, dtype in ((300, HALVES[0]), (70, torch.float32))]
        return parameters, FusedAdamW(parameters, lr=1e-2, max_grad_norm=0.5)

    norms = []

    def run(parameters, optimizer):
        scaler = LossScaler(64.0, growth_interval=2)
        for step in range(6):
            set_gradients(parameters, step, scaler.get_scale())
            if step == 3:
                parameters[1].grad[-1] = math.nan
            assert scaler.step(optimizer) is (step != 3)
            scaler.update()
            if step != 3:
                norms.append(optimizer.grad_norm)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert optimizer.last_step_skipped

    first, second = both(build, run)
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-6)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_launch_for_each_dtype_whatever_the_parameters():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(30)]
    parameters += [nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(30)]
    with through_triton() as made:
        optimizer = FusedAdamW(
            [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 1e-2}], skip_nonfinite=False
        )
    set_gradients(parameters, 0)
    optimizer.step()
    assert [backend.launches for backend in made] == [{"scan": 0, "update": 1}] * 2
    assert optimizer.launches == 2
    assert all(bool((parameter != 1).all()) for parameter in parameters)


def test_steps_wait_for_nothing():
    """No number of the device reaches the host: on a GPU each would be a wait."""
    parameters = [nn.Parameter(torch.ones(300, dtype=torch.float16))]
    with through_triton():
        optimizer = FusedAdamW(parameters, max_grad_norm=1.0)
    set_gradients(parameters, 0)
    optimizer.step()
    optimizer.grad_scale = torch.tensor(8.0)
    reads = []

    def read(self):
        reads.append(self)
        return 0.0

    with (
        mock.patch.object(Launch, "__call__", lambda self: self),
        mock.patch.object(torch.Tensor, "__bool__", lambda self: bool(read(self))),
        mock.patch.object(torch.Tensor, "item", read),
        mock.patch.object(torch.Tensor, "__float__", read),
    ):
        optimizer._update(optimizer.grad_scale, None)
    assert len(reads) == 1  # by `Workspace.advance`, which counts steps on the host where parameters lie on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("odd", [0, 1])
def test_followed_views_of_an_arena_and_its_canaries(dtype, odd):
    arena = Slots()
    model, reference = small_model(dtype), small_model(dtype)
    with through_triton():
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, link=False)
    other = FusedSGD(reference.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        wide = torch.zeros(parameter.numel() + odd, dtype=dtype)
        wide[odd:] = parameter.detach().flatten()
        parameter.data = arena.place(wide)[odd:].view(parameter.shape)
        parameter.grad = arena.place(wide)[odd:].view(parameter.shape)
    for step in range(3):
        set_gradients(model.parameters(), step)
        set_gradients(reference.parameters(), step)
        optimizer.step()
        other.step()
    arena.check()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("offset", [2**31 - 512, 2**31, 2**33 + 256])
@pytest.mark.parametrize("moments", [codes.FULL, codes.BYTES])
def test_offsets_past_two_to_the_31(offset, moments):
    """Case I06: element numbers of 64 bits, with base pointers that far before small tensors."""
    ends = []
    for at in (0, offset):
        torch.manual_seed(0)
        parameter, gradient = torch.randn(1000).half(), torch.randn(1000).half()
        remainder = torch.zeros(1024, dtype=torch.int16)
        kinds = (torch.float32,) * 2 if moments == codes.FULL else (torch.int8, torch.uint8)
        m, v = (torch.zeros(1024, dtype=kind) for kind in kinds)
        m_scales, v_scales = torch.zeros(4), torch.zeros(4)
        table = torch.tensor([[at, at, at, 1000, 0, 0]])
        settings = np.array([[1e-2, 0.9, 0.999, 1e-8, 0.01, 1.0, 1.0]])
        start = parameter.clone()
        tensors = [parameter.view(torch.int16), gradient.view(torch.int16), remainder, m, v]
        moved = [Moved(tensor, at) for tensor in tensors] + [Moved(s, at // codes.TILE) for s in (m_scales, v_scales)]
        chosen = update_setting(codes.FLOAT16, codes.SPLIT, moments, codes.ADAM, buffer=True, vector=8)
        signal = torch.tensor([0.0, 1.0], dtype=torch.float64)
        arguments = (*moved, table, torch.from_numpy(settings), torch.zeros(1), signal, 5)
        with (
            mock.patch.object(interpreter.GridExecutor, "_init_args_hst", lambda _, args, kwargs: (args, kwargs)),
            mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", return_value=None),
        ):
            Launch(update_kernel, (1,), arguments, chosen)()
        assert bool((parameter != start).all())
        ends.append((parameter, remainder, m, v, m_scales, v_scales))
    for one, other in zip(*ends, strict=True):
        if moments == codes.FULL:
            assert torch.equal(one, other)
        elif one.dtype is torch.float16:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


class Moved:
    """A tensor as a kernel argument whose pointer lies ``elements`` before its data."""

    def __init__(self, tensor: torch.Tensor, elements: int) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr() - elements * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address
