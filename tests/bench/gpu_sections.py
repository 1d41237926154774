"""What `gpu.py` measures: each section is a function of the settings, the device, and what keeps partial results."""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

from planner import plan, trace
from planner.graph import Role
from runtime import ArenaRuntime, TrainingStep
from runtime.attention import build_attention
from runtime.measure import allocations

ROOT = Path(__file__).resolve().parents[2]
#: Keeps what a section has measured so far.
Keep = Callable[[Any], None]


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
        model: vocabulary, width, blocks, heads, length and rows of the training step's batch.
    """

    device: str
    shapes: tuple[tuple[int, int, int, int], ...]
    dtype: str
    parameters: int
    rounds: int
    inductor: bool
    model: tuple[int, int, int, int, int, int]

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype)


FULL = Settings(
    "cuda",
    ((8, 16, 512, 1024), (8, 16, 1024, 1024), (2, 16, 4096, 1024)),
    "float16",
    100_000_000,
    20,
    True,
    (8192, 768, 4, 12, 512, 8),
)
SMOKE = Settings("cpu", ((1, 2, 16, 16),), "float32", 5_000, 1, False, (32, 16, 1, 2, 8, 2))


class Device:
    """Clock and counters of the device."""

    def __init__(self, settings: Settings) -> None:
        self.cuda = settings.device == "cuda"
        self.name = torch.cuda.get_device_name() if self.cuda else None

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


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph; it must have run before. Capturing runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def tests(settings: Settings, _: Device, keep: Keep) -> dict[str, Any]:
    """The tests marked ``gpu``, with Triton's interpreter off; warnings of new versions are no failures."""
    if settings.device != "cuda":
        return {"skipped": "no CUDA device"}
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]
        child = subprocess.Popen(
            [*command, "--tb=short", "--maxfail=15", "tests/kernels"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        while child.poll() is None:  # what it said so far is kept, should the section run out of time
            time.sleep(1)
            keep({"exit_code": None, "summary": _tail(output)})
        return {"exit_code": child.returncode, "summary": _tail(output)}


def _tail(output: Any) -> list[str]:
    output.seek(0)
    return output.read().strip().splitlines()[-60:]


def attention(settings: Settings, device: Device, keep: Keep) -> list[dict[str, Any]]:
    """The backward pass alone, on what its forward left, of every shape."""
    cases: list[dict[str, Any]] = []
    for shape in settings.shapes:
        cases.append(_attention_case(settings, device, shape))
        keep(cases)
    return cases


def _attention_case(settings: Settings, device: Device, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"dtype": settings.dtype, "dropout": 0.1, "device": settings.device}
    module, x = build_attention(*shape, **options)
    sdpa, _ = build_attention(*shape, sdpa=True, **options)
    sdpa.load_state_dict(module.state_dict())
    incoming = torch.randn(x.shape, device=settings.device).to(settings.kind)
    contenders = {"eager": _autograd(module, x, incoming), "sdpa": _autograd(sdpa, x, incoming)}
    plans, errors = {}, {}
    for name, owner, strategy, traced in (
        ("ours_materialized", module, "materialized", "math"),
        ("ours_fused", sdpa, "fused", "fused"),
    ):
        try:
            run, saved, plans[name] = _planned(settings, owner, x, strategy, traced)
            contenders[name] = _loaded(run, (*saved, incoming), run.execute)
            if device.cuda:
                contenders[name]()()  # compiles kernels
                contenders[f"{name}_replayed"] = _loaded(run, (*saved, incoming), captured(run.execute))
        except Exception as error:  # noqa: BLE001 - the other contenders are worth their measurement
            contenders.pop(name, None)
            errors[name] = f"{type(error).__name__}: {error}"
    if settings.inductor:
        try:
            contenders["inductor"] = _autograd(torch.compile(module), x, incoming, module)
            contenders["inductor"]()()
        except Exception as error:  # noqa: BLE001 - as above
            contenders.pop("inductor", None)
            errors["inductor"] = f"{type(error).__name__}: {error}"
    measured = interleaved(device, contenders, settings.rounds)
    eager = measured["seconds"]["eager"]
    return {
        "name": "attention backward B={} N={} L={} H={}".format(*shape),
        **measured,
        "ratio_to_eager": {name: value / eager for name, value in measured["seconds"].items()},
        "memory": {name: device.memory(prepare()) for name, prepare in contenders.items()},
        "plans": plans,
        "errors": errors,
    }


def _loaded(
    run: ArenaRuntime, inputs: tuple[torch.Tensor, ...], call: Callable[[], object]
) -> Callable[[], Callable[[], object]]:
    """Prepare a call by loading what it consumes."""

    def prepare() -> Callable[[], object]:
        run.load(*inputs)
        return call

    return prepare


def _planned(
    settings: Settings, module: nn.Module, x: torch.Tensor, strategy: str, traced: str
) -> tuple[ArenaRuntime, tuple[torch.Tensor, ...], dict[str, Any]]:
    graph = trace(module, (x,), mode="backward", attention=traced)
    made = plan(graph, strategy=strategy, time_limit=5)
    run = ArenaRuntime(made, device=settings.device, kernels="auto")
    if graph.forward is None:
        raise ValueError("the graph was not traced in this process")
    _, saved = graph.forward(x)
    gradients = sum(item.nbytes for item in made.graph.storages if item.role is Role.PARAMETER_GRADIENT)
    facts = {
        "arena_bytes": made.arena_nbytes,
        "extra_bytes": made.extra_nbytes,
        "parameter_gradient_bytes": gradients,
        "operations": len(made.graph.operations),
        "launches": len(run._program),
    }
    return run, tuple(saved), facts


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


def update(settings: Settings, device: Device, _: Keep) -> dict[str, Any]:
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


class Decoder(nn.Module):
    """A GPT without biases of its own: embeddings, blocks of causal attention and GELU, a head."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        x = self.tokens(tokens) + self.positions
        for index, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            parts = qkv(self.norms[2 * index](x)).chunk(3, dim=-1)
            q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(self.norms[2 * index + 1](x))))
        return self.head(self.norms[-1](x))


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def step(settings: Settings, device: Device, keep: Keep) -> dict[str, Any]:
    """Training in FP16 with loss scaling, clipping and AdamW: planned, replayed, and eager under autocast."""
    from runtime.optimizer import FusedAdamW

    *sizes, rows = settings.model
    vocabulary, length = settings.model[0], settings.model[4]
    torch.manual_seed(0)
    model = Decoder(*sizes).to(settings.device)
    wide = copy.deepcopy(model)
    text = torch.randint(0, vocabulary, (rows, length + 1), device=settings.device)
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    options = {"precision": "fp16", "attention": "fused", "device": settings.device}
    begun = time.perf_counter()
    planned = TrainingStep(model, _loss, batch, optimizer=optimizer, cuda_graph=device.cuda, **options)
    report: dict[str, Any] = {"plan_seconds": time.perf_counter() - begun, "arena_bytes": planned.plan.arena_nbytes}
    report["unplanned"] = [[entry.operator, entry.nbytes] for entry in planned.plan.unplanned]
    run = planned._run(batch)
    replay, run._graph = run._graph, None
    keep(report)

    scaler = torch.amp.GradScaler(settings.device)
    reference = torch.optim.AdamW(wide.parameters(), lr=1e-3, fused=True)

    def eager() -> torch.Tensor:
        with torch.autocast(settings.device, dtype=torch.float16):
            loss = _loss(wide(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(reference)
        torch.nn.utils.clip_grad_norm_(wide.parameters(), 1.0)
        scaler.step(reference)
        scaler.update()
        reference.zero_grad(set_to_none=True)
        return loss.detach()

    calls = {"ours": lambda: planned(batch), "eager": eager}
    losses: dict[str, list[float]] = {name: [call().item() for _ in range(5)] for name, call in calls.items()}
    report |= {"losses": losses, "scale": planned.scaler.get_scale(), "skipped": optimizer.skipped_steps}
    report["waits"] = _waits(device, calls["ours"])
    report["memory"] = {name: device.memory(call) for name, call in calls.items()}
    measured = interleaved(device, {name: _plain(call) for name, call in calls.items()}, settings.rounds)
    keep(report | measured)
    if device.cuda:
        run._graph = replay
        for _ in range(2):  # once plain, once captured
            planned(batch)
        report["replayed"] = {
            "waits": _waits(device, calls["ours"]),
            "memory": device.memory(calls["ours"]),
            **interleaved(device, {"ours_replayed": _plain(calls["ours"])}, settings.rounds),
            "learning_rate_takes_effect": _stands_still(planned, optimizer, batch),
        }
    return report | measured


def _plain(call: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    return lambda: call


def _waits(device: Device, call: Callable[[], object]) -> str | None:
    """What PyTorch says if one of three calls waits for the device; ``None`` if none does, or without a device."""
    if not device.cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            call()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _stands_still(planned: TrainingStep, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> bool:
    """Whether a step at a learning rate of zero changes no parameter, and the next at the old one does."""
    (group,) = optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0
    before = [parameter.detach().clone() for parameter in planned.model.parameters()]
    planned(batch)
    still = all(torch.equal(one, two) for one, two in zip(before, planned.model.parameters(), strict=True))
    group["lr"] = rate
    planned(batch)
    return still and not all(torch.equal(one, two) for one, two in zip(before, planned.model.parameters(), strict=True))


def replay(settings: Settings, device: Device, _: Keep) -> dict[str, Any]:
    """Forward and backward of one block, planned: launched one by one, and replayed as a CUDA graph."""
    shape = settings.shapes[0]
    module, x = build_attention(*shape, dtype=settings.dtype, dropout=0.0, device=settings.device)
    incoming = torch.randn(x.shape, device=settings.device).to(settings.kind)
    made = plan(trace(module, (x,), mode="joint"), strategy="materialized", time_limit=5)
    run = ArenaRuntime(made, device=settings.device)
    run(x, incoming)
    expected = [item.clone() for item in run.results()[1].values() if item is not None]

    contenders = {"launched": _loaded(run, (x, incoming), run.execute)}
    if device.cuda:
        contenders["replayed"] = _loaded(run, (x, incoming), captured(run.execute))
    measured = interleaved(device, contenders, settings.rounds)
    results = [item for item in run.results()[1].values() if item is not None]
    return {
        **measured,
        "same_results": all(torch.equal(one, two) for one, two in zip(results, expected, strict=True)),
        "memory": {name: device.memory(prepare()) for name, prepare in contenders.items()},
        **({} if device.cuda else {"skipped": "replay needs a CUDA device"}),
    }


Section = Callable[[Settings, Device, Keep], Any]
