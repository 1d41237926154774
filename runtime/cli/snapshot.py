"""``arenaplan snapshot``: read a PyTorch memory snapshot, and plan an arena for what it recorded."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from planner.colouring import colour
from planner.files import write_whole
from planner.report.history_svg import history_svg
from planner.report.history_text import DeviceReport, history_json, history_text
from planner.snapshot import as_problem, device_figures, read_snapshot, replay, write_problem
from planner.snapshot.problem import ARENA_ALIGNMENT
from planner.snapshot.records import DeviceRecord, Snapshot
from runtime.cli.errors import FAILED, CallError, one_line_errors, say
from runtime.cli.options import Debug, Json, require_outputs


def snapshot(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A memory snapshot: pickled, or as JSON.")],
    device: Annotated[int | None, typer.Option(metavar="N", help="Only this device.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the trace as a problem for `pack`.")] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture: memory as it was, and the planned arena.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=10_000, help="Blocks and places to name at the peak.")] = 10,
    alignment: Annotated[int, typer.Option(help="Bytes every offset of the arena is a multiple of.")] = ARENA_ALIGNMENT,
    time_limit: Annotated[float, typer.Option(help="Seconds to search for the arena of a device.")] = 60.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a CUDA memory snapshot holds, and what a planned arena would need for the same trace."""
    with one_line_errors(debug):
        if not math.isfinite(time_limit) or time_limit < 0:
            raise CallError(f"--time-limit {time_limit} is not a number of seconds")
        if not 1 <= alignment <= 2**30 or alignment & (alignment - 1):
            raise CallError(f"--alignment {alignment}: use a power of two, such as {ARENA_ALIGNMENT}")
        require_outputs([csv, svg], read=[file])
        taken = read_snapshot(file)
        chosen = _chosen(taken, device)
        for option, path in (("--csv", csv), ("--svg", svg)):
            if path is not None and len(chosen) > 1:
                numbers = ", ".join(str(record.device) for record in chosen)
                raise CallError(f"{option} {path}: the file has the devices {numbers}; choose one with --device")
        taken = replace(taken, devices=())
        reports: list[DeviceReport] = []
        while chosen:  # Events are let go before the packing, which takes memory of its own.
            reports.append(_report(chosen, alignment, time_limit, top, csv))
            time_limit = 0.0 if _interrupted(reports) else time_limit  # of the other devices, then
        if svg is not None:
            write_whole(svg, history_svg(reports[0], f"{file.name}, device {reports[0].history.device}").encode())
            say(f"wrote {svg}")
        if as_json:
            print(json.dumps(history_json(taken, reports), indent=2))
        else:
            encoding = sys.stdout.encoding or "utf-8"
            text = history_text(taken, reports, width=_width())
            print(text.encode(encoding, errors="replace").decode(encoding), end="")
        if _interrupted(reports):
            say("interrupted; the planned arena is the best until then")
            raise typer.Exit(FAILED)


def _interrupted(reports: list[DeviceReport]) -> bool:
    return any(report.packing is not None and report.packing.interrupted for report in reports)


def _chosen(taken: Snapshot, device: int | None) -> list[DeviceRecord]:
    """The devices to report on: those with events where any has, or the one asked for."""
    if device is None:
        return list(taken.devices)
    chosen = [record for record in taken.devices if record.device == device]
    if not chosen:
        known = ", ".join(str(record.device) for record in taken.devices)
        raise CallError(f"--device {device}: the file has the devices {known}")
    return chosen


def _report(devices: list[DeviceRecord], alignment: int, time_limit: float, top: int, csv: Path | None) -> DeviceReport:
    """Take the first device from the list, sum it up and pack it."""
    record = devices.pop(0)
    history = replay(record)
    figures = device_figures(history, _seconds(record), top)
    traced = bool(record.events)
    del record
    if not traced:
        if csv is not None:
            raise CallError(f"--csv {csv}: device {history.device} has no trace to pack")
        return DeviceReport(history, figures, alignment)
    problem = as_problem(history, alignment)
    if csv is not None:
        write_problem(csv, problem)
        say(f"wrote {csv}")
    start = time.perf_counter()
    packing = colour(problem, time_limit=time_limit, progress=say)
    return DeviceReport(history, figures, alignment, packing, time.perf_counter() - start)


def _seconds(record: DeviceRecord) -> float | None:
    """From the first event to the last, where they have times."""
    times = [event.time_us for event in record.events if event.time_us is not None]
    return (max(times) - min(times)) / 1e6 if times else None


def _width() -> int:
    """Columns of the terminal; into a file or a pipe, enough for whole paths."""
    return max(60, Console().width) if sys.stdout.isatty() else 200
