"""`LossScaler`: dynamic loss scaling (Micikevicius et al. 2018, section 3.2) that says what it did."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import LossScaleWarning, OptimizerError
from runtime.optimizer.base import FusedOptimizer


@dataclass(frozen=True, slots=True)
class ScalerState:
    """What a loss scaler changes from step to step.

    Attributes:
        scale: of the next loss.
        good_steps: since the scale last changed.
        skipped_in_a_row: updates with overflow since the last one without.
    """

    scale: float
    good_steps: int
    skipped_in_a_row: int


class LossScaler:
    """Keeps the loss scale as large as float16 gradients bear.

    ``scaler.scale(loss).backward(); done = scaler.step(optimizer); scaler.update()``, once for each training step;
    several optimizers may step before one update.

    Args:
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: what it is multiplied by after a step with overflow, which changes no parameter.
        min_scale: its floor. Overflow at the floor cannot come from the scale, which a warning says once.
        max_scale: its ceiling.
        enabled: ``False`` makes every method do what it would for a scale of 1, without any check.

    Raises:
        OptimizerError: a factor or bound out of its range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        enabled: bool = True,
    ) -> None:
        _check_scales(init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        if not min_scale <= init_scale <= max_scale:
            raise OptimizerError(
                f"min_scale={min_scale}, init_scale={init_scale}, max_scale={max_scale}: "
                "give positive numbers in ascending order"
            )
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.enabled = enabled
        self._skipped = 0
        self._in_a_row = 0
        self._scale = float(init_scale)
        self._good_steps = 0
        self._pending: Callable[[], None] | None = None
        self._warned = False
        self._found: list[bool] = []
        self._unscaled: dict[int, bool] = {}

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped, in all."""
        self._settle()
        return self._skipped

    @property
    def skipped_in_a_row(self) -> int:
        """Updates with overflow since the last one without."""
        self._settle()
        return self._in_a_row

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        self._settle()
        return self._scale if self.enabled else 1.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; in FP32 if it is a float16, which the scale itself may overflow."""
        if not self.enabled:
            return loss
        return (loss.float() if loss.dtype is torch.float16 else loss) * self.get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the scale in place, for the caller to look at or clip; whether all are finite.

        Call it at most once before a step, which then does not divide again.

        Raises:
            OptimizerError: called twice.
        """
        if not self.enabled:
            return True
        if id(optimizer) in self._unscaled:
            raise OptimizerError("unscale_ was called twice before update(): the gradients are unscaled already")
        finite = _unscale(optimizer, 1.0 / self.get_scale())
        self._unscaled[id(optimizer)] = finite
        return finite

    @property
    def state(self) -> ScalerState:
        """What changes from step to step."""
        self._settle()
        return ScalerState(self._scale, self._good_steps, self._in_a_row)

    def took(self, settle: Callable[[], None]) -> None:
        """Take note of updates made elsewhere, by the same rules.

        ``settle`` is called before somebody looks at what they did, and then calls `settled`.
        """
        self._pending = settle

    def awaits(self, settle: Callable[[], None]) -> bool:
        """Whether nobody has looked yet at what those updates did."""
        return self._pending == settle

    def settled(self, state: ScalerState, skipped: int, *, floored: bool) -> None:
        """What the updates made elsewhere left, how many steps they skipped, and whether one did at the floor.

        Warns:
            LossScaleWarning: as `update`.
        """
        self._pending = None
        self._scale, self._good_steps, self._in_a_row = state.scale, state.good_steps, state.skipped_in_a_row
        self._skipped += skipped
        if floored:
            self._warn()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which takes no part in anybody's steps."""
        self._settle()
        return dict(self.__dict__)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer with unscaled gradients, unless one of them is not finite; whether it stepped.

        A fused optimizer unscales and checks as it reads the gradients, and leaves them scaled.
        """
        if not self.enabled:
            optimizer.step()
            return True
        self._settle()
        unscaled = self._unscaled.get(id(optimizer))
        if isinstance(optimizer, FusedOptimizer):
            done = self._step_fused(optimizer, unscaled)
        else:
            done = _unscale(optimizer, 1.0 / self._scale) if unscaled is None else unscaled
            if done:
                optimizer.step()
        self._found.append(not done)
        return done

    def _step_fused(self, optimizer: FusedOptimizer, unscaled: bool | None) -> bool:
        # A scale of 1 makes the optimizer look for overflow whatever its gradients' dtype.
        optimizer.grad_scale = self._scale if unscaled is None else 1.0
        if unscaled is False:
            optimizer.found_inf = True
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale
            if unscaled is False:
                del optimizer.found_inf
        return not optimizer.last_step_skipped

    def update(self) -> float:
        """Set the scale for the next training step and return it.

        Warns:
            LossScaleWarning: once, when gradients overflow although the scale is at its floor.
        """
        if not self.enabled:
            return 1.0
        self._settle()
        found, self._found = self._found, []
        self._unscaled.clear()
        self._skipped += sum(found)
        if not any(found):
            self._in_a_row = 0
            self._good_steps += bool(found)
            if self._good_steps >= self.growth_interval:
                self._good_steps = 0
                self._scale = min(self._scale * self.growth_factor, self.max_scale)
            return self._scale
        self._good_steps = 0
        self._in_a_row += 1
        if self._scale <= self.min_scale:
            self._warn()
        self._scale = max(self._scale * self.backoff_factor, self.min_scale)
        return self._scale

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the loss scale is at its floor of {self.min_scale:g} and gradients are still infinite or NaN "
            f"({self._in_a_row} steps skipped in a row, {self._skipped} in all): the scale is not the "
            "cause; look for NaN in the inputs or the loss, lower the learning rate, or keep that layer in float32",
            LossScaleWarning,
            stacklevel=3,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to scale as this one would have."""
        self._settle()
        return {
            "scale": self._scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "good_steps": self._good_steps,
            "skipped_steps": self._skipped,
            "skipped_in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over; `torch.amp.GradScaler`'s as well. What is missing stays as it is.

        A scale below the floor or above the ceiling becomes that.

        Raises:
            OptimizerError: a number out of its range; then nothing is taken over.
        """
        floats = ("growth_factor", "backoff_factor", "min_scale", "max_scale")
        self._settle()
        names = (*floats, "growth_interval")
        new: dict[str, Any] = {name: state.get(name, getattr(self, name)) for name in names}
        new["_scale"] = state.get("scale", self._scale)
        new["_good_steps"] = state.get("good_steps", state.get("_growth_tracker", self._good_steps))
        new["_skipped"] = state.get("skipped_steps", self._skipped)
        new["_in_a_row"] = state.get("skipped_in_a_row", self._in_a_row)
        ranged = ("_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")
        _check_scales(*(new[name] for name in ranged))
        new["_scale"] = min(max(new["_scale"], new["min_scale"]), new["max_scale"])
        for name, value in new.items():
            setattr(self, name, float(value) if name in (*floats, "_scale") else int(value))
        self._found.clear()
        self._unscaled.clear()


def _check_scales(scale: Any, growth: Any, backoff: Any, interval: Any, least: Any, most: Any) -> None:
    """Refuse what no loss can be scaled with."""
    for name, value in (("scale", scale), ("min_scale", least), ("max_scale", most)):
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise OptimizerError(f"{name}={value!r}: give a positive, finite number")
    if least > most:
        raise OptimizerError(f"min_scale={least}, max_scale={most}: give a floor that is not above the ceiling")
    known = all(isinstance(value, (int, float)) for value in (growth, backoff, interval))
    if not known or not 1 < growth < math.inf or not 0 < backoff < 1 or not interval >= 1 or interval != int(interval):
        raise OptimizerError(
            f"growth_factor={growth}, backoff_factor={backoff}, growth_interval={interval}: growth must exceed 1, "
            "back-off lie between 0 and 1, the interval be a whole number, at least 1"
        )


@torch.no_grad()
def _unscale(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Multiply the gradients in place; whether all are finite."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    seen: set[int] = set()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is None or id(parameter.grad) in seen:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # entries that are given twice could overflow as a sum
        gradient = parameter.grad
        seen.add(id(gradient))
        values = gradient._values() if gradient.is_sparse else gradient
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    finite = True
    for (device, _), alike in by_kind.items():
        found = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            alike, found, torch.tensor(factor, dtype=torch.float32, device=device)
        )
        finite = finite and not bool(found)
    return finite
