"""``arenaplan snapshot``: what it prints, and how it refuses."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from caching_allocator import CachingAllocator, OutOfMemoryError, fragmented, snapshot_of, train
from typer.testing import CliRunner

import planner
from planner.bounds import lower_bound
from planner.colouring import colour
from planner.errors import SnapshotFileError
from planner.packing_file import read_problem
from planner.snapshot import read_snapshot
from runtime.cli.pack import pack
from runtime.cli.snapshot import snapshot

runner = CliRunner()
app = typer.Typer()
app.command("snapshot")(snapshot)
app.command("pack")(pack)

MIB = 2**20


def run(*arguments: object):
    return runner.invoke(app, ["snapshot", *(str(argument) for argument in arguments)])


def taken(**options: Any) -> dict[str, Any]:
    allocator = CachingAllocator(**options)
    train(allocator, layers=3, steps=2, width=128, tokens=512)
    return snapshot_of(allocator)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "taken.pickle"
    path.write_bytes(pickle.dumps(taken(), protocol=4))
    return path


def one_error(result) -> str:
    """The only line on standard error; nothing stands on standard output."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("arenaplan: error: ")
    return line


def test_json_has_the_figures(saved):
    result = run(saved, "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["schema"] == "arenaplan.snapshot/1"
    assert found["form"] == "pickle, protocol 4"
    (device,) = found["devices"]
    value = taken()
    assert device["events"] == len(value["device_traces"][0])
    assert device["reserved_bytes"] == sum(segment["total_size"] for segment in value["segments"])
    assert device["end_live_bytes"] == sum(segment["requested_size"] for segment in value["segments"])
    assert device["end"]["active_bytes"] == sum(segment["active_size"] for segment in value["segments"])
    assert device["peak_live_bytes"] <= device["peak_rounded_bytes"] <= device["peak_reserved_bytes"]
    assert device["peak_live_bytes"] <= device["lower_bound_bytes"] <= device["arena_bytes"]
    assert device["lower_bound_bytes"] <= device["peak_rounded_bytes"]
    assert device["saved_bytes"] == device["peak_reserved_bytes"] - device["arena_bytes"] > 0
    assert device["fragmentation"] == pytest.approx(1 - device["peak_live_bytes"] / device["peak_reserved_bytes"])
    assert device["findings"] == []
    assert device["seconds"] == pytest.approx(7e-6 * (device["events"] - 1))
    largest = device["largest"]
    assert [holder["bytes"] for holder in largest] == sorted((holder["bytes"] for holder in largest), reverse=True)
    assert largest[0]["place"].startswith("/home/someone/model.py:")
    assert largest[0]["frames"][0] == {
        "filename": "/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py",
        "line": 125,
        "name": "forward",
    }


def test_the_text_says_the_same(saved):
    device = json.loads(run(saved, "--json").stdout)["devices"][0]
    result = run(saved, "--top", 3)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"Device 0: {device['events']:,} events" in lines[2]
    assert any(line.startswith("  peak live ") for line in lines)
    assert any(line.startswith("  planned arena ") and "equals the lower bound" in line for line in lines)
    assert sum("/home/someone/model.py:" in line for line in lines) == 6
    assert "does not add up" not in result.stdout


def test_the_csv_is_the_problem_that_was_packed(saved, tmp_path):
    csv = tmp_path / "trace.csv"
    device = json.loads(run(saved, "--json", "--csv", csv).stdout)["devices"][0]
    assert csv.read_text().startswith("id,lower,upper,size\nblock0,")
    problem = read_problem(csv)
    assert len(problem.lifetimes) == device["blocks"]
    assert lower_bound(problem) == device["lower_bound_bytes"]
    packed = runner.invoke(app, ["pack", str(csv), "--json"])
    assert json.loads(packed.stdout)["peak_bytes"] == device["arena_bytes"]


def test_the_alignment_is_what_sizes_are_rounded_to(saved, tmp_path):
    csv = tmp_path / "trace.csv"
    device = json.loads(run(saved, "--json", "--csv", csv, "--alignment", 512).stdout)["devices"][0]
    assert device["alignment"] == 512
    assert device["lower_bound_bytes"] == device["peak_rounded_bytes"]
    assert all(item.nbytes % 512 == 0 for item in read_problem(csv).lifetimes)


def test_devices_are_reported_one_by_one(tmp_path):
    one, two = CachingAllocator(device=0), CachingAllocator(device=5)
    train(one, layers=1, steps=1, width=32, tokens=64)
    train(two, layers=2, steps=1, width=32, tokens=64)
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(one, two, devices=8), protocol=4))
    assert [device["device"] for device in json.loads(run(path, "--json").stdout)["devices"]] == [0, 5]
    assert [device["device"] for device in json.loads(run(path, "--json", "--device", 5).stdout)["devices"]] == [5]
    assert "the file has the devices 0, 5" in one_error(run(path, "--device", 3))
    assert "choose one with --device" in one_error(run(path, "--csv", tmp_path / "t.csv"))
    assert not (tmp_path / "t.csv").exists()
    assert run(path, "--csv", tmp_path / "t.csv", "--device", 5).exit_code == 0


