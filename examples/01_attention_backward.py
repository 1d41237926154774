"""Plan the backward pass of self-attention, run it out of one block of memory, and compare with autograd."""

from __future__ import annotations

import math

import torch
from torch import nn

from planner import plan, trace
from runtime import ArenaRuntime


class SelfAttention(nn.Module):
    """Self-attention with a fused QKV projection, and dropout on the attention matrix and on the output."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(hidden // self.heads)
        context = self.dropout(scores.softmax(dim=-1)) @ v
        return self.dropout(self.out(context.transpose(1, 2).reshape(batch, length, hidden)))


def main() -> None:
    torch.manual_seed(0)
    module = SelfAttention(hidden=64, heads=4, dropout=0.1)
    x = torch.randn(2, 32, 64, requires_grad=True)
    grad_output = torch.randn(2, 32, 64)

    graph = trace(module, (x,), mode="backward")
    planned = plan(graph)
    print(planned.offset_map())

    # The forward runs eagerly and hands over what the backward needs.
    torch.manual_seed(1)
    _, saved = graph.forward(x)
    run = ArenaRuntime(planned, device="cpu")
    gradients = run(*saved, grad_output)

    # Autograd over the same forward, with the same dropout masks.
    torch.manual_seed(1)
    module(x).backward(grad_output)
    expected = {"input.0": x.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).abs().max().item()
        print(f"{name:<12} largest difference from autograd {difference:.1e}")
        if difference > 1e-5:
            raise SystemExit(f"{name} differs from autograd")
    print(f"arena {planned.arena_nbytes:,} bytes, of which the pass adds {planned.extra_nbytes:,}")


if __name__ == "__main__":
    main()
