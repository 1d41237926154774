"""The grid of attention shapes, and a plain account of what a plan may add."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from runtime.attention import build_attention

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one self-attention block."""

    batch: int
    heads: int
    length: int
    hidden: int
    dtype: str = "float32"
    dropout: float = 0.1
    fused: bool = True
    causal: bool = False

    @property
    def activation(self) -> int:
        """X = B·L·H, elements."""
        return self.batch * self.length * self.hidden

    @property
    def scores(self) -> int:
        """S = B·N·L², elements."""
        return self.batch * self.heads * self.length**2

    @property
    def target_nbytes(self) -> int:
        """max(S, 3X), bytes."""
        return max(self.scores, 3 * self.activation) * ITEMSIZE[self.dtype]

    def build(self, *, sdpa: bool = False, device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
        """The block and its input, the same weights every time; with ``sdpa`` by PyTorch's own attention."""
        torch.manual_seed(3)
        return build_attention(
            self.batch,
            self.heads,
            self.length,
            self.hidden,
            dtype=self.dtype,
            dropout=self.dropout,
            fused=self.fused,
            causal=self.causal,
            sdpa=sdpa,
            device=device,
        )

    def is_aligned(self, alignment: int) -> bool:
        """Whether every size that matters is a multiple of the alignment."""
        item = ITEMSIZE[self.dtype]
        return all(count * item % alignment == 0 for count in (self.activation, self.scores, self.hidden)) and (
            not self.causal or self.length**2 % alignment == 0
        )


def in_float64(module: nn.Module, x: torch.Tensor, incoming: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Output and gradients in float64 under the same dropout masks: bernoulli draws do not depend on the dtype."""
    wide = copy.deepcopy(module).double()
    leaf = x.detach().double().requires_grad_()
    torch.manual_seed(seed)
    y = wide(leaf)
    names = [*dict(wide.named_parameters()), "input.0"]
    gradients = torch.autograd.grad(y, [*wide.parameters(), leaf], incoming.double())
    return {"output.0": y.detach(), **dict(zip(names, gradients, strict=True))}
