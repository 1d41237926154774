"""A training step runs out of memory: record a snapshot, read it, plan the step, compare.

On a machine with CUDA, ``python 03_out_of_memory.py record`` limits the process to 512 MiB, records what the allocator
does, and writes ``out_of_memory.pickle``. Without it, the file that lies beside this one is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from planner import plan, trace
from planner.colouring import colour
from planner.snapshot import as_problem, device_figures, read_snapshot, replay

SNAPSHOT = Path(__file__).with_name("out_of_memory.pickle")
LIMIT_NBYTES = 2**29
MIB = 2**20


class Block(nn.Module):
    """Self-attention with its matrix in full, and a feed-forward layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (hidden // self.heads) ** -0.5).softmax(dim=-1)
        weights = functional.dropout(weights, 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def factory(device: str = "cpu") -> tuple[nn.Module, tuple[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the model, an input and the loss, as ``arenaplan plan 03_out_of_memory.py:factory`` takes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden=512, heads=8) for _ in range(3))).to(device)
    return model, (torch.randn(4, 512, 512, device=device),), lambda y: y.square().mean()


def record() -> None:
    """Train on CUDA until memory runs out (or twenty steps are done), and write what the allocator did."""
    torch.cuda.set_per_process_memory_fraction(LIMIT_NBYTES / torch.cuda.mem_get_info()[1])
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        model, (x,), loss = factory("cuda")
        for _ in range(20):
            loss(model(x)).backward()
            model.zero_grad()
    except torch.cuda.OutOfMemoryError as error:
        print(error)
    torch.cuda.memory._dump_snapshot(str(SNAPSHOT))
    torch.cuda.memory._record_memory_history(enabled=None)


def main() -> None:
    if sys.argv[1:] == ["record"]:
        record()
    snapshot = read_snapshot(SNAPSHOT)
    for device in snapshot.devices:
        history = replay(device)
        figures = device_figures(history)
        packed = colour(as_problem(history))
        print(f"device {device.device}: {figures.events:,} events")
        print(f"  peak live     {figures.peak_live_nbytes / MIB:8.1f} MiB")
        print(f"  peak reserved {figures.peak_reserved_nbytes / MIB:8.1f} MiB")
        print(f"  planned arena {packed.peak_nbytes / MIB:8.1f} MiB for the same blocks")
        for failure in history.out_of_memory:
            print(f"  out of memory at step {failure.step}: {failure.nbytes / MIB:.1f} MiB asked for")

    # The module planned from its graph: fewer bytes live at once, not only packed more closely.
    model, inputs, loss = factory("meta")
    planned = plan(trace(model, inputs, loss=loss, mode="joint"))
    print(f"the whole step, planned: {planned.arena_nbytes / MIB:.1f} MiB ({planned.strategy})")


if __name__ == "__main__":
    main()
