"""A GPT of a few thousand parameters on a text of its own, for tests that train."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

VOCABULARY, LENGTH, ROWS = 32, 16, 4


class Block(nn.Module):
    """Pre-norm causal self-attention and a GELU network."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        depth = hidden // self.heads
        q, k, v = (
            part.view(batch, length, self.heads, depth).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(depth)).masked_fill(future, -math.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Embeddings, two blocks, and a head tied to the token embedding."""

    def __init__(self, seed: int = 0, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(LENGTH, hidden)
        self.blocks = nn.Sequential(Block(hidden, 2), Block(hidden, 2))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting up in strides of 1 to 3 from anywhere: there is something to learn, and every step has its own text."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    text = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
