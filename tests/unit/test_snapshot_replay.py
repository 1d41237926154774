"""Lifetimes rebuilt from traces: against an allocator that knows the truth, and for files that do not add up."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from caching_allocator import CachingAllocator, OutOfMemoryError, Stacks, fragmented, snapshot_of, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import SnapshotFileError
from planner.plan import padded
from planner.snapshot import as_problem, device_figures, read_snapshot, replay
from planner.snapshot.replay import Replay

MIB = 2**20
SIZES = (1, 100, 512, 513, 4096, MIB - 1, MIB + 1, 3 * MIB, 10 * MIB, 11 * MIB, 33 * MIB + 5)


@dataclass
class Witness(CachingAllocator):
    """Notes after every recorded event what is alive and what is reserved."""

    alive: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    frozen: list[dict[int, int]] = field(default_factory=list)

    def note(self) -> None:
        self.alive.append(sum(piece.requested for piece in self.used.values()))
        self.held.append(self.reserved)
        self.frozen.append({address: piece.requested for address, piece in self.used.items()})

    def record(self, *arguments: Any, **more: Any) -> None:
        super().record(*arguments, **more)
        if self.history:
            self.note()


def read(value: Any, folder: Path, protocol: int = 4):
    path = folder / "taken.pickle"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return read_snapshot(path)


def replayed(value: Any, folder: Path) -> Replay:
    (record,) = read(value, folder).devices
    return replay(record)


def kinds(history: Replay) -> set[str]:
    return {finding.kind for finding in history.findings}


@given(
    operations=st.lists(
        st.tuples(st.sampled_from("aaaaffwce"), st.integers(0, 99), st.sampled_from(SIZES)), min_size=1, max_size=60
    ),
    late=st.integers(0, 20),
    most=st.one_of(st.none(), st.integers(1, 40)),
    expandable=st.booleans(),
    capacity=st.sampled_from((80 * MIB, 2**40)),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_rebuilt_is_what_happened(operations, late, most, expandable, capacity, tmp_path):
    """With a history switched on late, cut to a ring, with frees under way, segments given back, and failures."""
    allocator = Witness(capacity=capacity, expandable=expandable, history=False, most_entries=most)
    waiting: list[int] = []
    failures = 0
    for number, (action, choice, size) in enumerate(operations):
        if number == late:
            allocator.history = True
            allocator.note()
        owned = [address for address in allocator.used if address not in waiting]
        if action == "a":
            try:
                allocator.alloc(size, stream=choice % 3)
            except OutOfMemoryError:
                failures += allocator.history
        elif action in "fw" and owned:
            address = owned[choice % len(owned)]
            allocator.free(address, waits=action == "w")
            if action == "w":
                waiting.append(address)
        elif action == "c" and waiting:
            allocator.complete(waiting.pop(choice % len(waiting)))
        elif action == "e":
            allocator.empty_cache()
    value = snapshot_of(allocator)
    events = len(value["device_traces"][0])
    if not events:
        with pytest.raises(SnapshotFileError, match="no device has an event"):
            read(value, tmp_path)
        return
    history = replayed(value, tmp_path)
    # The witness noted the state before the first event, too.
    alive, held = allocator.alive[-events - 1 :], allocator.held[-events - 1 :]
    assert list(history.live) == alive
    assert list(history.reserved) == held
    for step, blocks in enumerate(allocator.frozen[-events - 1 :]):
        assert {one.address: one.nbytes for one in history.blocks if one.birth <= step < one.death} == blocks
    assert kinds(history) <= {"alive at the start"}
    assert ("alive at the start" in kinds(history)) == bool(allocator.frozen[-events - 1])
    cut = most is not None and len(allocator.entries) > most
    if not cut:
        assert len(history.out_of_memory) == failures
    figures = device_figures(history)
    assert figures.peak_live_nbytes == max(alive)
    assert figures.peak_reserved_nbytes == max(held)
    assert figures.end.reserved_nbytes == allocator.reserved
    problem = as_problem(history, 256)
    assert all(item.nbytes % 256 == 0 and item.birth < item.death for item in problem.lifetimes)
    live = [
        sum(item.nbytes for item in problem.lifetimes if item.birth <= step < item.death) for step in range(events + 1)
    ]
    assert live == [sum(padded(size, 256) for size in blocks.values()) for blocks in allocator.frozen[-events - 1 :]]


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_snapshots_are_reported_on_or_refused(data, tmp_path):
    """Fields dropped, exchanged, or made absurd: figures and findings, or one error that names the place."""
    value = copy.deepcopy(_mutable())
    for _ in range(data.draw(st.integers(1, 6))):
        where = data.draw(st.sampled_from(("trace", "segment", "block", "top")))
        if where == "top":
            key = data.draw(st.sampled_from(("segments", "device_traces")))
            value[key] = data.draw(st.sampled_from(([], [[]], None, 3, {}, value[key], [value[key]])))
            break
        records = _records(value, where)
        if not isinstance(records, list) or not records or not all(isinstance(one, dict) for one in records):
            break  # Mutated beyond further mutation.
        index = data.draw(st.integers(0, len(records) - 1))
        if data.draw(st.booleans()):
            change = data.draw(st.sampled_from(("drop", "repeat", "swap")))
            if change == "drop" and len(records) > 1:
                del records[index]
            elif change == "repeat":
                records.append(records[index])
            else:
                records[index], records[0] = records[0], records[index]
        else:
            key = data.draw(st.sampled_from(sorted(records[index])))
            absurd = (
                None,
                -1,
                0,
                1,
                513,
                2**62,
                2**64,
                2**63 - 1,
                2**63,
                1.5,
                float("nan"),
                True,
                "x",
                [],
                {},
                [1],
                (1,),
            )
            records[index][key] = data.draw(st.sampled_from((*absurd, "alloc", "free_completed", "inactive")))
    try:
        taken = read(value, tmp_path)
    except SnapshotFileError:
        with pytest.raises(SnapshotFileError) as caught:
            read(value, tmp_path)
        assert str(caught.value).startswith(str(tmp_path))
        assert len(caught.value.cause) < 300
        return
    for record in taken.devices:
        history = replay(record)
        figures = device_figures(history)
        assert figures.peak_live_nbytes == max(history.live) >= 0
        assert min(history.live) >= 0
        assert min(history.reserved) >= 0
        assert all(0 <= one.birth < one.death <= history.steps for one in history.blocks)


def _mutable() -> dict[str, Any]:
    allocator = CachingAllocator(history=False)
    train(allocator, layers=1, steps=1, width=16, tokens=64)
    allocator.history = True
    train(allocator, layers=1, steps=1, width=16, tokens=64, stacks=Stacks(depth=0), side_stream=3)
    return snapshot_of(allocator)


def _records(value: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if where == "trace":
        return value["device_traces"][0]
    return value["segments"] if where == "segment" else value["segments"][0].get("blocks")


# What does not add up


def trained(**options: Any) -> dict[str, Any]:
    allocator = CachingAllocator(**options)
    train(allocator, layers=2, steps=1, width=64, tokens=256)
    return snapshot_of(allocator)


def test_a_whole_file_has_no_findings(tmp_path):
    history = replayed(trained(), tmp_path)
    assert history.findings == ()
    assert history.live[0] == 0


def _shift_block(value):
    value["segments"][0]["blocks"][1]["address"] += 512


def _shrink_block(value):
    value["segments"][0]["blocks"][0]["size"] -= 512


def _reverse_blocks(value):
    value["segments"][0]["blocks"].reverse()


def _repeat_block(value):
    value["segments"][0]["blocks"].insert(0, value["segments"][0]["blocks"][0])


def _repeat_segment(value):
    value["segments"].append(value["segments"][0])


def _overlapping_segments(value):
    value["segments"].append({**value["segments"][1], "address": value["segments"][1]["address"] + 512})


def _odd_state(value):
    value["segments"][0]["blocks"][0]["state"] = "haunted"


def _time_backwards(value):
    value["device_traces"][0][5]["time_us"] = 1


def _unknown_action(value):
    value["device_traces"][0].insert(3, {"action": "dance", "addr": 0, "size": 0})


def _repeat_alloc(value):
    trace = value["device_traces"][0]
    at = next(index for index, entry in enumerate(trace) if entry["action"] == "alloc")
    trace.insert(at + 1, dict(trace[at]))


def _repeat_free(value):
    trace = value["device_traces"][0]
    at = next(index for index, entry in enumerate(trace) if entry["action"] == "free_completed")
    trace.insert(at + 1, dict(trace[at]))


def _repeat_request(value):
    trace = value["device_traces"][0]
    at = next(index for index, entry in enumerate(trace) if entry["action"] == "free_requested")
    trace.insert(at + 1, dict(trace[at]))


def _lose_request(value):
    trace = value["device_traces"][0]
    del trace[next(index for index, entry in enumerate(trace) if entry["action"] == "free_requested")]


def _lose_segment(value):
    trace = value["device_traces"][0]
    del trace[next(index for index, entry in enumerate(trace) if entry["action"] == "segment_alloc")]


def _invent_segment(value):
    value["device_traces"][0].append(
        {"action": "segment_alloc", "addr": 2**40, "size": 2**40, "stream": 0, "frames": []}
    )


def _cut_end(value):
    del value["device_traces"][0][-40:]


def _cut_start(value):
    del value["device_traces"][0][:40]


def _stranger(value):
    value["device_traces"][0].append({"action": "alloc", "addr": 64, "size": 64, "stream": 0, "frames": []})


def _no_segments(value):
    value["segments"] = []
    value["device_traces"][0] = [
        entry for entry in value["device_traces"][0] if not entry["action"].startswith("segment")
    ]


def _overlapping_blocks(value):
    trace = value["device_traces"][0]
    first = next(entry for entry in trace if entry["action"] == "alloc")
    trace.append({**first, "addr": first["addr"] + 16})


def _other_size(value):
    trace = value["device_traces"][0]
    next(entry for entry in reversed(trace) if entry["action"] == "free_completed")["size"] += 7


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_shift_block, "blocks do not tile"),
        (_shrink_block, "blocks do not tile"),
        (_reverse_blocks, "addresses go backwards"),
        (_repeat_block, "addresses repeat"),
        (_repeat_segment, "segments repeat"),
        (_overlapping_segments, "segments overlap"),
        (_odd_state, "unknown state"),
        (_time_backwards, "time goes backwards"),
        (_unknown_action, "unknown action"),
        (_repeat_alloc, "allocated twice"),
        (_repeat_free, "freed while not alive"),
        (_repeat_request, "freed twice"),
        (_lose_request, "freed without a request"),
        (_invent_segment, "segments do not add up"),
        (_cut_end, "alive in the trace only"),
        (_cut_start, "alive at the start"),
        (_stranger, "outside every segment"),
        (_no_segments, "no segments"),
        (_overlapping_blocks, "blocks overlap"),
        (_other_size, "size differs"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_what_does_not_add_up_is_a_finding(spoil: Callable[[dict[str, Any]], None], expected: str, tmp_path):
    value = copy.deepcopy(trained())
    spoil(value)
    history = replayed(value, tmp_path)
    assert expected in kinds(history)
    finding = next(finding for finding in history.findings if finding.kind == expected)
    assert finding.count >= 1
    assert finding.message
    assert device_figures(history).peak_live_nbytes > 0


def test_a_segment_allocated_before_the_history_counts_as_reserved(tmp_path):
    value = trained()
    _lose_segment(value)
    history = replayed(value, tmp_path)
    assert history.reserved[0] > 0
    assert history.reserved[-1] == sum(segment["total_size"] for segment in value["segments"])


def test_a_cut_trace_still_knows_what_was_alive(tmp_path):
    """The ring has overwritten its first entries: blocks only the segments know are alive from the start."""
    whole = Witness()
    train(whole, layers=3, steps=2, width=64, tokens=256)
    value = snapshot_of(whole)
    value["device_traces"][0] = value["device_traces"][0][-30:]
    history = replayed(value, tmp_path)
    assert list(history.live) == whole.alive[-31:]
    early = [block for block in history.blocks if block.birth == 0]
    assert sum(block.nbytes for block in early) == history.live[0]
    assert all(block.frames for block in early if block.death == history.steps and block.nbytes > MIB)


def test_addresses_used_again_are_other_blocks(tmp_path):
    allocator = CachingAllocator()
    first = allocator.alloc(1000)
    allocator.free(first)
    assert allocator.alloc(700) == first
    history = replayed(snapshot_of(allocator), tmp_path)
    assert [(one.address, one.nbytes, one.birth, one.death) for one in history.blocks] == [
        (first, 1000, 2, 4),
        (first, 700, 5, 6),
    ]


def test_a_block_waiting_for_a_stream_is_alive_until_it_is_complete(tmp_path):
    allocator = CachingAllocator()
    waits = allocator.alloc(5000, stream=7)
    allocator.free(waits, waits=True)
    other = allocator.alloc(300)
    allocator.complete(waits)
    allocator.free(other, waits=True)
    history = replayed(snapshot_of(allocator), tmp_path)
    figures = device_figures(history)
    assert figures.peak_live_nbytes == 5300
    assert figures.pending_peak_nbytes == 5000
    assert figures.stream_peaks_nbytes == {0: 300, 7: 5000}
    assert history.live[-1] == 300  # pending at the end: not yet free again
    assert history.findings == ()


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_a_history_that_leaves_out_an_action_still_frees(left_out, tmp_path):
    """``_record_memory_history(skip_actions=[...])`` does that."""
    value = trained()
    whole = device_figures(replayed(value, tmp_path))
    value["device_traces"][0] = [one for one in value["device_traces"][0] if one["action"] != left_out]
    history = replayed(value, tmp_path)
    assert kinds(history) == {"not recorded"}
    assert left_out in history.findings[0].message
    assert device_figures(history).peak_live_nbytes == whole.peak_live_nbytes
    assert device_figures(history).end_live_nbytes == whole.end_live_nbytes


def test_running_out_of_memory_says_whether_fragmentation_was_at_fault(tmp_path):
    allocator = fragmented()
    with pytest.raises(OutOfMemoryError):
        allocator.alloc(24 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.alloc(48 * MIB)
    one, two = replayed(snapshot_of(allocator), tmp_path).out_of_memory
    assert (one.nbytes, one.live_nbytes, one.reserved_nbytes, one.free_nbytes) == (
        24 * MIB,
        30 * MIB,
        60 * MIB,
        4 * MIB,
    )
    assert one.fits_unfragmented
    assert not two.fits_unfragmented


def test_rounding_is_the_allocators(tmp_path):
    allocator = CachingAllocator()
    for nbytes in (1, 512, 513, 1000):
        allocator.alloc(nbytes)
    history = replayed(snapshot_of(allocator), tmp_path)
    figures = device_figures(history)
    assert figures.peak_live_nbytes == 2026
    assert figures.peak_rounded_nbytes == 512 + 512 + 1024 + 1024 == figures.end.active_nbytes
    assert sum(item.nbytes for item in as_problem(history, 256).lifetimes) == 256 + 512 + 768 + 1024


# Forms of the file


def test_several_devices_are_kept_apart(tmp_path):
    one, three = CachingAllocator(device=1), CachingAllocator(device=3)
    train(one, layers=1, steps=1, width=32, tokens=64)
    train(three, layers=2, steps=1, width=32, tokens=64)
    taken = read(snapshot_of(one, three, devices=8), tmp_path)
    assert [record.device for record in taken.devices] == [1, 3]
    assert [len(record.events) for record in taken.devices] == [len(one.entries), len(three.entries)]
    assert [replay(record).findings for record in taken.devices] == [(), ()]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_json_say_the_same(tmp_path, protocol):
    value = trained()
    pickled = read(value, tmp_path, protocol)
    assert pickled.form == f"pickle, protocol {protocol}"
    (tmp_path / "taken.json").write_text(json.dumps(value))
    text = read_snapshot(tmp_path / "taken.json")
    assert text.form == "JSON"
    assert replay(text.devices[0]) == replay(pickled.devices[0])


def test_a_bare_list_of_segments_says_how_things_stood(tmp_path):
    value = trained()
    taken = read(value["segments"], tmp_path)
    assert not taken.traced
    history = replay(taken.devices[0])
    whole = replayed(value, tmp_path)
    assert history.live == (whole.live[-1],)
    assert history.reserved == (whole.reserved[-1],)
    assert kinds(history) == {"no trace"}


def test_blocks_with_a_history_are_read(tmp_path):
    """As PyTorch 1.12 to 2.0 wrote them: no frames or requested size of their own, no addresses."""
    frames = [{"filename": "old.py", "line": 3, "name": "f"}]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [{"addr": 0, "real_size": 1000, "frames": frames}]},
        {"size": 512, "state": "active_awaiting_free", "history": [{"addr": 0, "real_size": 512}]},
        {"size": 2 * MIB - 1536, "state": "inactive"},
    ]
    segment = {"address": 4096, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "blocks": blocks}
    history = replay(read([segment], tmp_path).devices[0])
    assert [(one.address, one.nbytes) for one in history.blocks] == [(4096, 1000), (5120, 512)]
    assert history.blocks[0].frames == frames
    assert kinds(history) == {"no trace"}


def test_profiler_exports_are_read(tmp_path):
    """PyTorch's own exporter leaves out times, and of idle blocks all but size and state."""
    alloc = {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "frames": [], "category": "activation"}
    free = {"addr": 4096, "size": 100, "stream": 0, "frames": []}
    trace = [alloc, {"action": "free_requested", **free}, {"action": "free_completed", **free}]
    idle = {"size": 100, "state": "inactive"}
    segment = {"device": 0, "address": 4096, "total_size": 100, "stream": 0, "blocks": [idle]}
    history = replayed({"device_traces": [trace], "segments": [segment]}, tmp_path)
    assert history.live == (0, 100, 100, 0)
    assert history.findings == ()
    assert device_figures(history).by_category[0].name == "activation"