def test_a_failure_is_explained(tmp_path):
    allocator = fragmented()
    with pytest.raises(OutOfMemoryError):
        allocator.alloc(24 * MIB)
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(allocator), protocol=4))
    assert "24.00 MiB asked for" in run(path).stdout
    assert "24.00 MiB asked for, which would have fitted unfragmented" in run(path).stdout
    (failure,) = json.loads(run(path, "--json").stdout)["devices"][0]["out_of_memory"]
    assert failure["fits_unfragmented"] is True
    assert failure["requested_bytes"] == 24 * MIB


def test_findings_are_shown_and_the_work_is_done(tmp_path):
    value = copy.deepcopy(taken())
    value["segments"][0]["blocks"][0]["size"] += 512
    value["device_traces"][0] = value["device_traces"][0][20:]
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(value, protocol=4))
    result = run(path)
    assert result.exit_code == 0
    assert "What does not add up, or was not recorded" in result.stdout
    assert "blocks do not tile (" in result.stdout
    assert "alive at the start (" in result.stdout
    found = {finding["kind"] for finding in json.loads(run(path, "--json").stdout)["devices"][0]["findings"]}
    assert found >= {"blocks do not tile", "alive at the start"}


def test_a_list_of_segments_is_reported_without_a_plan(tmp_path):
    path = tmp_path / "segments.pickle"
    path.write_bytes(pickle.dumps(taken()["segments"], protocol=4))
    result = run(path)
    assert result.exit_code == 0
    assert "planned arena" not in result.stdout
    assert "no trace" in result.stdout
    device = json.loads(run(path, "--json").stdout)["devices"][0]
    assert device["planned"] is False
    assert device["arena_bytes"] is None
    assert device["end_live_bytes"] == device["peak_live_bytes"] > 0
    assert "no trace to pack" in one_error(run(path, "--csv", tmp_path / "t.csv"))


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    allocator = CachingAllocator()
    allocator.alloc(MIB, [{"filename": "\x1b[2Jevil.py", "line": 3, "name": "a\nb\x07"}], category="\x1b[31mred\ud800")
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(snapshot_of(allocator), protocol=4))
    text = run(path).stdout
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil.py:3 a\ufffdb" in text
    assert run(path, "--json", "--svg", tmp_path / "odd.svg").exit_code == 0


@pytest.mark.parametrize(
    "entries", [[("snapshot", 0)], [("segment_alloc", 2 * MIB)], [("alloc", 0)], [("oom", 5 * MIB)]]
)
def test_a_trace_without_bytes_is_no_error(entries, tmp_path):
    trace = [{"action": action, "addr": 4096, "size": size, "stream": 0, "frames": []} for action, size in entries]
    path = tmp_path / "few.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}, protocol=4))
    for more in ((), ("--json", "--csv", tmp_path / "t.csv", "--svg", tmp_path / "t.svg")):
        result = run(path, *more)
        assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["devices"][0]["arena_bytes"] == 0


def test_the_largest_size_there_is_is_refused_by_the_packing(tmp_path):
    trace = [{"action": "alloc", "addr": 4096, "size": 2**63 - 1, "stream": 0, "frames": []}]
    path = tmp_path / "vast.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}, protocol=4))
    assert "larger than 9223372036854775807" in one_error(run(path))


def test_ctrl_c_during_the_packing_leaves_the_report(saved, monkeypatch):
    from runtime.cli import snapshot as module

    def stopped(problem: Any, **options: Any) -> Any:
        return replace(colour(problem, **options), interrupted=True)

    monkeypatch.setattr(module, "colour", stopped)
    result = run(saved)
    assert result.exit_code == 1
    assert "planned arena" in result.stdout
    assert "interrupted" in result.stderr


class _Malice:
    def __reduce__(self):
        return os.abort, ()


def _with(change: dict[str, Any], where: str = "trace") -> bytes:
    value = copy.deepcopy(taken())
    records = {
        "trace": value["device_traces"][0],
        "segment": value["segments"],
        "block": value["segments"][0]["blocks"],
    }[where]
    records[3 if where == "trace" else 0].update(change)
    return pickle.dumps(value, protocol=4)


