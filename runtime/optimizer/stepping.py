"""A step over workspaces whose gradients are there: look at them, decide, update; from the host or on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import OptimizerError
from runtime.optimizer.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What an optimizer asks of a step.

    Attributes:
        rule, settings, seed: as in `codes`; a float64 row of settings for each parameter group.
        checks: whether to look for infinities and NaN; not where ``found_inf`` says it.
        max_grad_norm: the largest norm of all gradients, ``None`` for no limit.
        grad_scale: what the gradients are multiplied by already, or ``None``.
        found_inf: whether the step is skipped, or ``None``.
    """

    rule: int
    settings: Any
    seed: int
    checks: bool
    max_grad_norm: float | None
    grad_scale: Any
    found_inf: Any


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a step did: numbers, or tensors on the device that nobody has waited for.

    Attributes:
        found: whether it changed nothing because a gradient was not finite.
        norm: of all gradients, unscaled, before clipping; ``None`` or NaN where it was not needed.
        launches: updates launched.
    """

    found: torch.Tensor | bool
    norm: torch.Tensor | float | None
    launches: int


def update_from_host(busy: Sequence[Workspace], asked: Asked) -> Outcome:
    """Decide here, then update.

    Raises:
        OptimizerError: the gradients' scale is 0; nothing was updated.
    """
    if asked.found_inf is not None:
        found = bool(asked.found_inf)
    else:
        found = asked.checks and any(workspace.backend.overflow(workspace) for workspace in busy)
    scale = 1.0 if asked.grad_scale is None else float(asked.grad_scale)
    if scale == 0:
        raise OptimizerError("grad_scale=0: gradients cannot be divided by it; give the scaler a floor")
    factor, norm = 1.0 / scale, None
    if asked.max_grad_norm is not None and not found:
        norm = math.sqrt(sum(workspace.backend.squares(workspace) for workspace in busy)) * factor
        factor *= min(1.0, asked.max_grad_norm / (norm + 1e-6))
    for workspace in busy:
        if not found:
            workspace.backend.update(workspace, asked.rule, asked.settings, factor, asked.seed)
        workspace.advance(found)
    return Outcome(found, norm, 0 if found else len(busy))


def update_on_device(busy: Sequence[Workspace], asked: Asked) -> Outcome:
    """The same without waiting: what decides is computed, and read by the update, on the device."""
    device = next(workspace.device for workspace in busy if not workspace.backend.host)

    def number(value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(())

    checks = asked.checks and asked.found_inf is None
    total = number(0.0 if asked.found_inf is None else asked.found_inf)
    squares = number(0.0)
    for workspace in busy if checks or asked.max_grad_norm is not None else ():
        if workspace.backend.host:
            seen, sizes = workspace.backend.overflow(workspace), workspace.backend.squares(workspace)
        else:
            seen, sizes = workspace.backend.scan(workspace)
        total = total + number(seen) if checks else total
        squares = squares + number(sizes)
    found = (total != 0).to(torch.float32)
    factor = number(1.0) if asked.grad_scale is None else 1.0 / number(asked.grad_scale)
    norm = None
    if asked.max_grad_norm is not None:
        whole = squares.sqrt() * factor
        norm = torch.where(found == 0, whole, math.nan)
        ratio = asked.max_grad_norm / (whole + 1e-6)
        factor = factor * torch.where(ratio < 1.0, ratio, 1.0)  # a norm of NaN limits nothing, as on the host
    signal = torch.stack((found.double(), factor))
    launches = 0
    for workspace in busy:
        if not workspace.backend.host:
            here = signal.to(workspace.device, non_blocking=True)
            workspace.backend.update(workspace, asked.rule, asked.settings, here, asked.seed)
            launches += 1
        elif not bool(found):
            workspace.backend.update(workspace, asked.rule, asked.settings, float(factor), asked.seed)
            launches += 1
        workspace.advance(found.to(workspace.device, non_blocking=True))
    return Outcome(found, norm, launches)
