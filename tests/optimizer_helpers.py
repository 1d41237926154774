"""What the tests of the fused update share: models, reference updates in float64, and a backend by name."""

from __future__ import annotations

import math
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from runtime.optimizer import FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD, compiled
from runtime.optimizer.compiled import CompiledBackend

#: Ours, torch's, and arguments both take.
PAIRS = {
    "adamw": (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (FusedAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    "sgd": (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "momentum": (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def backend(name):
    """Run the updates on ``"compiled"`` or ``"aten"``, whatever is installed."""
    with mock.patch.object(compiled, "available", return_value=name == "compiled"):
        yield


@contextmanager
def counted_launches():
    """Collect the number of rows of each launch of the compiled update."""
    rows = []
    original = CompiledBackend.update

    def update(self, workspace, *arguments):
        rows.append(len(workspace.table))
        return original(self, workspace, *arguments)

    with mock.patch.object(CompiledBackend, "update", update):
        yield rows


def small_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 5)).to(dtype)


def set_gradients(parameters, seed, scale=1.0):
    """Give each parameter a gradient of its own, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        with torch.no_grad():
            parameter.grad.copy_(gradient)


def snapshot(optimizer: FusedOptimizer):
    """Copies of everything a step may change."""
    return [
        tensor.detach().clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in [parameter, *optimizer.state[parameter].values()]
    ] + [block.clone() for block in optimizer.state_blocks().values()]


def same(first, second):
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(map(bits, first), map(bits, second), strict=True)
    )


def bits(tensor):
    return tensor.reshape(-1).contiguous()


def adamw_float64(w, m, v, g, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=1e-2):
    """One AdamW step in float64; changes ``m`` and ``v``, returns the parameter."""
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    size = lr / (1 - beta1**step)
    return w * (1 - lr * decay) - size * m / (v.sqrt() / math.sqrt(1 - beta2**step) + eps)
