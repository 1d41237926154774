"""What docs/out-of-memory.md shows is what the commands print, and the recorded files are what it says they are."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from planner.snapshot import read_snapshot, replay
from runtime.cli.snapshot import snapshot

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```console\n\$ arenaplan (.*?)\n(.*?)\n```", PAGE, re.DOTALL))

REFRESH = "run tools/refresh_out_of_memory.py"

runner = CliRunner()
app = typer.Typer()
app.command()(snapshot)


@pytest.mark.parametrize("call", [call for call in BLOCKS if call.startswith("snapshot ")])
def test_the_page_shows_what_the_command_prints(call, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [part if not part.endswith(".svg") else str(tmp_path / part) for part in call.split()[1:]]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == BLOCKS[call].splitlines(), REFRESH


def test_the_picture_is_the_one_the_command_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    target = tmp_path / "whole_step.svg"
    assert runner.invoke(app, ["examples/whole_step.pickle", "--svg", str(target)]).exit_code == 0
    assert target.read_text() == (ROOT / "docs" / "images" / "whole_step.svg").read_text()
    ET.fromstring(target.read_text())


def test_the_recorded_files_add_up():
    failures = []
    for name in ("out_of_memory", "whole_step"):
        (record,) = read_snapshot(ROOT / "examples" / f"{name}.pickle").devices
        history = replay(record)
        assert history.findings == ()
        failures.append(len(history.out_of_memory))
    assert failures == [1, 0]


def test_the_recorded_files_name_no_path_of_the_machine_they_come_from():
    for name in ("out_of_memory", "whole_step"):
        for entry in read_snapshot(ROOT / "examples" / f"{name}.pickle").devices[0].events:
            for frame in entry.frames:
                assert frame["filename"].startswith(("examples/", "torch/", "/usr/lib/python3/", "??"))


def graph_of_the_example() -> tuple[Any, Any]:
    """The example's file as a module, and its step traced."""
    import importlib.util

    from planner import trace

    spec = importlib.util.spec_from_file_location("out_of_memory_example", ROOT / "examples" / "03_out_of_memory.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, inputs, loss = example.factory("meta")
    return example, trace(model, inputs, loss=loss, mode="joint")


@pytest.mark.slow
def test_the_budget_the_page_names_is_kept():
    from planner import plan

    budget = re.search(r"`--budget (\w+)`", PAGE)
    assert budget is not None
    planned = plan(graph_of_the_example()[1], budget=budget[1])
    assert f"this step takes\n{planned.arena_nbytes / 2**20:.2f} MiB" in PAGE, REFRESH


@pytest.mark.slow
def test_the_plan_the_page_shows_is_the_newest():
    from planner import plan

    shown = f"{plan(graph_of_the_example()[1]).arena_nbytes / 2**20:.2f}"
    assert f"| the step planned | {shown} |" in PAGE, REFRESH
    assert f"{shown} MiB  one allocation" in BLOCKS[next(call for call in BLOCKS if call.startswith("plan "))], REFRESH


def test_the_planner_reaches_what_the_page_shows():
    """The whole step planned anew from the example's module takes no more than the table says."""
    from planner import plan

    example, graph = graph_of_the_example()
    planned = plan(graph)
    shown = re.search(r"\| the step planned \| ([\d.]+) \|", PAGE)
    assert shown is not None
    assert planned.arena_nbytes <= (float(shown[1]) + 0.005) * 2**20
    assert planned.arena_nbytes < example.LIMIT_NBYTES
    whole = json.loads(runner.invoke(app, [str(ROOT / "examples" / "whole_step.pickle"), "--json"]).stdout)
    device = whole["devices"][0]
    assert f"| reserved by the caching allocator | {device['peak_reserved_bytes'] / 2**20:.2f} |" in PAGE
    assert f"| alive at the peak in eager PyTorch | {device['peak_live_bytes'] / 2**20:.2f} |" in PAGE
    assert f"| eager's blocks, packed | {device['arena_bytes'] / 2**20:.2f} |" in PAGE
    assert device["peak_live_bytes"] > example.LIMIT_NBYTES


def test_the_speed_the_page_states_is_the_one_measured():
    report = json.loads((ROOT / "docs" / "benchmarks" / "snapshot.json").read_text())
    small, big = report["cases"]
    assert big["file_bytes"] >= 100e6
    assert f"{big['events']:,} events" in PAGE
    words = " ".join(PAGE.split())
    for case, seconds in (
        (big, f"{big['processor_seconds']:.0f} processor seconds"),
        (small, f"takes {small['processor_seconds']:.1f} s"),
    ):
        assert case["arena_bytes"] == case["lower_bound_bytes"]
        assert seconds in words
    assert f"at most {big['peak_resident_bytes'] / 1e9:.1f} GB" in words
