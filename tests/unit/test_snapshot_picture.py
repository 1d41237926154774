"""The picture of a snapshot: well-formed, every block where the packing put it, safe text."""

from __future__ import annotations

import pickle
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from caching_allocator import CachingAllocator, OutOfMemoryError, snapshot_of, train

from planner.colouring import colour
from planner.report import history_svg as module
from planner.report.history_svg import history_svg
from planner.report.history_text import DeviceReport
from planner.snapshot import as_problem, device_figures, read_snapshot, replay

SVG = "{http://www.w3.org/2000/svg}"


def report_of(value: dict[str, Any], folder: Any, planned: bool = True) -> DeviceReport:
    path = folder / "taken.pickle"
    path.write_bytes(pickle.dumps(value, protocol=4))
    history = replay(read_snapshot(path).devices[0])
    packing = colour(as_problem(history)) if planned else None
    return DeviceReport(history, device_figures(history), 256, packing)


@pytest.fixture
def report(tmp_path) -> DeviceReport:
    allocator = CachingAllocator()
    train(allocator, layers=3, steps=1, width=64, tokens=256)
    return report_of(snapshot_of(allocator), tmp_path)


def test_every_block_is_drawn_at_its_offset(report):
    root = ET.fromstring(history_svg(report, "a title"))
    drawn = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert report.packing is not None
    blocks = [block for block in report.history.blocks if block.nbytes]
    assert len(drawn) == len(blocks)
    for rectangle, block, offset in zip(drawn, blocks, report.packing.offsets, strict=True):
        hint = rectangle.findtext(f"{SVG}title")
        assert hint is not None
        assert f"at offset {offset:,}\nsteps [{block.birth}, {block.death})" in hint
    boxes = [
        (float(one.get("x")), float(one.get("y")), float(one.get("width")), float(one.get("height"))) for one in drawn
    ]
    for index, (x, y, width, height) in enumerate(boxes):
        for x2, y2, width2, height2 in boxes[:index]:
            across = min(x + width, x2 + width2) - max(x, x2)
            along = min(y + height, y2 + height2) - max(y, y2)
            assert across <= 0.41 or along <= 0.41  # the least a block is drawn with


def test_the_curves_reach_the_peaks(report):
    root = ET.fromstring(history_svg(report, "a title"))
    paths = {one.get("class"): one.get("d") or "" for one in root.iter(f"{SVG}path")}

    def top(kind: str) -> float:
        return min(float(y) for y in re.findall(r"V([\d.]+)", paths[kind]))

    base = float(re.match(r"M[\d.]+ ([\d.]+)", paths["live"])[1])  # type: ignore[index]
    figures = report.figures
    ratio = (base - top("live")) / (base - top("reserved"))
    assert ratio == pytest.approx(figures.peak_live_nbytes / figures.peak_reserved_nbytes, abs=0.01)
    assert "planned" in paths


def test_failures_are_marked(tmp_path):
    allocator = CachingAllocator(capacity=4 * 2**20)
    allocator.alloc(2**20)
    with pytest.raises(OutOfMemoryError):
        allocator.alloc(64 * 2**20)
    text = history_svg(report_of(snapshot_of(allocator), tmp_path), "x")
    assert "out of memory: 64.00 MiB asked for at step 3" in text


def test_a_long_history_draws_its_largest_blocks(report, monkeypatch):
    monkeypatch.setattr(module, "MOST_RECTANGLES", 10)
    text = history_svg(report, "x")
    root = ET.fromstring(text)
    drawn = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert len(drawn) == 10
    assert f"{sum(block.nbytes > 0 for block in report.history.blocks) - 10:,} smaller blocks are not drawn" in text


def test_without_a_trace_there_is_one_field(tmp_path):
    allocator = CachingAllocator()
    train(allocator, layers=1, steps=1, width=32, tokens=64)
    path = tmp_path / "segments.pickle"
    path.write_bytes(pickle.dumps(allocator.state(), protocol=4))
    history = replay(read_snapshot(path).devices[0])
    text = history_svg(DeviceReport(history, device_figures(history), 256), "x")
    ET.fromstring(text)
    assert "the planned arena" not in text


def test_names_cannot_break_out_of_the_picture(tmp_path):
    allocator = CachingAllocator()
    allocator.alloc(2**20, [{"filename": "</text><script>&\x00.py", "line": 1, "name": '"]]>'}])
    text = history_svg(report_of(snapshot_of(allocator), tmp_path), "<b>&</b>")
    ET.fromstring(text)
    assert "<script>" not in text
