"""The update of 16-bit parameters: ours against two flows through torch.optim and the memory's bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runtime.bench.environment import environment
from runtime.optimizer import FusedAdamW, Precision, compiled
from runtime.pages import zeros

#: Parameters in all, and what the smoke run takes.
NUMEL, SMOKE_NUMEL = 25_000_000, 100_000
#: Tensors they are spread over, in sizes from 1 to so many parts: biases, norms and matrices of a model.
TENSORS = 64
#: Bytes written between two updates: more than the caches of a processor hold.
ELSEWHERE_NBYTES = 2**28
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A dtype of the parameters and what is kept besides."""

    dtype: torch.dtype
    master: str
    states: str

    @property
    def name(self) -> str:
        """For the report."""
        return f"AdamW {str(self.dtype).removeprefix('torch.')}, master {self.master}, states {self.states}"


CHOICES = (
    Choice(torch.float16, "split", "fp32"),
    Choice(torch.float16, "fp32", "fp32"),
    Choice(torch.float16, "stochastic", "fp32"),
    Choice(torch.float16, "none", "fp32"),
    Choice(torch.float16, "split", "8bit"),
    Choice(torch.bfloat16, "split", "fp32"),
)


def bench_update(
    *,
    choices: Sequence[Choice] = CHOICES,
    numel: int = NUMEL,
    rounds: int = 15,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Median seconds of one update of each contender, interleaved, and the bytes each holds.

    Before each update other memory is written, so that all start with the same caches.

    - ``ours``: `FusedAdamW`, with its look for overflow where the gradients are float16.
    - ``cast_copy``: parameters and gradients copied to FP32, torch.optim.AdamW with ``foreach``, copied back.
    - ``torch_fused``: FP32 masters; gradients copied to FP32, torch.optim.AdamW with ``fused``, masters copied back.
    - ``limit``: the bytes that ours writes read and written back in place, those it only reads read.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = []
        for choice in choices:
            if progress is not None:
                progress(f"{choice.name}: {rounds} interleaved rounds")
            cases.append(_measure(choice, numel, rounds))
    finally:
        torch.set_num_threads(before)
    settings = environment(
        ("torch", "numba", "numpy"), threads=threads, rounds=rounds, parameters=numel, tensors=TENSORS, device="cpu"
    )
    return {"cases": cases, "environment": settings}


def _sizes(numel: int) -> list[int]:
    """So many sizes, small and large, that add up."""
    weights = [1 + (7 * number) % TENSORS for number in range(TENSORS)]
    sizes = [numel * weight // sum(weights) for weight in weights]
    sizes[-1] += numel - sum(sizes)
    return sizes


def _measure(choice: Choice, numel: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator).to(choice.dtype) for size in _sizes(numel)]
    gradients = [(torch.randn(value.numel(), generator=generator) * 1e-2).to(choice.dtype) for value in values]
    precision = Precision(choice.master, choice.states)
    contenders = {
        "ours": _ours(choice, values, gradients),
        "cast_copy": _through_copies(values, gradients, fused=False),
        "torch_fused": _through_copies(values, gradients, fused=True),
        "limit": _limit(precision.bytes_per_parameter(choice.dtype, 2) - 2, numel),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    elsewhere = torch.zeros(ELSEWHERE_NBYTES // 4)
    for number in range(rounds + 3):
        for name, call in contenders.items():
            elsewhere.add_(1.0)  # as a backward pass does: no contender finds its own data, or a neighbour's, in caches
            started = time.perf_counter()
            call()
            if number >= 3:  # the first rounds compile and touch memory for the first time
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    held = precision.bytes_per_parameter(choice.dtype, 2)
    copies = 2 * choice.dtype.itemsize + 4 * 4  # FP32 parameter, gradient and moments beside the 16-bit ones
    return {
        "name": choice.name,
        "seconds": medians,
        "spread": {name: [min(taken), max(taken)] for name, taken in seconds.items()},
        "peak_bytes": {"ours": int(held * numel), "cast_copy": copies * numel, "torch_fused": copies * numel},
        "ratio": {name: medians["ours"] / medians[name] for name in contenders if name != "ours"},
        "share_of_limit": medians["limit"] / medians["ours"],
        "bytes_per_parameter": held,
        "kernel": "numba" if compiled.available() else "aten",
    }


def _ours(choice: Choice, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> Callable[[], None]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer = FusedAdamW(parameters, LR, BETAS, EPS, DECAY, master=choice.master, states=choice.states)
    return optimizer.step


def _through_copies(values: list[torch.Tensor], gradients: list[torch.Tensor], *, fused: bool) -> Callable[[], None]:
    parameters = [value.clone() for value in values]
    masters = [nn.Parameter(value.float()) for value in values]
    full = [torch.zeros_like(value, dtype=torch.float32) for value in values]
    written: list[torch.Tensor] = list(masters)
    for master, gradient in zip(masters, full, strict=True):
        master.grad = gradient
    choice = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(masters, LR, BETAS, EPS, DECAY, **choice)

    @torch.no_grad()
    def step() -> None:
        if not fused:
            torch._foreach_copy_(written, parameters)
        torch._foreach_copy_(full, gradients)
        optimizer.step()
        torch._foreach_copy_(parameters, written)

    return step


def _limit(rewritten: float, numel: int) -> Callable[[], None]:
    """Read and write ``rewritten`` bytes a parameter in place, and read the two bytes of its gradient."""
    block, gradient = (zeros(int(nbytes * numel) // 4, torch.float32, torch.device("cpu")) for nbytes in (rewritten, 2))
    if not compiled.available():

        def through_aten() -> None:
            block.add_(1.0)
            gradient.sum()

        return through_aten
    from runtime.optimizer.compiled import touch

    return lambda: touch(block, gradient)
