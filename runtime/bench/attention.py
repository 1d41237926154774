"""The planned attention backward against PyTorch eager's and Inductor's: seconds and bytes, interleaved in one process.

*Fused* is our plan of the same block without an attention matrix, *sdpa* PyTorch's own ``scaled_dot_product_attention``
in eager mode. The block is measured whole and without its projections, whose products all contenders share (the core).
Timed is the backward pass alone, on what its forward left: eager and Inductor hold their saved activations, ours has
them in the arena (as a planned forward leaves them; copying them in is reported as ``ours_with_copy_in``).
"""

from __future__ import annotations

import copy
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
    sdpa: nn.Module
    fused: tuple[Graph, ArenaRuntime]

    def owned(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """What a contender is differentiated by."""
        module = self.sdpa if function is self.sdpa else self.module
        return [self.x, *module.parameters()]


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
    names = ("ours", "ours_with_copy_in", "fused", "fused_with_copy_in", "eager", "inductor", "sdpa")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds + 2):
        timed = {
            **_ours(case, case.graph, case.run, "ours"),
            **_ours(case, *case.fused, "fused"),
            "sdpa": _autograd(case, case.sdpa),
            "eager": _autograd(case, case.module),
            "inductor": _autograd(case, case.compiled),
        }
        if round_number >= 2:  # the first rounds warm caches and finish compilation
            for name, value in timed.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    held = {
        name: _autograd_memory(case, module)
        for name, module in (("eager", case.module), ("inductor", case.compiled), ("sdpa", case.sdpa))
    }
    peak, total = {}, {}
    for name, made in (("ours", case.plan), ("fused", case.fused[1].plan)):
        peak[name], total[name] = _planned_memory(case, made)
    for name, (left, used) in held.items():
        peak[name], total[name] = used.peak_nbytes, left + used.peak_nbytes
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
            "fused": allocations(lambda: case.fused[1].execute(threads=1)).calls,
            **{name: used.calls for name, (_, used) in held.items()},
        },
        "ratio": {name: medians["ours"] / medians[name] for name in ("eager", "inductor")},
        "fused_ratio": {name: medians["fused"] / medians[name] for name in ("eager", "inductor", "sdpa")},
        # A backward that frees as much as it allocates adds nothing to compare with.
        "peak_ratio": {name: peak["ours"] / peak[name] if peak[name] else None for name in ("eager", "inductor")},
    }


def _planned_memory(case: _Case, made: Plan) -> tuple[int, int]:
    """What a plan adds, parameter gradients included, and that with the saved activations it is handed."""
    storages = made.graph.storages
    gradients = sum(s.nbytes for s in storages if s.role is Role.PARAMETER_GRADIENT)
    handed = sum(s.nbytes for s in storages if s.role in (Role.SAVED, Role.GRAD_OUTPUT)) - case.incoming.nbytes
    return made.extra_nbytes + gradients, handed + made.extra_nbytes + gradients


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
    sdpa = copy.deepcopy(module)
    sdpa.sdpa = True
    lean = trace(sdpa, (x,), attention="fused")
    run = ArenaRuntime(plan(lean, strategy="fused"))
    return _Case(module, torch.compile(module), x, incoming, graph, made, ArenaRuntime(made), sdpa, (lean, run))


def _ours(case: _Case, graph: Graph, run: ArenaRuntime, name: str) -> dict[str, float]:
    if graph.forward is None:
        raise ValueError("the graph was not traced in this process")
    _, saved = graph.forward(case.x)
    started = time.perf_counter()
    run.load(*saved, case.incoming)
    loaded = time.perf_counter()
    run.execute()
    ended = time.perf_counter()
    return {name: ended - loaded, f"{name}_with_copy_in": ended - started}


def _autograd(case: _Case, function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    y = function(case.x)
    started = time.perf_counter()
    gradients = torch.autograd.grad(y, case.owned(function), case.incoming)
    seconds = time.perf_counter() - started
    del gradients
    return seconds


def _autograd_memory(case: _Case, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, Allocations]:
    """Bytes the forward leaves for the backward, and what the backward allocates."""
    kept: list[torch.Tensor] = []
    forward = allocations(lambda: kept.append(function(case.x)))
    kept.clear()
    backward = allocations(
        lambda: torch.autograd.grad(kept[0], case.owned(function), case.incoming),
        before=lambda: kept.append(function(case.x)),
    )
    return forward.held_nbytes, backward
