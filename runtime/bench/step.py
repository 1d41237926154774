"""A whole training step, forward and backward: ours against eager and Inductor, interleaved in one process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from runtime.bench.environment import environment
from runtime.errors import ArenaError
from runtime.measure import Allocations, allocations
from runtime.training import TrainingStep

#: Layers, width, heads, vocabulary, length and batch of the models.
SIZES: Mapping[str, int] = {"layers": 4, "hidden": 256, "heads": 8, "vocabulary": 5000, "length": 256, "batch": 4}
SMOKE: Mapping[str, int] = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 50, "length": 16, "batch": 2}


def bench_step(
    *,
    models: tuple[str, ...] = ("gpt2", "bert"),
    sizes: Mapping[str, int] = SIZES,
    rounds: int = 15,
    threads: int = 2,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Median seconds and peak bytes of a float32 step of each model, from the same weights.

    Timed is forward and backward; every contender clears its gradients. ``peak_bytes`` is what the step holds above
    its start, parameter gradients included; for ours the arena less the parameters and buffers in it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = []
        for name in models:
            if progress is not None:
                progress(f"{name}: compiling, then {rounds} interleaved rounds")
            cases.append(_measure(name, sizes, rounds))
    finally:
        torch.set_num_threads(before)
    settings = environment(("torch", "transformers", "numpy"), threads=threads, rounds=rounds, **sizes)
    return {"cases": cases, "environment": settings}


def _model(name: str, sizes: Mapping[str, int]) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ArenaError("bench step needs transformers: pip install -c constraints.txt '.[test]'") from error
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=sizes["layers"],
            n_embd=sizes["hidden"],
            n_head=sizes["heads"],
            vocab_size=sizes["vocabulary"],
            n_positions=sizes["length"],
            use_cache=False,
        )
        made: nn.Module = transformers.GPT2LMHeadModel(config)
        return made
    masked_config = transformers.BertConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["hidden"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["length"],
    )
    masked: nn.Module = transformers.BertForMaskedLM(masked_config)
    return masked


def _measure(name: str, sizes: Mapping[str, int], rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    planned = _model(name, sizes).train()
    eager, inductor = copy.deepcopy(planned), copy.deepcopy(planned)
    compiled = torch.compile(inductor)
    tokens = torch.randint(0, sizes["vocabulary"], (sizes["batch"], sizes["length"]))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    step = TrainingStep(planned, None, batch)

    def ours() -> None:
        step(batch)
        planned.zero_grad(set_to_none=True)

    def peer(model: nn.Module, call: Callable[..., Any]) -> None:
        call(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    contenders: dict[str, Callable[[], None]] = {
        "ours": ours,
        "eager": lambda: peer(eager, eager),
        "inductor": lambda: peer(inductor, compiled),
    }
    seconds: dict[str, list[float]] = {key: [] for key in contenders}
    for number in range(rounds + 3):
        for key, call in contenders.items():
            started = time.perf_counter()
            call()
            if number >= 3:  # the first rounds warm caches and finish compilation
                seconds[key].append(time.perf_counter() - started)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    memory: dict[str, Allocations] = {key: allocations(call) for key, call in contenders.items()}
    held = sum(tensor.nbytes for tensor in [*planned.parameters(), *planned.buffers()])
    peak = {key: item.peak_nbytes for key, item in memory.items()} | {"ours": step.plan.arena_nbytes - held}
    return {
        "name": f"{name} step",
        "seconds": medians,
        "spread": {key: [min(values), max(values)] for key, values in seconds.items()},
        "peak_bytes": peak,
        "allocator_calls": {key: item.calls for key, item in memory.items()},
        "ratio": {key: medians["ours"] / medians[key] for key in ("eager", "inductor")},
        "peak_ratio": {key: peak["ours"] / peak[key] for key in ("eager", "inductor")},
        "plan_seconds": step.plan.plan_seconds,
    }
