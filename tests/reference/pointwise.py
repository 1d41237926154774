"""Every instruction of a pointwise program, by its definition; run it on float64 tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "relu": torch.relu,
    "positive": lambda x, y: torch.where(x <= 0, 0.0, y),
    "where": torch.where,
}
