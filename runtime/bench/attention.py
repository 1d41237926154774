"""The planned attention backward against PyTorch eager's and Inductor's: seconds and bytes, interleaved in one process.

The block is measured whole and without its projections, whose products all contenders share (the core).
Timed is the backward pass alone, on what its forward left: eager and Inductor hold their saved activations, ours has
them in the arena (as a planned forward leaves them; copying them in is reported as ``ours_with_copy_in``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.graph import Graph, Role
from planner.pipeline import plan
from planner.plan import Plan
from planner.trace import trace
from runtime.attention import AttentionCore, build_attention
from runtime.bench.environment import environment
from runtime.executor import ArenaRuntime
from runtime.measure import Allocations, allocations

#: (B, N, L, H) of the cases.
SHAPES = ((4, 8, 512, 512), (8, 12, 256, 768), (1, 16, 2048, 1024))


@dataclass(frozen=True, slots=True)
class _Case:
    """One shape with everything that runs it."""

    module: nn.Module
    compiled: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    incoming: torch.Tensor
    graph: Graph
    plan: Plan
    run: ArenaRuntime

    @property
    def targets(self) -> list[torch.Tensor]:
        return [self.x, *self.module.parameters()]


def bench_attention(
    shapes: tuple[tuple[int, int, int, int], ...] = SHAPES,
    *,
    rounds: int = 15,
    threads: int = 2,
    dropout: float = 0.1,
    strategy: str = "sliced",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Median seconds, peak bytes and ratios for each shape; float32, both sides on ``threads`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = []
        for shape in shapes:
            if progress is not None:
                progress(f"B, N, L, H = {shape}: compiling, then {rounds} interleaved rounds")
            cases.append(_measure(shape, rounds, dropout, strategy, core=False))
            cases.append(_measure(shape, rounds, dropout, strategy, core=True))
    finally:
        torch.set_num_threads(before)
    packages = ("torch", "numpy", "networkx")
    settings = environment(packages, threads=threads, rounds=rounds, dropout=dropout, dtype="float32")
    return {"cases": cases, "environment": settings}


def _measure(
    shape: tuple[int, int, int, int], rounds: int, dropout: float, strategy: str, *, core: bool
) -> dict[str, Any]:
    case = _prepare(shape, dropout, strategy, core=core)
    seconds: dict[str, list[float]] = {"ours": [], "ours_with_copy_in": [], "eager": [], "inductor": []}
    for round_number in range(rounds + 2):
        timed = {
            **_ours(case),
            "eager": _autograd(case, case.module),
            "inductor": _autograd(case, case.compiled),
        }
        if round_number >= 2:  # the first rounds warm caches and finish compilation
            for name, value in timed.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    eager, inductor = _autograd_memory(case, case.module), _autograd_memory(case, case.compiled)
    gradients = sum(s.nbytes for s in case.plan.graph.storages if s.role is Role.PARAMETER_GRADIENT)
    handed = (
        sum(s.nbytes for s in case.plan.graph.storages if s.role in (Role.SAVED, Role.GRAD_OUTPUT))
        - case.incoming.nbytes
    )
    peak = {
        "ours": case.plan.extra_nbytes + gradients,
        "eager": eager[1].peak_nbytes,
        "inductor": inductor[1].peak_nbytes,
    }
    total = {
        "ours": handed + peak["ours"],
        "eager": eager[0] + peak["eager"],
        "inductor": inductor[0] + peak["inductor"],
    }
    return {
        "name": ("attention core" if core else "attention") + " backward B={} N={} L={} H={}".format(*shape),
        "strategy": case.plan.strategy,
        "slices": case.plan.slices,
        "seconds": medians,
        "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
        "peak_bytes": peak,
        "peak_with_saved_bytes": total,
        "extra_bytes": case.plan.extra_nbytes,
        "allocator_calls": {
            "ours": allocations(lambda: case.run.execute(threads=1)).calls,
            "eager": eager[1].calls,
            "inductor": inductor[1].calls,
        },
        "ratio": {name: medians["ours"] / medians[name] for name in ("eager", "inductor")},
        "peak_ratio": {name: peak["ours"] / peak[name] for name in ("eager", "inductor")},
    }


def _prepare(shape: tuple[int, int, int, int], dropout: float, strategy: str, *, core: bool) -> _Case:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module: nn.Module
    module, x = build_attention(*shape, dropout=dropout, device="cpu")
    if core:
        batch, heads, length, hidden = shape
        module, x = AttentionCore(heads, dropout=dropout), torch.randn(batch, length, 3 * hidden, requires_grad=True)
    graph = trace(module, (x,))
    made = plan(graph, strategy=strategy)
    incoming = torch.randn(*x.shape[:2], shape[3])
    return _Case(module, torch.compile(module), x, incoming, graph, made, ArenaRuntime(made))


def _ours(case: _Case) -> dict[str, float]:
    if case.graph.forward is None:
        raise ValueError("the graph was not traced in this process")
    _, saved = case.graph.forward(case.x)
    started = time.perf_counter()
    case.run.load(*saved, case.incoming)
    loaded = time.perf_counter()
    case.run.execute()
    ended = time.perf_counter()
    return {"ours": ended - loaded, "ours_with_copy_in": ended - started}


def _autograd(case: _Case, function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    y = function(case.x)
    started = time.perf_counter()
    gradients = torch.autograd.grad(y, case.targets, case.incoming)
    seconds = time.perf_counter() - started
    del gradients
    return seconds


def _autograd_memory(case: _Case, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, Allocations]:
    """Bytes the forward leaves for the backward, and what the backward allocates."""
    kept: list[torch.Tensor] = []
    forward = allocations(lambda: kept.append(function(case.x)))
    backward = allocations(lambda: torch.autograd.grad(kept[0], case.targets, case.incoming))
    return forward.held_nbytes, backward
