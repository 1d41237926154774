"""Softmax with excluded columns, and its backward through dropout."""

from __future__ import annotations

import torch


def softmax(
    x: torch.Tensor, scale: float = 1.0, excluded: torch.Tensor | None = None, *, safe: bool = True
) -> torch.Tensor:
    """``softmax(scale · x)`` in float64; excluded columns give 0, as do rows with no other column if ``safe``."""
    scores = x.double() * scale
    if excluded is not None:
        scores = torch.where(excluded.expand(scores.shape), float("-inf"), scores)
    result = torch.softmax(scores, -1)
    if safe:
        result = torch.where((scores == float("-inf")).all(-1, keepdim=True), 0.0, result)
    return result


def softmax_backward(
    grad: torch.Tensor, probs: torch.Tensor, kept: torch.Tensor | None = None, p: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    """``scale · P · (∇P − Σ P ∇P)``, ``∇P = G · kept / (1 − p)``, a zero probability taking no part; float64."""
    g, probs = grad.double(), probs.double()
    if kept is not None:
        g = torch.where(kept, g / (1 - p), 0.0)
    g = torch.where(probs == 0, 0.0, g)
    return scale * probs * (g - (probs * g).sum(-1, keepdim=True))
