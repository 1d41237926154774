"""The offset map in other tools' formats, checked by those tools' rules."""

from __future__ import annotations

import csv
import io
import itertools
import json
import pickle
import pickletools
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
from plans import TRACED, PlanBuilder, small_plan, synthetic_plan, traced_plan

from planner.bounds import lower_bound
from planner.colouring import colour
from planner.graph import Role
from planner.packing_file import read_problem
from planner.plan import Plan, padded
from planner.report.chrome_trace import offset_map_chrome_trace
from planner.report.csv_table import offset_map_csv
from planner.report.facts import live_nbytes
from planner.report.snapshot import snapshot, snapshot_pickle

MAKERS = [
    small_plan,
    lambda: synthetic_plan(400),
    *(partial(traced_plan, *options) for options in TRACED),
]


# CSV


def rows_of(plan: Plan) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(offset_map_csv(plan))))


@pytest.mark.parametrize("make", MAKERS)
def test_rows_alive_together_share_no_byte(make):
    plan = make()
    rows = [{key: int(row[key]) for key in ("lower", "upper", "size", "offset")} for row in rows_of(plan)]
    assert len(rows) == len(plan.graph.storages)
    for index, one in enumerate(rows):
        assert one["lower"] < one["upper"]
        for other in rows[:index]:
            if one["lower"] < other["upper"] and other["lower"] < one["upper"]:
                assert (
                    one["offset"] + one["size"] <= other["offset"] or other["offset"] + other["size"] <= one["offset"]
                )


@pytest.mark.parametrize("make", MAKERS)
def test_the_rows_pose_the_same_problem(make):
    plan = make()
    live: dict[int, int] = defaultdict(int)
    for row in rows_of(plan):
        for time in range(int(row["lower"]), int(row["upper"])):
            live[time] += padded(int(row["size"]), plan.alignment)
    assert max(live.values()) == plan.lower_bound_nbytes


@pytest.mark.parametrize("make", MAKERS)
def test_our_own_packing_reads_the_table(make, tmp_path):
    """With its offsets the table packs to itself; without them it is a problem with the plan's bound."""
    plan = make()
    path = tmp_path / "map.csv"
    path.write_text(offset_map_csv(plan), encoding="utf-8")
    packed = colour(read_problem(path))
    places = zip(plan.graph.storages, plan.placements, strict=True)
    assert packed.offsets == tuple(place.offset for place in plan.placements)
    assert packed.peak_nbytes == max(place.offset + storage.nbytes for storage, place in places if storage.nbytes)
    free = read_problem(path, keep_offsets=False)
    assert all(lifetime.offset is None for lifetime in free.lifetimes)
    assert lower_bound(free) <= plan.lower_bound_nbytes
    assert colour(free, time_limit=0.1).peak_nbytes >= lower_bound(free)


def test_the_first_columns_are_minimallocs():
    header, first, *_ = offset_map_csv(small_plan()).splitlines()
    assert header.startswith("id,lower,upper,size,offset,role")
    assert first == "grad_output,0,1,8192,4352,grad_output,0,1,"


# Chrome trace


@pytest.mark.parametrize("make", MAKERS)
def test_slices_of_one_row_take_turns(make):
    plan = make()
    events = json.loads(offset_map_chrome_trace(plan))["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, rows.values())) == len(plan.graph.storages) + len(plan.graph.operations)
    for slices in rows.values():
        slices.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(slices))
    counters = [event["args"]["live"] for event in events if event["ph"] == "C"]
    assert counters == list(live_nbytes(plan))


@pytest.mark.parametrize("make", MAKERS)
def test_trace_events_have_the_fields_of_their_kind(make):
    """As the Trace Event Format's document names them, for complete (X), counter (C) and metadata (M) events."""
    plan = make()
    document = json.loads(offset_map_chrome_trace(plan))
    assert document["displayTimeUnit"] in ("ms", "ns")
    names = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert event["ts"] + event["dur"] <= plan.steps * 1000
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
            assert 0 <= event["ts"] < plan.steps * 1000
        else:
            assert event["ph"] == "M"
            assert event["name"] == "process_name"
            names[event["pid"]] = event["args"]["name"]
    assert {event["pid"] for event in document["traceEvents"]} == set(names)
    assert sorted(names.values()) == ["arena", "operations"]


# Memory snapshot


def replay(taken: dict[str, Any]) -> tuple[dict[int, int], int]:
    """The blocks live at the end, and the most bytes live at once; fails where a viewer would."""
    (segment,) = taken["segments"]
    live: dict[int, int] = {}
    most = 0
    requested = None
    for event in taken["device_traces"][0][1:]:
        action, address, size = event["action"], event["addr"], event["size"]
        assert size > 0
        assert segment["address"] <= address
        assert address + size <= segment["address"] + segment["total_size"]
        if action == "alloc":
            assert not any(address < other + live[other] and other < address + size for other in live)
            live[address] = size
            most = max(most, sum(live.values()))
        elif action == "free_requested":
            requested = address
        else:
            assert action == "free_completed"
            assert requested == address
            assert live.pop(address) == size
    return live, most


@pytest.mark.parametrize("make", MAKERS)
def test_the_trace_replays_to_the_segments(make):
    plan = make()
    taken = snapshot(plan)
    live, most = replay(taken)
    (segment,) = taken["segments"]
    assert taken["device_traces"][0][0]["action"] == "segment_alloc"
    assert segment["total_size"] == plan.arena_nbytes == sum(block["size"] for block in segment["blocks"])
    address = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == address
        assert (block["state"] == "active_allocated") == (live.get(address) == block["size"])
        address += block["size"]
    assert segment["allocated_size"] == sum(live.values())
    assert most == plan.lower_bound_nbytes


def test_storages_without_bytes_and_plans_without_any_have_no_blocks():
    build = PlanBuilder()
    build.storage("empty", (0,), Role.INPUT)
    assert snapshot(build.build()) == {"segments": [], "device_traces": [[]]}
    build.storage("x", (64,), Role.INPUT)
    assert len(snapshot(build.build())["device_traces"][0]) == 2


def test_the_pickle_is_plain():
    """Protocol 4, and opcodes that the browser's reader knows: nothing that could build an object."""
    data = snapshot_pickle(synthetic_plan(100))
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert data[:2] == b"\x80\x04"
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "INST", "OBJ", "EXT1", "PERSID"}
    assert pickle.loads(data) == snapshot(synthetic_plan(100))


def test_one_entry_has_the_category_that_viewers_need():
    categories = {event["category"] for event in snapshot(small_plan())["device_traces"][0]}
    assert {"unknown", "saved", "temporary"} <= categories


def test_frames_name_the_storage_and_its_operation():
    events = snapshot(small_plan())["device_traces"][0]
    (frames,) = [
        event["frames"] for event in events if event["action"] == "alloc" and event["frames"][0]["name"] == "grad_x"
    ]
    assert frames[1] == {"filename": "model.py", "line": 6, "name": "mm_1 = aten.mm.default"}


def test_pytorchs_own_tool_reads_it():
    torch_viz = pytest.importorskip("torch.cuda._memory_viz")
    taken = pickle.loads(snapshot_pickle(synthetic_plan(100)))
    assert "segments: 1" in torch_viz.segsum(taken)
    assert "cudaMalloc" in torch_viz.trace(taken)
