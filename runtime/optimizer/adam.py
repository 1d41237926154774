"""`FusedAdamW`, `FusedAdam` and `AdamW8bit`."""

from __future__ import annotations

from typing import Any

from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.precision import Precision


def refuse_forms(**options: bool) -> None:
    """Refuse options of torch.optim that ask for another form of the update than there is."""
    for name, asked in options.items():
        if asked:
            raise OptimizerError(f"{name}=True: the fused update has no such form; leave it out, or use torch.optim")


class FusedAdamW(FusedOptimizer):
    """AdamW (Loshchilov and Hutter 2019) in one pass over memory; arguments and results are `torch.optim.AdamW`'s.

    ``lr``, ``betas``, ``eps``, ``weight_decay`` and ``maximize`` are as for torch.optim.AdamW; a group may set its own.
    ``foreach`` and ``fused`` are accepted, as there is one form of the update; ``amsgrad``, ``capturable`` and
    ``differentiable`` are refused.

    Args:
        params: as for torch.optim: parameters, named parameters, or groups.
        master: ``"split"``, ``"fp32"``, ``"stochastic"`` or ``"none"``: `Precision`.
        states: ``"fp32"`` or ``"8bit"``.
        max_grad_norm: scale gradients down whose common norm is larger.
        skip_nonfinite: skip a step whose gradients hold an infinity or NaN; ``None``: where there are float16
            gradients or a loss scale.
        seed: of the random rounding.
        link: make parameters and gradients views of contiguous workspaces; ``False`` leaves them where they lie.

    Raises:
        OptimizerError: a value out of its range, an unknown choice, a parameter that cannot be updated.
    """

    rule = codes.ADAM
    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        master: str = "split",
        states: str = "fp32",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        seed: int = 0,
        link: bool = True,
    ) -> None:
        del foreach, fused  # which implementation of torch's to use
        refuse_forms(capturable=capturable, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": self.decoupled,
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
        """The first moment and the second."""
        return (("exp_avg", True), ("exp_avg_sq", False))

    def setting(self, group: dict[str, Any]) -> list[float]:
        """A group's row."""
        try:
            beta1, beta2 = (float(beta) for beta in group["betas"])
        except (TypeError, ValueError) as error:
            raise OptimizerError(f"betas={group['betas']!r}: give two numbers") from error
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        if group.get("amsgrad"):
            raise OptimizerError("amsgrad=True: the fused update keeps no maximum; use torch.optim.AdamW for it")
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise OptimizerError(f"betas={group['betas']}: both must be at least 0 and less than 1")
        if not (lr >= 0 and eps >= 0 and decay >= 0):
            raise OptimizerError(f"lr={lr}, eps={eps}, weight_decay={decay}: none may be negative or NaN")
        decoupled = self.decoupled or bool(group.get("decoupled_weight_decay"))
        return [lr, beta1, beta2, eps, decay, float(decoupled), -1.0 if group.get("maximize") else 1.0]


class FusedAdam(FusedAdamW):
    """Adam (Kingma and Ba 2015) with weight decay added to the gradient, as `torch.optim.Adam`.

    Arguments as `FusedAdamW`'s; ``weight_decay`` is 0 unless given.
    """

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        self.decoupled = decoupled_weight_decay
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        del self.decoupled  # each group says it for itself from here on


class AdamW8bit(FusedAdamW):
    """`FusedAdamW` with 8-bit block-wise moments."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, **{"states": "8bit", **options})
