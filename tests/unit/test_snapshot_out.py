"""A plan as a memory snapshot: what viewers demand of one, PyTorch's own tool, and the way back."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from plans import TRACED, small_plan, synthetic_plan, traced_plan
from typer.testing import CliRunner

from planner.graph import Role
from planner.plan import Plan, padded
from planner.plan_file import save_plan
from planner.report.facts import live_nbytes
from planner.report.snapshot import snapshot, snapshot_json, snapshot_pickle
from planner.snapshot import as_problem, device_figures, read_snapshot, replay
from runtime.cli.inspect import inspect
from runtime.cli.snapshot import snapshot as snapshot_command

MAKERS = [
    small_plan,
    lambda: synthetic_plan(400),
    *(partial(traced_plan, *options) for options in TRACED),
]

runner = CliRunner()
app = typer.Typer()
app.command("inspect")(inspect)
app.command("snapshot")(snapshot_command)


# The way back


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("write", [snapshot_pickle, snapshot_json])
def test_read_back_it_has_the_plans_figures(make, write, tmp_path):
    plan = make()
    path = tmp_path / "plan.pickle"
    path.write_bytes(write(plan))
    (record,) = read_snapshot(path).devices
    history = replay(record)
    figures = device_figures(history)
    assert figures.peak_live_nbytes == plan.lower_bound_nbytes
    assert figures.peak_reserved_nbytes == plan.arena_nbytes == figures.end.reserved_nbytes
    assert history.findings == ()
    assert figures.start_live_nbytes == 0
    assert _live_by_time(plan, record.events, history.live) == list(live_nbytes(plan))


def _live_by_time(plan: Plan, events: Any, live: tuple[int, ...]) -> list[int]:
    """Bytes alive during each step of the plan: after the last event that is not later than it."""
    found, at = [], 0
    for step in range(plan.steps):
        while at < len(events) and events[at].time_us <= step * 1000:
            at += 1
        found.append(live[at])
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_the_planned_arena_of_the_snapshot_is_no_larger_than_the_plans_bound_allows(make, tmp_path):
    """Packing the snapshot anew starts from the same problem: the same lower bound, to the byte."""
    plan = make()
    path = tmp_path / "plan.pickle"
    path.write_bytes(snapshot_pickle(plan))
    problem = as_problem(replay(read_snapshot(path).devices[0]), plan.alignment)
    live: dict[int, int] = {}
    for item in problem.lifetimes:
        for step in range(item.birth, item.death):
            live[step] = live.get(step, 0) + item.nbytes
    assert max(live.values()) == plan.lower_bound_nbytes
    assert len(problem.lifetimes) == sum(storage.nbytes > 0 for storage in plan.graph.storages)


def test_the_commands_go_there_and_back(tmp_path):
    save_plan(small_plan(), tmp_path / "plan.json")
    for name in ("s.pickle", "s.json"):
        target = tmp_path / name
        assert runner.invoke(app, ["inspect", str(tmp_path / "plan.json"), "--snapshot", str(target)]).exit_code == 0
        result = runner.invoke(app, ["snapshot", str(target), "--json"])
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["form"] == ("JSON" if name == "s.json" else "pickle, protocol 4")
        (device,) = found["devices"]
        assert device["peak_live_bytes"] == small_plan().lower_bound_nbytes
        assert device["peak_reserved_bytes"] == small_plan().arena_nbytes
        assert {entry["category"] for entry in device["by_category"]} <= {role.value for role in Role}
        assert sum(entry["bytes"] for entry in device["by_category"]) == device["peak_live_bytes"]
        assert device["by_place"][0]["place"].startswith(("model.py:", "arena "))


# What viewers demand: the numbers are those of the notes on the format


def viewer(taken: dict[str, Any], device: int = 0) -> None:
    """Play the events backwards from the segments, as "Allocator State History" does; raise where it would break."""
    segments = {one["address"]: one["total_size"] for one in taken["segments"] if one["device"] == device}
    live: dict[int, int] = {}
    for segment in taken["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                live[address] = block["size"]
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]

    def inside() -> None:
        for address, size in live.items():
            assert any(start <= address and address + size <= start + whole for start, whole in segments.items())

    inside()
    events = taken["device_traces"][device]
    for index in reversed(range(len(events))):
        event = events[index]
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "free_completed":
            assert address not in live  # 3: no two live blocks at one address
            live[address] = size
        elif action == "free_requested":
            pair = events[index + 1]
            assert (pair["action"], pair["addr"], pair["size"]) == ("free_completed", address, size)  # 2
        elif action == "alloc":
            assert live.pop(address) == size
        elif action == "segment_alloc":
            assert index == 0  # 4: the arena first
            del segments[address]
        else:
            raise AssertionError(action)
        inside()  # 1: every live block in a live segment at every event
    assert not live
    assert not segments


@pytest.mark.parametrize("make", MAKERS)
def test_viewers_can_play_it_backwards(make):
    taken = snapshot(make())
    viewer(taken)
    categories = {event["category"] for event in taken["device_traces"][0]}
    assert "unknown" in categories  # 5: or viewers throw
    addresses = [event["addr"] for event in taken["device_traces"][0]]
    assert max(addresses) < 2**53
    assert all(event["size"] > 0 for event in taken["device_traces"][0])


@pytest.mark.parametrize("make", MAKERS)
def test_segments_have_every_field_and_add_up(make):
    plan = make()
    (segment,) = snapshot(plan)["segments"]
    assert set(segment) == {
        "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
        "segment_pool_id", "is_expandable", "frames", "blocks",
    }  # fmt: skip
    for block in segment["blocks"]:
        assert set(block) == {"address", "size", "requested_size", "state", "frames"}
        assert block["state"] in ("active_allocated", "inactive")
        assert block["requested_size"] <= block["size"]
        assert all(set(frame) == {"filename", "line", "name"} for frame in block["frames"])
        assert all(isinstance(frame["line"], int) for frame in block["frames"])
    results = {port.tensor for port in plan.graph.results if port.tensor is not None}
    kept = {plan.graph.tensors[tensor].storage for tensor in results}
    at_end = {block["address"] - segment["address"] for block in segment["blocks"] if block["requested_size"]}
    assert {plan.placements[index].offset for index in kept if plan.graph.storages[index].nbytes} <= at_end


@pytest.mark.parametrize("make", MAKERS)
def test_every_storage_is_allocated_once_with_its_role(make):
    plan = make()
    allocs = [event for event in snapshot(plan)["device_traces"][0] if event["action"] == "alloc"]
    expected = sorted(
        (padded(storage.nbytes, plan.alignment), storage.role.value)
        for storage in plan.graph.storages
        if storage.nbytes
    )
    assert sorted((event["size"], event["category"]) for event in allocs) == expected


def test_json_and_pickle_hold_the_same():
    plan = synthetic_plan(100)
    read = json.loads(snapshot_json(plan))
    assert read == json.loads(json.dumps(pickle.loads(snapshot_pickle(plan))))
    viewer(read)


# PyTorch's own tool


@pytest.mark.parametrize("make", MAKERS)
def test_every_function_of_pytorchs_tool_takes_it(make):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    plan = make()
    taken = pickle.loads(snapshot_pickle(plan))
    assert "segments: 1" in viz.segsum(taken)
    text = viz.trace(taken)
    assert "cudaMalloc" in text
    assert text.count(" = a[") == sum(storage.nbytes > 0 for storage in plan.graph.storages)  # in the one segment
    lines: list[str] = []
    viz.memory(taken, format_flamegraph=lambda folded: lines.extend(folded.splitlines()) or "")
    viz.segments(taken, format_flamegraph=lambda folded: lines.extend(folded.splitlines()) or "")
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == 2 * plan.arena_nbytes
    for page in (viz.trace_plot(taken), viz.trace_plot(taken, plot_segments=True), viz.segment_plot(taken)):
        assert "snapshot.pickle" in page
    filtered = viz.trace_plot(pickle.loads(snapshot_pickle(plan)), filter_freed=True)
    assert len(filtered) <= len(viz.trace_plot(taken))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("stats",), "total_reserved"),
        (("trace",), "cudaMalloc"),
        (("trace_plot",), "Active Memory Timeline"),
        (("trace_plot", "-s"), "Active Cached Memory Timeline"),
        (("trace_plot", "-f"), "Active Memory Timeline"),
        (("segment_plot",), "Allocator State History"),
    ],
)
def test_pytorchs_command_runs_on_the_file(arguments, shown, tmp_path):
    path = tmp_path / "plan.pickle"
    path.write_bytes(snapshot_pickle(small_plan()))
    plots = "plot" in arguments[0]
    output = ("-o", "out.html") if plots else ()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.cuda._memory_viz",
            arguments[0],
            str(path),
            *arguments[1:],
            *output,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert shown in (Path(tmp_path / "out.html").read_text() if plots else done.stdout)