WHOLE = pickle.dumps(taken(), protocol=4)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "blank": (b" \n", "it is empty"),
    "half": (WHOLE[: len(WHOLE) // 2], "cut off"),
    "all but the last byte": (WHOLE[:-1], "cut off"),
    "gzip": (gzip.compress(WHOLE), "gunzip it first"),
    "zip": (b"PK\x03\x04" + b"\x00" * 50, "zip archive"),
    "html": (b"<!DOCTYPE html><html></html>", "a page or picture"),
    "text": (b"step,bytes\n1,2\n", "neither a pickle"),
    "an image": (b"\x89PNG\r\n\x1a\n" + b"\x00" * 20, "neither a pickle"),
    "hostile": (pickle.dumps({"segments": [], "device_traces": [[_Malice()]]}), "nothing was run"),
    "protocol 0": (pickle.dumps(taken(), protocol=0), "protocol 0 or 1"),
    "protocol 1": (pickle.dumps(taken(), protocol=1), "protocol 0 or 1"),
    "protocol 9": (b"\x80\x09" + WHOLE[2:], "protocol 9"),
    "other json": (b'{"name": "x"}', "neither segments nor device_traces (found: 'name')"),
    "json list": (b"[1, 2]", "segments[0]: 1 is not a dict"),
    "empty json list": (b"[]", "it has no segment"),
    "half a json": (json.dumps(taken()).encode()[:1000], "not well-formed JSON"),
    "deep json": (b"[" * 100_000, "nested too deeply"),
    "json with NaN": (b'{"segments": [], "device_traces": [[{"action": "alloc", "size": NaN}]]}', "NaN"),
    "json with a huge number": (b"[" + b"9" * 5000 + b"]", "thousands of digits"),
    "latin json": (b'{"name": "\xe9"}', "not UTF-8"),
    "a number": (pickle.dumps(3), "it holds 3, not a dict"),
    "a string": (pickle.dumps("x" * 1000), "it holds 'xxx"),
    "empty dict": (pickle.dumps({}), "found: nothing"),
    "empty trace": (pickle.dumps({"segments": [], "device_traces": [[], []]}), "_record_memory_history()"),
    "no history": (pickle.dumps({**taken(), "device_traces": [[]]}), "_record_memory_history()"),
    "trace no list": (pickle.dumps({"segments": [], "device_traces": [{}]}), "device_traces[0]: a dict of 0"),
    "segments no list": (pickle.dumps({"segments": 3, "device_traces": []}), "segments: 3 is not a list"),
    "negative size": (_with({"size": -5}), "device_traces[0][3].size: -5 is not between 0"),
    "negative block": (_with({"size": -5}, "block"), "segments[0].blocks[0].size: -5"),
    "negative segment": (_with({"total_size": -5}, "segment"), "segments[0].total_size: -5"),
    "huge size": (_with({"size": 2**63}), "device_traces[0][3].size: 9223372036854775808"),
    "NaN size": (_with({"size": float("nan")}), "device_traces[0][3].size: nan is not a whole number"),
    "NaN time": (_with({"time_us": float("nan")}), "device_traces[0][3].time_us: nan is not a time"),
    "endless time": (_with({"time_us": float("inf")}), "device_traces[0][3].time_us: inf is not a time"),
    "size a word": (_with({"size": "12"}), "device_traces[0][3].size: '12' is not a whole number"),
    "size true": (_with({"size": True}), "size: True is not a whole number"),
    "size missing": (_with({"size": None}), "device_traces[0][3].size: is missing"),
    "action a number": (_with({"action": 3}), "device_traces[0][3].action: 3 is not a string"),
    "no address": (_with({"addr": None}), "device_traces[0][3].addr: is missing"),
    "frames a number": (_with({"frames": 3}), "device_traces[0][3].frames: 3 is not a list"),
    "odd pool": (_with({"segment_pool_id": 3}, "segment"), "segment_pool_id: 3 is not a pair"),
    "odd device": (_with({"device": 10**9}, "segment"), "segments[0].device: 1000000000"),
    "blocks a number": (_with({"blocks": 3}, "segment"), "segments[0].blocks: 3 is not a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_exit_2_with_one_line(name, tmp_path):
    data, message = BAD[name]
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)
    for more in ((), ("--json",)):
        line = one_error(run(path, *more))
        assert f"{path}: not a usable memory snapshot: " in line
        assert message in line
        assert len(line) < len(str(path)) + 300


def test_bad_calls_exit_2_with_one_line(saved, tmp_path, monkeypatch):
    assert "No such file" in one_error(run(tmp_path / "missing.pickle"))
    assert "Is a directory" in one_error(run(tmp_path))
    assert "it is a device" in one_error(run("/dev/zero"))
    assert "--time-limit nan" in one_error(run(saved, "--time-limit", "nan"))
    assert "--alignment 3: use a power of two" in one_error(run(saved, "--alignment", 3))
    assert "--alignment 0" in one_error(run(saved, "--alignment", 0))
    assert "not written: there is no directory" in one_error(run(saved, "--csv", tmp_path / "missing" / "t.csv"))
    assert run(saved, "--top", -1).exit_code == 2
    assert run().exit_code == 2

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "Permission denied" in one_error(run(saved))


def test_half_files_of_every_length_are_refused(tmp_path):
    allocator = CachingAllocator()
    allocator.alloc(100, [{"filename": "f.py", "line": 1, "name": "f"}])
    for protocol in (2, 4):
        data = pickle.dumps(snapshot_of(allocator), protocol=protocol)
        for length in range(len(data)):
            path = tmp_path / "half.pickle"
            path.write_bytes(data[:length])
            with pytest.raises(SnapshotFileError, match=r"cut off|empty|protocol"):
                read_snapshot(path)


def test_no_torch_is_imported(saved, tmp_path):
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "from runtime.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "snapshot", str(saved)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(Path(planner.__file__).parents[1]), "PYTHONIOENCODING": "utf-8"},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "False\n"
    assert "planned arena" in done.stdout
