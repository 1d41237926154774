"""`FusedSGD`."""

from __future__ import annotations

from typing import Any

from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.precision import Precision


class FusedSGD(FusedOptimizer):
    """SGD with momentum and Nesterov's, in one pass over memory; arguments and results are `torch.optim.SGD`'s.

    A momentum buffer is kept for every parameter once any group has momentum. The other arguments are
    those of `FusedAdamW`.

    Raises:
        OptimizerError: a value out of its range, an unknown choice, a parameter that cannot be updated.
    """

    rule = codes.SGD

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master: str = "split",
        states: str = "fp32",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        seed: int = 0,
        link: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            precision=Precision(master, states),
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            seed=seed,
            link=link,
        )

    def moments(self) -> tuple[tuple[str, bool], ...]:
        """The momentum buffer, if any group has or had momentum."""
        kept = any(name == "momentum_buffer" for workspace in self._workspaces for name, _ in workspace.moments)
        return (("momentum_buffer", True),) if kept or any(group["momentum"] for group in self.param_groups) else ()

    def setting(self, group: dict[str, Any]) -> list[float]:
        """A group's row."""
        lr, momentum, dampening = float(group["lr"]), float(group["momentum"]), float(group["dampening"])
        decay, nesterov = float(group["weight_decay"]), bool(group["nesterov"])
        if lr < 0 or momentum < 0 or decay < 0:
            raise OptimizerError(f"lr={lr}, momentum={momentum}, weight_decay={decay}: none may be negative")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptimizerError("nesterov=True needs a momentum above 0 and no dampening")
        return [lr, momentum, dampening, float(nesterov), decay, 0.0, -1.0 if group.get("maximize") else 1.0]
