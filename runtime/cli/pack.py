"""``arenaplan pack``: a bare allocation problem from a CSV file."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from planner.bounds import lower_bound
from planner.colouring import colour
from planner.errors import CapacityError
from planner.packing_file import read_problem, write_packing
from planner.problem import Colouring, Problem
from runtime.cli.errors import FAILED, CallError, one_line_errors, say
from runtime.cli.options import Debug, Json, require_outputs


def pack(
    problem: Annotated[Path, typer.Argument(help="CSV with columns id,lower,upper,size [alignment,offset].")],
    capacity: Annotated[
        int | None, typer.Option(help="Bytes it must fit in; without it the peak is minimised.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds to search.")] = 10.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the packing here, as CSV.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pack a bare allocation problem: offsets for lifetimes, of the least peak, or within a capacity."""
    with one_line_errors(debug):
        if not math.isfinite(time_limit) or time_limit < 0:
            raise CallError(f"--time-limit {time_limit} is not a number of seconds")
        if capacity is not None and capacity < 0:
            raise CallError(f"--capacity {capacity} is negative")
        require_outputs([output])
        task = read_problem(problem, capacity)
        start = time.perf_counter()
        try:
            colouring = colour(task, time_limit=time_limit, progress=say, source=str(problem))
        except CapacityError as error:
            if as_json:
                typer.echo(json.dumps(_misfit(task, error, time.perf_counter() - start), indent=2))
            raise
        seconds = time.perf_counter() - start
        if output is not None:
            write_packing(output, task, colouring)
        fields = summary(task, colouring, seconds)
        if as_json:
            typer.echo(json.dumps(fields, indent=2))
        else:
            typer.echo(_text(fields))
        if colouring.interrupted:
            say("interrupted; this is the best packing until then")
            raise typer.Exit(FAILED)


def summary(problem: Problem, colouring: Colouring, seconds: float) -> dict[str, object]:
    """Return what ``--json`` prints."""
    return {
        "schema": "arenaplan.pack/1",
        "peak_bytes": colouring.peak_nbytes,
        "lower_bound_bytes": colouring.lower_bound_nbytes,
        "gap_bytes": colouring.peak_nbytes - colouring.lower_bound_nbytes,
        "capacity_bytes": problem.capacity,
        "fits": problem.capacity is None or colouring.peak_nbytes <= problem.capacity,
        "proved_optimal": colouring.proved_optimal,
        "interrupted": colouring.interrupted,
        "algorithm": colouring.algorithm,
        "seconds": seconds,
        "buffers": len(problem.lifetimes),
    }


def _misfit(problem: Problem, error: CapacityError, seconds: float) -> dict[str, object]:
    """Return what ``--json`` prints where nothing fits: the least peak known, and what is alive where most is."""
    bound = lower_bound(problem)
    return {
        "schema": "arenaplan.pack/1",
        "peak_bytes": error.needed_nbytes,
        "lower_bound_bytes": bound,
        "gap_bytes": error.needed_nbytes - bound,
        "capacity_bytes": problem.capacity,
        "fits": False,
        "proved_optimal": error.proved and error.needed_nbytes == bound,
        "proved_misfit": error.proved,
        "interrupted": False,
        "algorithm": None,
        "seconds": seconds,
        "buffers": len(problem.lifetimes),
        "bottleneck": {"step": error.step, "names": list(error.bottleneck)},
    }


def _text(fields: dict[str, object]) -> str:
    """Return the summary for people."""
    proof = "proved least" if fields["proved_optimal"] else "not proved least"
    lines = [
        f"peak         {fields['peak_bytes']} bytes ({proof})",
        f"lower bound  {fields['lower_bound_bytes']} bytes, {fields['gap_bytes']} below the peak",
        f"buffers      {fields['buffers']}",
        f"found by     {fields['algorithm']}, {fields['seconds']:.3f} s",
    ]
    if fields["capacity_bytes"] is not None:
        lines.insert(
            1, f"capacity     {fields['capacity_bytes']} bytes, {'fits' if fields['fits'] else 'does not fit'}"
        )
    return "\n".join(lines)
