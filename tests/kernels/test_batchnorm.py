"""Batch norm: running statistics to the bit, results against float64, in place, channels that do not fit at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.operators import CHUNK_NUMEL
from tests.kernels.harness import perform

FORWARD, BACKWARD = "aten.native_batch_norm.default", "aten.native_batch_norm_backward.default"
#: The last has channels of which two fill more than one chunk of scratch.
SHAPES = [(4, 3, 5, 6), (2, 5, 9), (8, 3), (3, 5, CHUNK_NUMEL // 6)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(shape: tuple[int, ...], training: bool) -> list[Any]:
    channels = shape[1]
    return [
        draw(*shape) * 2 + 3,
        draw(channels, seed=1),
        draw(channels, seed=2),
        draw(channels, seed=3),
        draw(channels, seed=4).abs() + 0.5,
        training,
        0.1,
        1e-5,
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_training(shape: tuple[int, ...], overwrite: bool) -> None:
    values = arguments(shape, training=True)
    eager = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    expected = torch.native_batch_norm(*eager)
    ours = run_forward(values, list(expected), overwrite=overwrite)
    # Of a (N, C) input ATen sums rows in float32; otherwise the statistics are its own to the bit.
    tolerance = 5e-7 if len(shape) == 2 else 0
    torch.testing.assert_close(ours[0], eager[3], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], eager[4], rtol=tolerance, atol=tolerance)
    for one, two in zip(ours[2:], expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def run_forward(values: list[Any], expected: list[torch.Tensor], *, overwrite: bool) -> list[torch.Tensor]:
    """Running mean and variance, then what the operator returns."""
    outcome = perform(
        FORWARD, values, {}, [values[3], values[4], *expected], mutates=(3, 4), overwrite=0 if overwrite else None
    )
    assert outcome.allocated_nbytes == 0
    return outcome.results


def test_evaluation() -> None:
    values = arguments((4, 3, 5, 6), training=False)
    expected = torch.native_batch_norm(*values)
    outcome = perform(FORWARD, values, {}, list(expected))
    torch.testing.assert_close(outcome.results[0], expected[0], rtol=1e-5, atol=1e-6)
    assert outcome.allocated_nbytes == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overwrite", [None, 0, 1])
def test_backward_against_float64(shape: tuple[int, ...], training: bool, overwrite: int | None) -> None:
    x, weight, _, mean, var, _, _, eps = arguments(shape, training)
    dy = draw(*shape, seed=7)
    _, save_mean, save_invstd = torch.native_batch_norm(x, weight, None, mean.clone(), var.clone(), training, 0.1, eps)
    if not training:
        save_mean, save_invstd = mean, (var + eps).rsqrt()
    values = [dy, x, weight, mean, var, save_mean, save_invstd, training, eps, [True, True, True]]
    wide = [value.double() if isinstance(value, torch.Tensor) else value for value in values]
    expected = torch.ops.aten.native_batch_norm_backward(*wide)
    outcome = perform(
        BACKWARD, values, {}, [item.float() for item in expected], overwrite=overwrite, count=overwrite is None
    )
    assert outcome.allocated_nbytes == 0
    for ours, reference in zip(outcome.results, expected, strict=True):
        assert ((ours.double() - reference).norm() / reference.norm()).item() < 1e-5
