"""Measure on a CUDA device, in under eight minutes, and write one JSON file.

``python tests/bench/gpu.py --out gpu.json`` runs the tests marked ``gpu``; the attention backward, materialised and
fused, beside eager, SDPA and Inductor; the fused update beside torch's and the bandwidth of memory; counts peak memory
and allocator calls; and replays a planned step as a CUDA graph. A section that fails leaves its error in the file and
the others run. With ``--smoke`` the same code runs on small tensors on a CPU, to show that it works; its numbers say
nothing about a GPU, and the file says so. Needs torch 2.11 or newer, Triton 3.6 or newer, and the project installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner import plan, trace
from planner.graph import Role
from runtime import ArenaRuntime
from runtime.attention import build_attention
from runtime.bench.environment import environment
from runtime.measure import allocations

ROOT = Path(__file__).resolve().parents[2]
#: Seconds the whole may take, and those kept for the sections after the tests.
LIMIT_SECONDS, TESTS_SECONDS = 470, 170


@dataclass(frozen=True)
class Settings:
    """Where and how much.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` for a smoke run.
        shapes: (B, N, L, H) of the attention.
        dtype: of the attention and the parameters updated.
        parameters: elements the update works on.
        rounds: timed, after two that warm up.
        inductor: whether to compile a contender with Inductor.
    """

    device: str
    shapes: tuple[tuple[int, int, int, int], ...]
    dtype: str
    parameters: int
    rounds: int
    inductor: bool

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)


FULL = Settings(
    "cuda", ((8, 16, 512, 1024), (8, 16, 1024, 1024), (2, 16, 4096, 1024)), "float16", 100_000_000, 20, True
)
SMOKE = Settings("cpu", ((1, 2, 16, 16),), "float32", 5_000, 1, False)


class Device:
    """Clock and counters of the device."""

    def __init__(self, settings: Settings) -> None:
        self.cuda = settings.device == "cuda"

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call, by the device's own events."""
        if not self.cuda:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def memory(self, call: Callable[[], object]) -> dict[str, int]:
        """Allocator calls of one call, and the most bytes it held above its start."""
        if not self.cuda:
            found = allocations(call)
            return {"allocator_calls": found.calls, "peak_bytes": found.peak_nbytes}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        kept = call()
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        del kept
        name = "allocation.all.allocated"
        return {
            "allocator_calls": after[name] - before[name],
            "peak_bytes": after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
        }


def interleaved(
    device: Device, contenders: dict[str, Callable[[], Callable[[], object]]], rounds: int
) -> dict[str, Any]:
    """Median seconds of contenders that take turns; each is prepared anew, and only what it returns is timed."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, prepare in contenders.items():
            taken = device.seconds(prepare())
            if number >= 2:
                seconds[name].append(taken)
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
    }


def tests(settings: Settings, _: Device) -> dict[str, Any]:
    """The tests marked ``gpu``, in a process with Triton's interpreter off."""
    if settings.device != "cuda":
        return {"skipped": "no CUDA device"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=TESTS_SECONDS,
        check=False,
    )
    return {"exit_code": done.returncode, "summary": done.stdout.strip().splitlines()[-12:]}


def attention(settings: Settings, device: Device) -> list[dict[str, Any]]:
    """The backward pass alone, on what its forward left, of every shape."""
    return [_attention_case(settings, device, shape) for shape in settings.shapes]


def _attention_case(settings: Settings, device: Device, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"dtype": settings.dtype, "dropout": 0.1, "device": settings.device}
    module, x = build_attention(*shape, **options)
    sdpa, _ = build_attention(*shape, sdpa=True, **options)
    sdpa.load_state_dict(module.state_dict())
    incoming = torch.randn(x.shape, device=settings.device).to(settings.kind)
    planned = {
        "ours_materialized": _planned(settings, module, x, incoming, "materialized", "math"),
        "ours_fused": _planned(settings, sdpa, x, incoming, "fused", "fused"),
    }
    contenders = {name: prepare for name, (prepare, _) in planned.items()}
    contenders["eager"] = _autograd(module, x, incoming)
    contenders["sdpa"] = _autograd(sdpa, x, incoming)
    if settings.inductor:
        contenders["inductor"] = _autograd(torch.compile(module), x, incoming, module)
    measured = interleaved(device, contenders, settings.rounds)
    ours = measured["seconds"]["ours_materialized"]
    return {
        "name": "attention backward B={} N={} L={} H={}".format(*shape),
        **measured,
        "ratio": {name: ours / value for name, value in measured["seconds"].items()},
        "memory": {name: device.memory(prepare()) for name, prepare in contenders.items()},
        "plans": {name: facts for name, (_, facts) in planned.items()},
    }


def _planned(
    settings: Settings, module: nn.Module, x: torch.Tensor, incoming: torch.Tensor, strategy: str, traced: str
) -> tuple[Callable[[], Callable[[], object]], dict[str, Any]]:
    graph = trace(module, (x,), mode="backward", attention=traced)
    made = plan(graph, strategy=strategy, time_limit=5)
    run = ArenaRuntime(made, device=settings.device, kernels="auto")
    if graph.forward is None:
        raise ValueError("the graph was not traced in this process")
    _, saved = graph.forward(x)

    def prepare() -> Callable[[], object]:
        run.load(*saved, incoming)
        return run.execute

    gradients = sum(item.nbytes for item in made.graph.storages if item.role is Role.PARAMETER_GRADIENT)
    facts = {
        "arena_bytes": made.arena_nbytes,
        "extra_bytes": made.extra_nbytes,
        "parameter_gradient_bytes": gradients,
        "operations": len(made.graph.operations),
        "launches": len(run._program),
    }
    return prepare, facts


def _autograd(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    incoming: torch.Tensor,
    module: nn.Module | None = None,
) -> Callable[[], Callable[[], object]]:
    owner = module if module is not None else function
    targets = [x, *owner.parameters()] if isinstance(owner, nn.Module) else [x]

    def prepare() -> Callable[[], object]:
        y = function(x)
        return lambda: torch.autograd.grad(y, targets, incoming)

    return prepare


def update(settings: Settings, device: Device) -> dict[str, Any]:
    """The fused update of 16-bit parameters (float32 in a smoke run) beside torch's, and beside copying the bytes."""
    from runtime.optimizer import FusedAdamW

    def parameters(kind: torch.dtype) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        each = settings.parameters // 10
        made = [torch.randn(each, generator=generator).to(settings.device, kind) for _ in range(10)]
        return [nn.Parameter(item) for item in made]

    ours, narrow, master = parameters(settings.kind), parameters(settings.kind), parameters(torch.float32)
    for group in (ours, narrow):
        for item in group:
            item.grad = torch.full_like(item, 1e-3)
    for item in master:
        item.grad = torch.full_like(item, 1e-3)
    fused = FusedAdamW(ours, lr=1e-4, master="split" if settings.kind != torch.float32 else "none")
    theirs = torch.optim.AdamW(master, lr=1e-4, fused=True)

    def torch_fused() -> None:
        for wide, item in zip(master, narrow, strict=True):
            wide.grad.copy_(item.grad)
        theirs.step()
        with torch.no_grad():
            for wide, item in zip(master, narrow, strict=True):
                item.copy_(wide)

    # Read and written by ours: a parameter of 32 bits (in two halves or whole), two moments; the gradient is read.
    nbytes = settings.parameters * (2 * 4 + 2 * 8 + settings.kind.itemsize)
    block = torch.zeros(nbytes // 2 // 4, device=settings.device)
    contenders = {
        "ours": lambda: fused.step,
        "torch_fused": lambda: torch_fused,
        "limit": lambda: lambda: block.add_(1.0),
    }
    measured = interleaved(device, contenders, settings.rounds)
    ours_seconds = measured["seconds"]["ours"]
    return {
        "name": f"AdamW, {settings.parameters} parameters",
        **measured,
        "ratio": {name: ours_seconds / value for name, value in measured["seconds"].items()},
        "memory": {name: device.memory(prepare()) for name, prepare in contenders.items()},
        "moved_bytes": nbytes,
    }


def replay(settings: Settings, device: Device) -> dict[str, Any]:
    """Forward and backward of one block, planned: launched one by one, and replayed as a CUDA graph."""
    shape = settings.shapes[0]
    module, x = build_attention(*shape, dtype=settings.dtype, dropout=0.0, device=settings.device)
    incoming = torch.randn(x.shape, device=settings.device).to(settings.kind)
    made = plan(trace(module, (x,), mode="joint"), strategy="materialized", time_limit=5)
    run = ArenaRuntime(made, device=settings.device)
    run(x, incoming)
    expected = [item.clone() for item in run.results()[1].values() if item is not None]

    def loaded(call: Callable[[], object]) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            run.load(x, incoming)
            return call

        return prepare

    contenders = {"launched": loaded(run.execute)}
    if device.cuda:
        graph = torch.cuda.CUDAGraph()
        run.load(x, incoming)
        with torch.cuda.graph(graph):
            run.execute()
        contenders["replayed"] = loaded(graph.replay)
    measured = interleaved(device, contenders, settings.rounds)
    results = [item for item in run.results()[1].values() if item is not None]
    return {
        **measured,
        "same_results": all(torch.equal(one, two) for one, two in zip(results, expected, strict=True)),
        "memory": {name: device.memory(prepare()) for name, prepare in contenders.items()},
        **({} if device.cuda else {"skipped": "replay needs a CUDA device"}),
    }


SECTIONS: dict[str, Callable[[Settings, Device], Any]] = {
    "tests": tests,
    "attention": attention,
    "update": update,
    "replay": replay,
}


def measure(settings: Settings, only: list[str] | None = None) -> dict[str, Any]:
    """Every section's figures; one that fails says why, and one that would come too late is left out."""
    started = time.perf_counter()
    device = Device(settings)
    report: dict[str, Any] = {
        "smoke": settings.device != "cuda",
        "environment": environment(
            ("torch", "triton", "numpy"),
            device=torch.cuda.get_device_name() if device.cuda else None,
            cuda=torch.version.cuda,
            rounds=settings.rounds,
            dtype=settings.dtype,
        ),
    }
    if report["smoke"]:
        report["note"] = "A smoke run on a CPU with tiny tensors: it shows that the script works, and measures nothing."
    for name, section in SECTIONS.items():
        if only and name not in only:
            continue
        begun = time.perf_counter()
        if device.cuda and begun - started > LIMIT_SECONDS - 60:
            report[name] = {"skipped": "no time left"}
            continue
        try:
            report[name] = section(settings, device)
        except Exception as error:  # noqa: BLE001 - a borrowed device's minutes are not spent twice for one section
            report[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-4000:]}
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    report["total_seconds"] = time.perf_counter() - started
    return report


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the file; 1 if any section failed, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny tensors on a CPU")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="this section (repeatable)")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device: use --smoke to try the script on a CPU", file=sys.stderr)
        return 2
    report = measure(SMOKE if options.smoke else FULL, options.only)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [name for name in SECTIONS if isinstance(report.get(name), dict) and "error" in report[name]]
    failed += ["tests"] if report.get("tests", {}).get("exit_code") else []
    for name in failed:
        print(f"{name} failed: see {options.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
