"""What the tests of the planned update share: optimizers by name, a small network, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

from runtime import TrainingStep
from runtime.optimizer import AdamW8bit, FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD

Make = Callable[[Any], FusedOptimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda p: FusedAdamW(p, lr=0.01),
    "adam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, lr=0.01),
    "nesterov": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "8bit": lambda p: AdamW8bit(p, lr=0.01),
    "clipped": lambda p: FusedAdamW(p, lr=0.01, max_grad_norm=0.05),
    "fp32 master": lambda p: FusedAdamW(p, lr=0.01, master="fp32"),
    "stochastic": lambda p: FusedAdamW(p, lr=0.01, master="stochastic", seed=7),
    "maximize": lambda p: FusedSGD(p, lr=0.01, maximize=True),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3)).to(dtype)


def data(seed: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator).to(dtype), torch.randint(0, 3, (rows,), generator=generator)


def loss32(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), target)


def beside_its_own_step(
    kind: str, dtype: torch.dtype, steps: int, *, norm_rel: float = 0.0, **options: Any
) -> tuple[FusedOptimizer, FusedOptimizer]:
    """A planned update and the optimizer's own step on the CPU, on the gradients of the same kernels.

    Losses, launches and skipped steps are compared after each step, the norms within ``norm_rel``.
    """
    ours, theirs = net(dtype), net(dtype)
    planned, stepped = KINDS[kind](ours.parameters()), KINDS[kind](theirs.parameters())
    step = TrainingStep(ours, loss32, data(0, dtype=dtype), optimizer=planned, **options)
    gradients = TrainingStep(theirs, loss32, data(0, dtype=dtype), **options)
    stepped.follow()
    for number in range(steps):
        example = data(number, dtype=dtype)
        assert torch.equal(step(example), gradients(example))
        stepped.step()
        stepped.zero_grad()
        norm = stepped.grad_norm
        assert planned.grad_norm == (None if norm is None else pytest.approx(norm, rel=norm_rel, abs=0.0))
        assert (planned.launches, planned.skipped_steps) == (1, 0)
    return planned, stepped
