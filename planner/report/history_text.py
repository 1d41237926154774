"""What a memory snapshot says, as text for a terminal, and as the fields of ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.problem import Colouring
from planner.report.facts import size_text
from planner.snapshot import DeviceFigures, Replay, Snapshot
from planner.snapshot.figures import Group, Holder, place_name
from planner.snapshot.frames import printable
from planner.snapshot.problem import ALLOCATOR_ROUNDING
from planner.snapshot.replay import OutOfMemory

WIDTH = 100
"""Columns of the text where the terminal's width is unknown."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device, ready to be shown.

    Attributes:
        packing: the planned arena, or ``None`` where the file has no trace to plan.
        seconds: how long packing took.
    """

    history: Replay
    figures: DeviceFigures
    alignment: int
    packing: Colouring | None = None
    seconds: float = 0.0


def history_text(snapshot: Snapshot, reports: list[DeviceReport], width: int = WIDTH) -> str:
    """The report of a file: one part for each device, no line wider than ``width``."""
    lines = [f"{snapshot.source}: {snapshot.form}, {size_text(snapshot.nbytes)}"]
    for report in reports:
        lines += ["", *_device(report)]
    return "\n".join(_cut(line, width) for line in lines) + "\n"


def _device(report: DeviceReport) -> list[str]:
    figures, packing = report.figures, report.packing
    span = "" if figures.seconds is None else f" in {figures.seconds:.3f} s"
    lines = [f"Device {figures.device}: {figures.events:,} events{span}, {figures.blocks:,} blocks"]

    def row(label: str, nbytes: int, note: str) -> None:
        lines.append(f"  {label:<18}{size_text(nbytes):>12}  {note}".rstrip())

    if figures.events:
        where = f"at step {figures.peak_step}, {figures.peak_blocks:,} blocks"
        row("peak live", figures.peak_live_nbytes, where)
        rounded = figures.peak_rounded_nbytes
        row("  in 512 B units", rounded, "as the caching allocator rounds every request")
        row("peak reserved", figures.peak_reserved_nbytes, f"at step {figures.peak_reserved_step}")
        row("  at peak live", figures.reserved_at_peak_nbytes, "")
        unused = figures.peak_reserved_nbytes - figures.peak_live_nbytes
        row("fragmentation", unused, f"{figures.fragmentation:.1%} of peak reserved, unused even at peak live")
    if packing is not None:
        gap = packing.peak_nbytes - packing.lower_bound_nbytes
        proof = "equals the lower bound" if not gap else f"{size_text(gap)} above the lower bound"
        if not packing.proved_optimal and packing.peak_nbytes > figures.peak_reserved_nbytes:
            proof += ", cut off: raise --time-limit"
        row("planned arena", packing.peak_nbytes, f"the same blocks packed; {proof}")
        lines += _saving(figures, packing)
    row("live at the start", figures.start_live_nbytes, "")
    row("live at the end", figures.end_live_nbytes, "")
    end = figures.end
    free = f"{size_text(end.free_nbytes)} of it free, the largest piece {size_text(end.largest_free_nbytes)}"
    row("reserved at the end", end.reserved_nbytes, f"{end.segments:,} segments, {free}")
    if figures.pending_peak_nbytes:
        row("awaiting streams", figures.pending_peak_nbytes, "most bytes freed but still in use by another stream")
    if len(figures.stream_peaks_nbytes) > 1:
        peaks = sum(figures.stream_peaks_nbytes.values())
        note = f"{len(figures.stream_peaks_nbytes)} streams: an arena for each would need this or more"
        row("sum of stream peaks", peaks, note)
    for failure in report.history.out_of_memory:
        lines += _oom_text(failure)
    when = f"at the peak (step {figures.peak_step})" if figures.events else "at the end"
    if figures.by_category:
        lines += ["", f"  By category {when}", *map(_group_text, figures.by_category)]
    if figures.by_place:
        lines += ["", f"  Where the most bytes {when} were allocated", *map(_group_text, figures.by_place)]
    if figures.largest:
        lines += ["", f"  Largest blocks {when}", *(_holder_text(holder, report) for holder in figures.largest)]
    if report.history.findings:
        lines += ["", "  What does not add up, or was not recorded"]
        for finding in report.history.findings:
            lines += [f"    {finding.kind} ({finding.count:,})", f"      {finding.message}"]
    return lines


def _saving(figures: DeviceFigures, packing: Colouring) -> list[str]:
    saved = figures.peak_reserved_nbytes - packing.peak_nbytes
    if saved <= 0 or not figures.peak_reserved_nbytes:
        return []
    share = saved / figures.peak_reserved_nbytes
    return [f"  {'planning saves':<18}{size_text(saved):>12}  {share:.1%} of peak reserved"]


def _oom_text(failure: OutOfMemory) -> list[str]:
    live, reserved = size_text(failure.live_nbytes), size_text(failure.reserved_nbytes)
    verdict = "would have fitted unfragmented" if failure.fits_unfragmented else "would not have fitted at all"
    return [
        f"  out of memory at step {failure.step}: {size_text(failure.nbytes)} asked for, which {verdict}:",
        f"    {live} alive, {reserved} reserved, {size_text(failure.free_nbytes)} left on the device",
    ]


def _group_text(group: Group) -> str:
    blocks = f"{group.blocks:,} block{'s' * (group.blocks != 1)}"
    return f"  {size_text(group.nbytes):>12}  {blocks:>13}  {group.name}"


def _holder_text(holder: Holder, report: DeviceReport) -> str:
    block = holder.block
    death = "end" if block.death >= report.history.steps else str(block.death)
    life = f"[{block.birth or 'start'}, {death})"
    category = f"  {printable(block.category)}" if block.category else ""
    where = place_name(block, holder.place)
    return f"  {size_text(block.nbytes):>12}  {life:<17}{category}  {where}"


def history_json(snapshot: Snapshot, reports: list[DeviceReport]) -> dict[str, Any]:
    """The fields of ``--json``; memory in bytes."""
    return {
        "schema": "arenaplan.snapshot/1",
        "file": snapshot.source,
        "form": snapshot.form,
        "file_bytes": snapshot.nbytes,
        "devices": [_device_json(report) for report in reports],
    }


def _device_json(report: DeviceReport) -> dict[str, Any]:
    figures, history, packing = report.figures, report.history, report.packing
    end = figures.end
    return {
        "device": figures.device,
        "events": figures.events,
        "blocks": figures.blocks,
        "seconds": figures.seconds,
        "start_live_bytes": figures.start_live_nbytes,
        "end_live_bytes": figures.end_live_nbytes,
        "peak_live_bytes": figures.peak_live_nbytes,
        "peak_step": figures.peak_step,
        "peak_blocks": figures.peak_blocks,
        "peak_rounded_bytes": figures.peak_rounded_nbytes,
        "allocator_rounding": ALLOCATOR_ROUNDING,
        "peak_reserved_bytes": figures.peak_reserved_nbytes,
        "peak_reserved_step": figures.peak_reserved_step,
        "reserved_at_peak_bytes": figures.reserved_at_peak_nbytes,
        "reserved_bytes": end.reserved_nbytes,
        "fragmentation": figures.fragmentation,
        "pending_peak_bytes": figures.pending_peak_nbytes,
        "stream_peak_bytes": {str(stream): peak for stream, peak in figures.stream_peaks_nbytes.items()},
        "pool_bytes": {f"{one},{two}": nbytes for (one, two), nbytes in figures.pools.items()},
        "end": {
            "segments": end.segments,
            "active_bytes": end.active_nbytes,
            "requested_bytes": end.requested_nbytes,
            "free_bytes": end.free_nbytes,
            "largest_free_bytes": end.largest_free_nbytes,
            "fragmentation": end.fragmentation,
        },
        "planned": packing is not None,
        "alignment": report.alignment,
        "arena_bytes": None if packing is None else packing.peak_nbytes,
        "lower_bound_bytes": None if packing is None else packing.lower_bound_nbytes,
        "saved_bytes": None if packing is None else figures.peak_reserved_nbytes - packing.peak_nbytes,
        "proved_optimal": None if packing is None else packing.proved_optimal,
        "algorithm": None if packing is None else packing.algorithm,
        "plan_seconds": None if packing is None else report.seconds,
        "out_of_memory": [_oom_json(failure) for failure in history.out_of_memory],
        "snapshots": history.snapshots,
        "largest": [_holder_json(holder, history) for holder in figures.largest],
        "by_place": [_group_json(group, "place") for group in figures.by_place],
        "by_category": [_group_json(group, "category") for group in figures.by_category],
        "findings": [
            {"kind": finding.kind, "count": finding.count, "message": finding.message} for finding in history.findings
        ],
    }


def _oom_json(failure: OutOfMemory) -> dict[str, Any]:
    return {
        "step": failure.step,
        "requested_bytes": failure.nbytes,
        "device_free_bytes": failure.free_nbytes,
        "live_bytes": failure.live_nbytes,
        "reserved_bytes": failure.reserved_nbytes,
        "fits_unfragmented": failure.fits_unfragmented,
    }


def _holder_json(holder: Holder, history: Replay) -> dict[str, Any]:
    block = holder.block
    return {
        "bytes": block.nbytes,
        "address": block.address,
        "stream": block.stream,
        "birth": block.birth,
        "death": block.death,
        "freed": block.death < history.steps,
        "category": block.category,
        "place": place_name(block, holder.place),
        "frames": [{"filename": at.file, "line": at.line, "name": at.function} for at in holder.stack],
    }


def _group_json(group: Group, name: str) -> dict[str, Any]:
    return {name: group.name, "bytes": group.nbytes, "blocks": group.blocks}


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
