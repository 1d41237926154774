"""The self-attention block that `arenaplan demo`, `attention` and `bench attention` plan and run."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

from planner.errors import ShapeError


class SelfAttention(nn.Module):
    """Multi-head self-attention as LightSeq2's layer defines it: QKV projection to output dropout.

    Args:
        hidden: H, divisible by ``heads``.
        heads: N.
        dropout: probability for the attention weights and for the output.
        fused: one projection to 3H instead of three to H.
        causal: mask keys that come after the query.
        sdpa: compute the attention by PyTorch's ``scaled_dot_product_attention``, which can be traced fused.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        dropout: float = 0.1,
        fused: bool = True,
        causal: bool = False,
        sdpa: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.sdpa = sdpa
        if fused:
            self.qkv = nn.Linear(hidden, 3 * hidden)
        else:
            self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.fused = fused
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, L, H)`` → ``(B, L, H)``."""
        batch, length, hidden = x.shape
        depth = hidden // self.heads
        parts = self.qkv(x).chunk(3, dim=-1) if self.fused else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(batch, length, self.heads, depth).transpose(1, 2) for part in parts)
        if self.sdpa:
            context = _attend(q, k, v, self.dropout if self.training else 0.0, causal=self.causal)
            return F.dropout(self.output(context), self.dropout, self.training)
        scores = q @ k.transpose(-2, -1) / math.sqrt(depth)
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        context = (weights @ v).transpose(1, 2).reshape(batch, length, hidden)
        return F.dropout(self.output(context), self.dropout, self.training)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, *, causal: bool) -> torch.Tensor:
    """The context, heads merged: ``(B, L, H)``."""
    context = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return context.transpose(1, 2).flatten(2)


class AttentionCore(nn.Module):
    """What lies between the projections: scores, softmax, dropout and context of a fused QKV tensor."""

    def __init__(self, heads: int, *, dropout: float = 0.1, sdpa: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.sdpa = sdpa

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """``(B, L, 3H)`` → ``(B, L, H)``."""
        batch, length, width = qkv.shape
        depth = width // 3 // self.heads
        q, k, v = (part.view(batch, length, self.heads, depth).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if self.sdpa:
            return _attend(q, k, v, self.dropout if self.training else 0.0, causal=False)
        scores = q @ k.transpose(-2, -1) / math.sqrt(depth)
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width // 3)


def build_attention(
    batch: int,
    heads: int,
    length: int,
    hidden: int,
    *,
    dtype: str = "float32",
    dropout: float = 0.1,
    fused: bool = True,
    causal: bool = False,
    sdpa: bool = False,
    device: str = "meta",
) -> tuple[SelfAttention, torch.Tensor]:
    """The module and an input of shape ``(batch, length, hidden)`` that requires a gradient, on ``device``.

    Raises:
        ShapeError: a size is not positive, ``hidden`` not divisible by ``heads``, the dtype unknown, ….
    """
    for name, size in (("B", batch), ("N", heads), ("L", length), ("H", hidden)):
        if size < 1:
            raise ShapeError(name, size, "it must be at least 1")
        if size > 1 << 31:
            raise ShapeError(name, size, "it is beyond any real shape")
    if hidden % heads:
        raise ShapeError("H", hidden, f"it must be divisible by N={heads}")
    if not 0.0 <= dropout < 1.0:
        raise ShapeError("dropout", dropout, "it must be at least 0 and below 1")
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ShapeError("dtype", dtype, "use float16, bfloat16, float32 or float64")
    kind = getattr(torch, dtype)
    with torch.device(device):
        module = SelfAttention(hidden, heads, dropout=dropout, fused=fused, causal=causal, sdpa=sdpa).to(kind)
        x = torch.randn(batch, length, hidden, dtype=torch.float32).to(kind)
    return module, x.requires_grad_()
