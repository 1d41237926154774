"""``arenaplan bench``: measured against what a user would run instead, side by side in one process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runtime.cli.errors import one_line_errors
from runtime.cli.output import console, print_json, progress

bench_app = typer.Typer(no_args_is_help=True, help="Measure ours and its peers, interleaved in one process.")


@bench_app.command("attention")
def bench_attention_command(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds a shape.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads for every contender.")] = 2,
    strategy: Annotated[str, typer.Option(help="Strategy of our plan.")] = "sliced",
    smoke: Annotated[bool, typer.Option("--smoke", help="One tiny shape, to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """The planned attention backward beside eager's and torch.compile's (Inductor)."""
    with one_line_errors(debug):
        from runtime.bench.attention import SHAPES, bench_attention

        shapes = ((2, 2, 32, 32),) if smoke else SHAPES
        report = bench_attention(shapes, rounds=rounds, threads=threads, strategy=strategy, progress=progress)
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
