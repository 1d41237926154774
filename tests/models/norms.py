"""Root mean square normalisations as models spell them, and a block that normalises twice round a product."""

from __future__ import annotations

import torch
from torch import nn


class Llama(nn.Module):
    """As in Llama, T5 and most models since: statistics in float32 whatever the dtype, the weight in its own."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32) if x.dtype != torch.float64 else x
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)


class Gemma(Llama):
    """As in Gemma: one plus the weight, multiplied in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.to(wide.dtype))).type_as(x)


class Plain(Llama):
    """Without a weight that is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


NORMS = {"module": lambda width: nn.RMSNorm(width, eps=1e-5), "llama": Llama, "gemma": Gemma, "plain": Plain}


class Block(nn.Module):
    """``norm(x + norm(x) W)``: the first normalised x has a second reader, so its gradient comes in three terms."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.first = NORMS[kind](width)
        self.product = nn.Linear(width, width, bias=False)
        self.last = NORMS[kind](width)
        generator = torch.Generator().manual_seed(width)
        with torch.no_grad():
            for norm in (self.first, self.last):
                norm.weight.add_(0.1 * torch.randn(width, generator=generator))
            self.product.weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(x + self.product(self.first(x)))
        return result
