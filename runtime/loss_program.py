"""A model and its loss as one module of the batch, which is what a training step traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from runtime.errors import InputError

#: Before the model's own names among those of the module.
PREFIX = "model."
#: The buffer that holds the loss scale.
SCALE = "loss_scale"


class LossProgram(nn.Module):
    """The model and its loss as one module of the batch."""

    loss_scale: torch.Tensor

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, *, scaled: bool = False) -> None:
        super().__init__()
        if scaled:
            near = next((parameter.device for parameter in model.parameters()), None)
            self.register_buffer(SCALE, torch.ones((), device=near), persistent=False)
        self.model = model
        self.loss_fn = loss_fn
        self.takes_target = loss_fn is not None and positional(loss_fn) != 1

    def forward(self, *items: Any, **named: Any) -> Any:
        """Loss of a batch given as positional or keyword inputs; its gradient starts at the loss scale, if any."""
        loss = self._loss(*items, **named)
        return _scaled_backward(loss, self.loss_scale) if SCALE in self._buffers else loss

    def _loss(self, *items: Any, **named: Any) -> Any:
        if named or not items:
            outputs, target = self.model(**named), named
        elif self.takes_target:
            outputs, target = self.model(*items[:-1]), items[-1]
        else:
            outputs, target = self.model(*items), None
        if self.loss_fn is None:
            return _own_loss(outputs)
        return self.loss_fn(outputs, target) if self.takes_target else self.loss_fn(outputs)


class _ScaledBackward(torch.autograd.Function):
    """The loss itself; in the backward its gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


def _scaled_backward(loss: Any, scale: torch.Tensor) -> Any:
    full = loss.float() if isinstance(loss, torch.Tensor) and loss.dtype in (torch.float16, torch.bfloat16) else loss
    return _ScaledBackward.apply(full, scale)  # type: ignore[no-untyped-call]


def positional(function: Callable[..., Any]) -> int:
    """Positional arguments a function must be given; 2, as a loss usually takes, where that is not known."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise InputError("loss_fn", "it is None, and the model returns neither a scalar nor an output with `loss`")
    return loss
