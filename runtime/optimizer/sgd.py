"""`FusedSGD`."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.adam import refuse_forms
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
    #: By group: whether it had momentum at a step before; a group that is not in it has yet to take a step.
    _had_momentum: tuple[bool, ...] = ()

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
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str = "split",
        states: str = "fp32",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        seed: int = 0,
        link: bool = True,
    ) -> None:
        del foreach, fused  # which implementation of torch's to use
        refuse_forms(differentiable=differentiable)
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

    def begin(self) -> None:
        """Let momentum that is switched on late begin with the gradient itself, undamped, as torch.optim.SGD does.

        Where there is momentum, a step count says how many steps the buffer has seen.
        """
        had = self._had_momentum
        now = tuple(bool(group["momentum"]) for group in self.param_groups)
        late = {number for number, (before, has) in enumerate(zip(had, now, strict=False)) if has and not before}
        for workspace in self.workspaces if late else ():
            for slot in workspace.slots:
                if slot.group in late:
                    workspace.steps[slot.number] = 0.0
            workspace.classify()
        if len(had) <= len(now):
            self._had_momentum = tuple(map(any, zip_longest(had, now, fillvalue=False)))

    def state_dict(self) -> dict[str, Any]:
        """As `FusedOptimizer.state_dict`; without buffers that momentum has not begun to fill."""
        saved = super().state_dict()
        for state in saved["state"].values():
            if "momentum_buffer" in state and not state["momentum_buffer"].any():
                del state["momentum_buffer"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `FusedOptimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        states = state_dict["state"]
        self._had_momentum = tuple(
            any(states.get(name, {}).get("momentum_buffer") is not None for name in group["params"])
            for group in state_dict["param_groups"]
        )

    def __getstate__(self) -> dict[str, Any]:
        """As `FusedOptimizer.__getstate__`, and which groups had momentum."""
        return {**super().__getstate__(), "_had_momentum": self._had_momentum}

    def setting(self, group: dict[str, Any]) -> list[float]:
        """A group's row."""
        lr, momentum, dampening = float(group["lr"]), float(group["momentum"]), float(group["dampening"])
        decay, nesterov = float(group["weight_decay"]), bool(group["nesterov"])
        if not (lr >= 0 and momentum >= 0 and decay >= 0) or dampening != dampening:
            raise OptimizerError(
                f"lr={lr}, momentum={momentum}, weight_decay={decay}, dampening={dampening}: "
                "none may be NaN, and the first three not negative"
            )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptimizerError("nesterov=True needs a momentum above 0 and no dampening")
        return [lr, momentum, dampening, float(nesterov), decay, 0.0, -1.0 if group.get("maximize") else 1.0]
