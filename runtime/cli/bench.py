"""``arenaplan bench``: measured against what a user would run instead, side by side in one process."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.cli.errors import one_line_errors
from runtime.cli.options import Debug, Json, Rounds, StrategyName, Threads
from runtime.cli.output import console, print_json, progress

bench_app = typer.Typer(no_args_is_help=True, help="Measure ours and its peers, interleaved in one process.")


class _Strategy(StrEnum):
    """Strategies with an attention matrix; the fused plan is measured besides."""

    AUTO = StrategyName.AUTO.value
    MATERIALIZED = StrategyName.MATERIALIZED.value
    SLICED = StrategyName.SLICED.value
    TRACED = StrategyName.TRACED.value


@bench_app.command("attention")
def bench_attention_command(
    rounds: Rounds = 15,
    threads: Threads = 2,
    strategy: Annotated[_Strategy, typer.Option(help="Strategy of our plan.")] = _Strategy.SLICED,
    smoke: Annotated[bool, typer.Option("--smoke", help="One tiny shape, to see that it works.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The planned attention backward beside eager's and torch.compile's (Inductor)."""
    with one_line_errors(debug):
        from runtime.bench.attention import SHAPES, bench_attention

        shapes = ((2, 2, 32, 32),) if smoke else SHAPES
        report = bench_attention(shapes, rounds=rounds, threads=threads, strategy=strategy.value, progress=progress)
        show(report, as_json)


@bench_app.command("step")
def bench_step_command(
    rounds: Rounds = 15,
    threads: Threads = 2,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny models, to see that it works.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """A training step of GPT-2 and BERT through TrainingStep beside eager's and Inductor's."""
    with one_line_errors(debug):
        from runtime.bench.step import SIZES, SMOKE, bench_step

        report = bench_step(sizes=SMOKE if smoke else SIZES, rounds=rounds, threads=threads, progress=progress)
        show(report, as_json)


@bench_app.command("update")
def bench_update_command(
    rounds: Rounds = 15,
    threads: Threads = 2,
    numel: Annotated[int, typer.Option("--parameters", min=1, help="Parameters in all.")] = 25_000_000,
    smoke: Annotated[bool, typer.Option("--smoke", help="Few parameters, to see that it works.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The fused AdamW update beside torch.optim with FP32 copies, and the memory's bandwidth."""
    with one_line_errors(debug):
        from runtime.bench.update import SMOKE_NUMEL, bench_update

        numel = SMOKE_NUMEL if smoke else numel
        report = bench_update(numel=numel, rounds=rounds, threads=threads, progress=progress)
        show(report, as_json)


@bench_app.command("pack")
def bench_pack_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Problems as CSV; without any, synthetic training steps and random ones."),
    ] = None,
    rounds: Rounds = 3,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds our search may take.")] = 10.0,
    smoke: Annotated[bool, typer.Option("--smoke", help="Small synthetic problems, one round.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Packing beside omnimalloc's greedy portfolio, where that is installed."""
    with one_line_errors(debug):
        from runtime.bench.pack import BUFFERS, SMOKE_BUFFERS, bench_pack

        buffers = SMOKE_BUFFERS if smoke else () if files else BUFFERS
        limit = min(time_limit, 0.5) if smoke else time_limit
        rounds = 1 if smoke else rounds
        report = bench_pack(files or (), buffers=buffers, rounds=rounds, time_limit=limit, progress=progress)
        show(report, as_json)


def show(report: dict[str, Any], as_json: bool) -> None:
    """Print a benchmark's report."""
    if as_json:
        print_json(report)
        return
    screen = console()
    for case in report["cases"]:
        screen.print(case["name"])
        for name, seconds in case["seconds"].items():
            peak = case["peak_bytes"].get(name)
            ratio = case["ratio"].get(name)
            beside = "" if ratio is None else f"   ours/{name} = {ratio:.2f}"
            memory = "" if peak is None else f"{peak / 2**20:10.1f} MiB"
            screen.print(f"  {name:20} {seconds * 1000:9.2f} ms {memory}{beside}")
