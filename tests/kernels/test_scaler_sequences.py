"""The loss scale over hundreds of steps: `LossScaler`, the check of a plan on a CPU, and the one on a GPU agree."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner import update as control
from runtime.errors import LossScaleWarning
from runtime.kernels.triton.launch import Launch
from runtime.kernels.update import _check
from runtime.optimizer import LossScaler
from runtime.optimizer.triton_check import PARTS, decide_kernel, decide_setting


def told(scaler: LossScaler) -> list[float]:
    """A control block before the first step."""
    state = scaler.state
    numbers = [0.0, 1.0, np.nan, 0.0, state.scale, state.good_steps, state.skipped_in_a_row, 0.0, 1.0, np.inf]
    return [
        *numbers,
        *(scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval, scaler.min_scale, scaler.max_scale),
    ]


@given(
    choice=st.fixed_dictionaries(
        {
            "growth_factor": st.sampled_from([1.5, 2.0, 16.0]),
            "backoff_factor": st.sampled_from([0.5, 0.3]),
            "growth_interval": st.integers(1, 5),
            "min_scale": st.sampled_from([0.25, 1.0, 8.0]),
            "max_scale": st.sampled_from([8.0, 2.0**10, 2.0**24]),
        }
    ),
    rate=st.floats(0.02, 0.7),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=6, deadline=None)
def test_the_three_forms_go_through_the_same_scales(choice: dict[str, Any], rate: float, seed: int) -> None:
    scaler = LossScaler(8.0, **choice)
    on_cpu = np.array(told(scaler))
    on_gpu = torch.tensor(told(scaler), dtype=torch.float64)
    scales = np.array(8.0, dtype=np.float32), torch.tensor([8.0])
    overflows, squares = torch.zeros(2, PARTS, dtype=torch.float64).unbind()
    decide = Launch(decide_kernel, (1,), (overflows, squares, on_gpu, scales[1], PARTS), decide_setting(scaled=True))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    warned, skipped = False, 0
    for bad in np.random.default_rng(seed).random(200) < rate:
        weight.grad = torch.full((1,), float("inf") if bad else 1.0)
        scale = scaler.get_scale()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert scaler.step(optimizer) != bad
            scaler.update()
        warned |= any(entry.category is LossScaleWarning for entry in caught)
        skipped += int(bad)
        backend = SimpleNamespace(overflow=lambda _, bad=bad: bool(bad), squares=lambda _: 1.0)
        _check([SimpleNamespace(backend=backend)], on_cpu, scales[0])  # type: ignore[list-item]
        overflows[int(seed % PARTS)] = float(bad)
        decide()
        for block, seen in ((on_cpu, float(scales[0])), (on_gpu.numpy(), float(scales[1]))):
            state = scaler.state
            assert (block[control.SCALE], block[control.GOOD_STEPS]) == (state.scale, state.good_steps)
            assert (block[control.IN_A_ROW], block[control.SKIPPED]) == (state.skipped_in_a_row, skipped)
            assert bool(block[control.FLOORED]) == warned
            assert bool(block[control.FOUND]) == bad
            assert block[control.FACTOR] == 1.0 / float(np.float32(scale))
            assert seen == np.float32(state.scale)
    assert scaler.skipped_steps == skipped