def test_one_list_for_every_device_is_not_walked_forever(tmp_path):
    entry = {"action": "snapshot", "addr": 0, "size": 0}
    value = {"segments": [], "device_traces": [[entry] * 2000] * 4000}
    with pytest.raises(SnapshotFileError, match="repeats its records"):
        read(value, tmp_path)
    segment = {"address": 0, "total_size": 0, "blocks": [{"size": 0, "state": "inactive"}] * 3000}
    with pytest.raises(SnapshotFileError, match="repeats its records"):
        read([segment] * 3000, tmp_path)


def test_frames_choose_the_users_line(tmp_path):
    allocator = CachingAllocator()
    train(allocator, layers=2, steps=1, width=64, tokens=256)
    history = replayed(snapshot_of(allocator), tmp_path)
    figures = device_figures(history, largest=3)
    assert len(figures.largest) == 3
    assert [holder.block.nbytes for holder in figures.largest] == sorted(
        (block.nbytes for block in history.blocks if block.birth <= figures.peak_step < block.death), reverse=True
    )[:3]
    holder = figures.largest[0]
    assert str(holder.place).startswith("/home/someone/model.py:")
    assert holder.stack[0].file.endswith("torch/nn/modules/linear.py")
    everywhere = device_figures(history, largest=10_000).by_place
    assert sum(group.nbytes for group in everywhere) == figures.peak_live_nbytes
    assert sum(group.blocks for group in everywhere) == figures.peak_blocks


@pytest.mark.slow
def test_a_long_history_is_read_in_time_and_memory(tmp_path):
    """Half a million events; the figures for 100 MB are in docs/out-of-memory.md."""
    import time
    import tracemalloc

    allocator = CachingAllocator()
    train(allocator, layers=12, steps=600, stacks=Stacks(depth=30))
    value = snapshot_of(allocator)
    path = tmp_path / "long.pickle"
    path.write_bytes(pickle.dumps(value, protocol=4))
    events, entries = len(allocator.entries), random.Random(0).sample(range(len(allocator.entries)), 5)
    assert events > 150_000
    del value
    started = time.process_time()
    record = read_snapshot(path).devices[0]
    history = replay(record)
    seconds = time.process_time() - started
    assert history.steps == events + 1
    assert [record.events[index].nbytes for index in entries] == [allocator.entries[index]["size"] for index in entries]
    assert seconds < 60e-6 * events + 2  # measured: 9 µs an event
    del record, history
    tracemalloc.start()
    read_snapshot(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * path.stat().st_size
