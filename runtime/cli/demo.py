"""``arenaplan demo``: the main job on one self-attention backward, from the trace to an offset map to look at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from planner.files import write_whole
from planner.pipeline import plan
from planner.plan import Plan
from planner.report.html import offset_map_html
from planner.report.svg import offset_map_svg
from planner.trace import trace
from runtime.attention import build_attention
from runtime.check import Check, check_against_eager
from runtime.cli.errors import FAILED, CallError, one_line_errors, say
from runtime.cli.options import Debug, Json, require_outputs
from runtime.cli.output import console, print_json, size

BATCH, HEADS, LENGTH, HIDDEN = 4, 8, 256, 256


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the plan and the offset map.")] = Path(
        "arenaplan-demo"
    ),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Trace, plan, run and check a self-attention backward; write its plan and offset map."""
    with one_line_errors(debug):
        started = time.perf_counter()
        if out.exists() and not out.is_dir():
            raise CallError(f"--out {out}: it is a file; name a directory")
        out.mkdir(parents=True, exist_ok=True)
        require_outputs([out / name for name in ("plan.json", "offset_map.html", "offset_map.svg")])
        rows: list[tuple[str, Plan, Check]] = []
        for dropout in (0.1, 0.0):
            module, x = build_attention(BATCH, HEADS, LENGTH, HIDDEN, dropout=dropout, device="cpu")
            say(f"tracing self-attention B={BATCH} N={HEADS} L={LENGTH} H={HIDDEN}, dropout {dropout}")
            graph = trace(module, (x,))
            for strategy in ("materialized", "sliced"):
                planned = plan(graph, strategy=strategy)
                say(f"running the {strategy} plan and eager, 3 steps each")
                check = check_against_eager(module, (x,), graph, planned, steps=3, fresh_inputs=True)
                rows.append((f"{strategy}, dropout {dropout}", planned, check))
        best = rows[0][1]
        best.save(out / "plan.json")
        write_whole(out / "offset_map.html", offset_map_html(best, "Self-attention backward").encode())
        write_whole(out / "offset_map.svg", offset_map_svg(best).encode())
        passed = all(check.passed and check.allocator_calls == 0 for _, _, check in rows)
        seconds = time.perf_counter() - started
        if as_json:
            runs = [{"name": name, **planned.summary(), **check.fields()} for name, planned, check in rows]
            print_json({"runs": runs, "passed": passed, "out": str(out), "seconds": seconds})
        else:
            _print(rows, out, seconds)
        if not passed:
            say("error: a planned run differs from eager or allocates; see the table")
            raise typer.Exit(FAILED)


def _print(rows: list[tuple[str, Plan, Check]], out: Path, seconds: float) -> None:
    elements = BATCH * LENGTH * HIDDEN, BATCH * HEADS * LENGTH * LENGTH
    table = Table(title="What the backward pass adds to what it is handed", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("scheme", no_wrap=True)
    for heading in ("dropout", "adds", "arena", "error", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    for dropout, index in (("0.1", 0), ("0", 2)):
        _, planned, check = rows[index]
        table.add_row("a buffer per tensor", dropout, size(planned.naive_nbytes - planned.resident_nbytes))
        table.add_row("eager, measured", dropout, size(check.eager_peak_nbytes))
        if planned.formula is not None:
            table.add_row("LightSeq2's formula", dropout, size(planned.formula.lightseq2))
            table.add_row("target, max(S, 3X)", dropout, size(planned.formula.target))
        for _, planned, check in rows[index : index + 2]:
            name = planned.strategy if planned.slices is None else f"{planned.strategy}, {planned.slices} at a time"
            table.add_row(
                name,
                dropout,
                size(planned.extra_nbytes),
                size(planned.arena_nbytes),
                f"{check.max_rel_error:.1e}" if check.max_rel_error else "0",
                str(check.allocator_calls),
            )
        table.add_section()
    screen = console()
    screen.print(table)
    screen.print(f"X = B·L·H = {elements[0]} elements, S = B·N·L² = {elements[1]} elements, float32.")
    screen.print(
        "adds: bytes above what the pass is handed; error: largest relative difference from autograd;\n"
        f"calls: allocator calls per step. {seconds:.1f} s."
    )
    screen.print(f"Look at {out / 'offset_map.html'} in a browser, or run: arenaplan inspect {out / 'plan.json'}")
