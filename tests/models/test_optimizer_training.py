"""A small GPT trained for a thousand steps with the fused update and with torch.optim."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from runtime.optimizer import AdamW8bit, FusedAdamW, LossScaler

VOCABULARY, LENGTH, WIDTH = 17, 12, 32


class Gpt(nn.Module):
    """Two causal transformer layers with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=self.places.dtype)
        h = self.norm(self.layers(self.tokens(x) + self.places, mask=mask, is_causal=True))
        return h @ self.tokens.weight.t()


def batch(step):
    """Sequences that count up by a step of their own, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def train(model, optimizer, steps, scaler=None):
    losses = []
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        tokens = batch(step)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses


def start():
    torch.manual_seed(0)
    return Gpt()


def mean(losses):
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize("steps", [150, pytest.param(1200, marks=pytest.mark.slow)])
def test_training_follows_torch_adamw_in_fp32(steps):
    model, reference, exact = start(), start(), start().double()
    first = copy.deepcopy(exact)
    options = {"lr": 3e-3, "weight_decay": 0.1}
    ours = train(model, FusedAdamW(model.parameters(), **options), steps)
    theirs = train(reference, torch.optim.AdamW(reference.parameters(), **options), steps)
    train(exact, torch.optim.AdamW(exact.parameters(), **options), steps)

    def distance(other):
        squares = sum((a.detach().double() - b.detach()).square().sum() for a, b in both(other, exact))
        moved = sum((a.detach() - b.detach()).square().sum() for a, b in both(first, exact))
        return math.sqrt(squares / moved)

    # Rounding errors grow along a run for both; ours stay as near to float64 as torch's do.
    assert distance(model) < max(2 * distance(reference), 1e-4)
    assert mean(ours) == pytest.approx(mean(theirs), rel=0.01)
    assert mean(ours) < 0.6 * ours[0]


def both(one, other):
    return zip(one.parameters(), other.parameters(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [FusedAdamW, AdamW8bit])
def test_training_in_16_bits_reaches_the_loss_of_fp32(dtype, kind):
    reference = start()
    wanted = mean(train(reference, torch.optim.AdamW(reference.parameters(), lr=3e-3), 1000))
    model = start().to(dtype)
    scaler = LossScaler(2.0**10) if dtype is torch.float16 else None
    losses = train(model, kind(model.parameters(), lr=3e-3), 1000, scaler)
    assert mean(losses) < wanted + 0.1
