"""The GPU script's branches for a device, gone through on a CPU with stand-ins for `torch.cuda`.

The stand-ins take arguments as torch's own do (their signatures are compared), and a captured graph keeps programs that
it runs when replayed, and nothing while it is captured.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import plan, trace
from runtime import ArenaRuntime, TrainingStep
from runtime.attention import build_attention
from runtime.errors import ArenaError
from runtime.executor import _Replay
from runtime.optimizer import FusedAdamW
from tests.planned_helpers import data, loss32, net

REAL_RUN = ArenaRuntime.run_program
CALLS: Counter[str] = Counter()


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        assert enable_timing
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        CALLS["time"] += 1
        self.at = CALLS["time"]

    def elapsed_time(self, end_event: Event) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return float(end_event.at - self.at)


class CUDAGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self.kept: list[ArenaRuntime] = []

    def replay(self) -> None:
        assert self.kept, "a graph that captured nothing"
        CALLS["replay"] += 1
        for run in self.kept:
            REAL_RUN(run)


class Capture:
    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None) -> None:
        self.graph = cuda_graph

    def __enter__(self) -> None:
        CALLS["capture"] += 1
        kept = self.graph.kept
        ArenaRuntime.run_program = lambda run, workers=1: kept.append(run)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        ArenaRuntime.run_program = REAL_RUN  # type: ignore[method-assign]


def _stats(device: Any = None) -> dict[str, int]:
    return {"allocation.all.allocated": 7, "allocated_bytes.all.peak": 9, "allocated_bytes.all.current": 5}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    CALLS.clear()
    real = ArenaRuntime.__init__

    def made(run: ArenaRuntime, *arguments: Any, cuda_graph: bool = False, **keywords: Any) -> None:
        real(run, *arguments, **keywords)
        run._graph = _Replay(run) if cuda_graph else None

    monkeypatch.setattr(ArenaRuntime, "__init__", made)
    for name, stand_in in {
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": Capture,
        "memory_stats": _stats,
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_sync_debug_mode": lambda debug_mode: CALLS.update([f"sync {debug_mode}"]),
        "get_device_name": lambda device=None: "a stand-in",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return CALLS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("gpu_sections")


def _as_cuda(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that takes itself for a CUDA one, its tensors on a CPU."""
    device = script.Device(replace(script.SMOKE, device="cuda"))
    monkeypatch.setattr(script, "SMOKE", replace(script.SMOKE, rounds=1))
    return device


@pytest.mark.parametrize(
    ("real", "stand_in"),
    [
        (torch.cuda.Event.__new__, Event.__init__),
        (torch.cuda.CUDAGraph.__new__, CUDAGraph.__init__),
        (torch.cuda.graph.__init__, Capture.__init__),
        (torch.cuda.memory_stats, _stats),
    ],
)
def test_stand_ins_take_what_torchs_own_take(real: Any, stand_in: Any) -> None:
    theirs, ours = (list(inspect.signature(function).parameters)[1:] for function in (real, stand_in))
    assert theirs[: len(ours)] == ours


def test_every_section_goes_through_its_branches_for_a_device(script, cuda, monkeypatch) -> None:
    device = _as_cuda(script, monkeypatch)
    kept: list[Any] = []
    (case,) = script.attention(script.SMOKE, device, kept.append)
    assert case["errors"] == {}
    assert {"ours_materialized_replayed", "ours_fused_replayed"} < set(case["seconds"])
    assert case["memory"]["ours_fused"] == {"allocator_calls": 0, "peak_bytes": 4}
    assert kept
    assert set(script.update(script.SMOKE, device, kept.append)["seconds"]) == {"ours", "torch_fused", "limit"}
    cuda.clear()
    found = script.step(script.SMOKE, device, kept.append)
    assert found["waits"] is None
    assert (cuda["sync error"], cuda["sync default"], cuda["capture"]) == (2, 2, 1)
    assert found["replayed"]["learning_rate_takes_effect"] is True
    assert cuda["replay"] > 5
    replayed = script.replay(script.SMOKE, device, kept.append)
    assert replayed["same_results"] is True
    assert set(replayed["seconds"]) == {"launched", "replayed"}


def test_a_step_that_waits_is_told(script, cuda, monkeypatch) -> None:
    device = _as_cuda(script, monkeypatch)

    def waits() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    assert "synchronizing" in script._waits(device, waits)
    assert cuda["sync default"] == 1


def test_a_runtime_is_captured_once_and_replayed(cuda) -> None:
    module, x = build_attention(1, 2, 8, 16, dropout=0.0, device="cpu")
    made = plan(trace(module, (x,), mode="joint"), time_limit=1)
    run, plain = ArenaRuntime(made, cuda_graph=True), ArenaRuntime(made)
    for number in range(4):
        torch.manual_seed(number)
        inputs = torch.randn_like(x), torch.randn_like(x)
        ours, theirs = run(*inputs), plain(*inputs)
        assert torch.equal(ours[0], theirs[0])
        assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
        assert (cuda["capture"], cuda["replay"]) == (min(number, 1), number)


def test_a_training_step_captures_each_shape(cuda) -> None:
    ends = []
    for cuda_graph in (True, False):
        model = net()
        optimizer = FusedAdamW(model.parameters(), lr=0.01)
        step = TrainingStep(model, loss32, data(0), optimizer=optimizer, precision="fp16", cuda_graph=cuda_graph)
        losses = [step(data(number, rows)).item() for number, rows in enumerate((8, 8, 8, 3, 3, 8, 3))]
        ends.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(one, two) for one, two in zip(ends[0][1], ends[1][1], strict=True))
    assert (cuda["capture"], cuda["replay"]) == (2, 5)


def test_a_graph_needs_a_device() -> None:
    module, x = build_attention(1, 2, 8, 16, dropout=0.0, device="cpu")
    with pytest.raises(ArenaError, match="device='cuda'"):
        ArenaRuntime(plan(trace(module, (x,), mode="joint"), time_limit=1), cuda_graph=True)


def test_the_fused_attention_is_there_for_tensors_of_a_device() -> None:
    """What ``graph.forward`` of a traced backward calls, on whatever device its inputs lie."""
    importlib.import_module("runtime.kernels.attention_eager")
    for name in ("arenaplan::attention", "arenaplan::attention_backward"):
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
