"""Train a small character-level GPT on Python's own sources through `TrainingStep`, beside the same loop in eager."""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime import TrainingStep


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a GELU network."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
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
        context = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        x = x + self.out(context.transpose(1, 2).reshape(batch, length, hidden))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class CharacterGPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the token embedding."""

    def __init__(self, vocabulary: int, length: int, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads, 0.1) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next character."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def corpus() -> torch.Tensor:
    """The first sources of the standard library, as character codes below 128."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    text = "".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources)
    return torch.tensor([ord(character) for character in text if ord(character) < 128])


def batch(text: torch.Tensor, step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pieces of the text, and the characters that follow."""
    starts = torch.randint(0, len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps, length, rows = parser.parse_args().steps, 64, 8

    torch.manual_seed(0)
    text = corpus()
    planned = CharacterGPT(128, length)
    eager = copy.deepcopy(planned)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (planned, eager)]

    step = TrainingStep(planned, loss_of, batch(text, 0, rows, length))
    made = step.plan
    print(f"arena {made.arena_nbytes / 2**20:.1f} MiB, of it {made.resident_nbytes / 2**20:.1f} MiB resident")

    for number in range(steps):
        tokens, target = batch(text, number, rows, length)
        torch.manual_seed(number)  # the same dropout masks for both
        loss = step((tokens, target))
        torch.manual_seed(number)
        reference = loss_of(eager(tokens), target)
        reference.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(loss, reference.detach(), rtol=1e-3, atol=1e-3)
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number:3d}   loss {loss.item():.4f}   eager {reference.item():.4f}")


if __name__ == "__main__":
    main()
