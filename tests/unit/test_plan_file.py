"""Plans survive a round trip, and nothing else loads."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import TRACED, odd_arguments, small_plan, synthetic_plan, traced_plan

from planner import files, plan_file, plan_schema
from planner.errors import PlanFileError, PlannerError, VerificationError
from planner.graph import Dtype, Operation, TensorRef
from planner.plan import Plan, Unplanned
from planner.plan_file import load_plan, save_plan


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(small_plan(), path)
    return path


def with_arguments(*arguments: Any, keywords: tuple[tuple[str, Any], ...] = ()) -> Plan:
    """The small plan with more arguments for its last operation."""
    plan = small_plan()
    last = plan.graph.operations[-1]
    last = replace(last, arguments=(*last.arguments, *arguments), keywords=keywords)
    return replace(plan, graph=replace(plan.graph, operations=(*plan.graph.operations[:-1], last)))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# Round trips


@pytest.mark.parametrize(
    "make",
    [
        small_plan,
        lambda: synthetic_plan(500),
        lambda: with_arguments(*odd_arguments()),
        *(partial(traced_plan, *options) for options in TRACED),
    ],
)
def test_a_loaded_plan_equals_the_saved_one_and_saves_to_the_same_bytes(make, tmp_path):
    plan, first, second = make(), tmp_path / "first.json", tmp_path / "second.json"
    save_plan(plan, first)
    loaded = load_plan(first)
    save_plan(loaded, second)
    assert loaded == plan
    assert loaded.plan_seconds is None
    assert first.read_bytes() == second.read_bytes()


def test_plan_save_and_plan_load_take_strings(tmp_path):
    path = str(tmp_path / "plan.json")
    plan = replace(small_plan(), slices=4, formula=None, unplanned=(Unplanned("aten.sum", 12),), plan_seconds=1.5)
    plan.save(path)
    assert Plan.load(path) == plan


def test_types_of_arguments_survive(tmp_path):
    plan = with_arguments(*odd_arguments(), keywords=(("dtype", Dtype("float16")), ("scale", 1.0)))
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json").graph.operations[-1]
    wanted = plan.graph.operations[-1]
    assert [repr(argument) for argument in loaded.arguments] == [repr(argument) for argument in wanted.arguments]
    assert repr(loaded.keywords) == repr(wanted.keywords)


def test_nan_arguments_survive(tmp_path):
    save_plan(with_arguments(math.nan, (math.nan,)), tmp_path / "plan.json")
    last = load_plan(tmp_path / "plan.json").graph.operations[-1].arguments
    assert isinstance(last[-2], float)
    assert math.isnan(last[-2])
    assert isinstance(last[-1], tuple)
    assert math.isnan(last[-1][0])


_scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(["float32", "int64", "bool"]).map(Dtype),
    st.integers(0, 10).map(TensorRef),
)
_arguments = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)


@given(st.lists(_arguments, max_size=5))
def test_any_argument_survives(arguments):
    encoded = json.loads(json.dumps([plan_schema.encode_argument(argument) for argument in arguments]))
    decoded = [plan_schema.decode_argument(value, 11) for value in encoded]
    assert repr(decoded) == repr(arguments)


def test_layout_of_the_json_does_not_matter(saved):
    edit(saved, lambda _: None)
    assert load_plan(saved) == small_plan()


# Damage


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_flipped_byte_never_loads_a_different_plan(saved, tmp_path, data):
    content = bytearray(saved.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(content)
    # What still loads differs in white space, or in another spelling of the same character.
    with contextlib.suppress(PlannerError):
        assert load_plan(damaged) == small_plan()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(saved, tmp_path, keep):
    content = saved.read_bytes().rstrip()
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(PlanFileError):
        load_plan(damaged)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
)
def test_noise_is_refused(tmp_path, content):
    path = tmp_path / "noise.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError):
        load_plan(path)


def set_in(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("schema", to="arenaplan/plan/99"), r"schema: 'arenaplan/plan/99' is unknown"),
        (lambda d: d.pop("schema"), r"schema"),
        (lambda d: d.pop("tensors"), r"tensors"),
        (set_in("extra", to=1), r"unknown field extra"),
        (set_in("storages", 2, "colour", to="red"), r"storages\[2\].*unknown field colour"),
        (set_in("storages", 3, "bytes", to=-1), r"storages\[3\]\.bytes: expected int >= 0"),
        (set_in("storages", 3, "bytes", to=2**63), r"storages\[3\]\.bytes"),
        (set_in("storages", 3, "bytes", to=2**80), r"storages\[3\]\.bytes"),
        (set_in("storages", 3, "bytes", to=2**62 + 1), r"storages\[3\]\.bytes"),
        (set_in("storages", 3, "bytes", to=1.5), r"storages\[3\]\.bytes: expected int"),
        (set_in("storages", 3, "bytes", to=True), r"storages\[3\]\.bytes: expected int, got bool"),
        (set_in("storages", 3, "bytes", to="8192"), r"storages\[3\]\.bytes: expected int, got str"),
        (set_in("storages", 3, "role", to="friend"), r"storages\[3\]\.role.*friend"),
        (set_in("storages", 5, "in_place_of", to=99), r"storages\[5\]\.in_place_of: 99 does not exist; there are 9"),
        (set_in("storages", to={}), r"storages: expected array, got object"),
        (set_in("tensors", 1, "storage", to=9), r"tensors\[1\]\.storage: 9 does not exist"),
        (set_in("tensors", 1, "dtype", to="float31"), r"tensor x: unknown dtype 'float31'"),
        (set_in("tensors", 1, "shape", to=[64, -16]), r"tensors\[1\]\.shape"),
        (set_in("tensors", 1, "shape", to=[2**61, 2**61]), r"tensor x: ends at byte"),
        (set_in("tensors", 1, "shape", to=[2**62] * 100_000), r"tensors\[1\]\.shape: expected array of length <= 64"),
        (set_in("tensors", 1, "name", to="w"), r"tensor w: the name is used twice"),
        (set_in("operations", 0, "arguments", 0, to={"tensor": 77}), r"operations\[0\]\.arguments\[0\]: tensor 77"),
        (set_in("operations", 0, "arguments", 0, to={"tensor": True}), r"operations\[0\]\.arguments\[0\]: expected"),
        (set_in("operations", 0, "arguments", 0, to=[[{"file": 1}]]), r"operations\[0\]\.arguments\[0\]\[0\]\[0\]"),
        (
            set_in("operations", 0, "arguments", 0, to={"dtype": "os"}),
            r"operations\[0\]\.arguments\[0\]: unknown dtype",
        ),
        (set_in("operations", 0, "arguments", 0, to=2**64), r"operations\[0\]\.arguments\[0\]: .*64 bits"),
        (set_in("operations", 0, "outputs", to=[50]), r"operations\[0\]\.outputs: 50 does not exist"),
        (set_in("operations", 0, "workspaces", to=[50]), r"operations\[0\]\.workspaces: 50 does not exist"),
        (set_in("inputs", 0, "tensor", to=-1), r"inputs\[0\]\.tensor"),
        (set_in("inputs", 0, "tensor", to=11), r"inputs\[0\]\.tensor: 11 does not exist"),
        (set_in("constants", 0, "value", to="not base64!"), r"constants\[0\]\.value"),
        (set_in("mode", to="sideways"), r"mode"),
        (set_in("alignment", to=0), r"alignment"),
        (set_in("arena_bytes", to=None), r"arena_bytes"),
        (set_in("proved_optimal", to=1), r"proved_optimal: expected bool"),
    ],
)
def test_a_wrong_field_is_named(saved, change, message):
    edit(saved, change)
    with pytest.raises(PlanFileError, match=message) as caught:
        load_plan(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(saved, literal):
    saved.write_text(saved.read_text().replace('"arena_bytes": 24832', f'"arena_bytes": {literal}'))
    with pytest.raises(PlanFileError):
        load_plan(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  \n",
        b"null",
        b"[]",
        b"3",
        b'{"schema": 3}',
        b"\x80\x04\x95",
        b"\x1f\x8b\x08\x00",
        b'{"schema": "arenaplan/plan/1"}',
        b'{"schema": "\xff"}',
        b"[" * 100_000,
        b'{"schema": "arenaplan/plan/1", "operations": ' + b"[" * 100_000,
        b'{"schema": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError):
        load_plan(path)


def test_deeply_nested_arguments_are_refused(saved):
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested]
    edit(saved, set_in("operations", 0, "arguments", 0, to=nested))
    with pytest.raises(PlanFileError, match=r"operations\[0\]\.arguments\[0\].*nested"):
        load_plan(saved)
    saved.write_text(saved.read_text().replace('"arguments": [', '"arguments": [' + "[" * 5000 + "]" * 5000 + ",", 1))
    with pytest.raises(PlanFileError, match="nested"):
        load_plan(saved)


def test_missing_files_directories_and_pipes_are_refused(tmp_path):
    with pytest.raises(PlanFileError, match="no such file"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match="directory"):
        load_plan(tmp_path)
    with pytest.raises(PlanFileError, match="cannot be read"):
        load_plan(Path("nul\0byte"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanFileError, match="no regular file"):
        load_plan(tmp_path / "pipe")


def test_a_huge_file_is_refused_before_it_is_parsed(saved, monkeypatch):
    monkeypatch.setattr(plan_file, "MAX_FILE_NBYTES", 1000)
    with pytest.raises(PlanFileError, match="larger than 1000 bytes"):
        load_plan(saved)


# Tampering


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (set_in("storages", 3, "offset", to=12544), "overlap"),
        (set_in("storages", 8, "offset", to=4352), "overlap"),
        (set_in("storages", 3, "offset", to=1), "alignment"),
        (set_in("storages", 3, "offset", to=2**40), "bounds"),
        (set_in("storages", 6, "death", to=2), "lifetime"),
        (set_in("storages", 6, "death", to=2**61), "lifetime"),
        (set_in("storages", 0, "bytes", to=2**40), "bounds"),
        (set_in("storages", 6, "in_place_of", to=None), "overlap"),
        (set_in("arena_bytes", to=256), "bounds"),
        (set_in("lower_bound_bytes", to=256), "bound"),
    ],
)
def test_a_tampered_plan_is_refused_by_the_rule_it_breaks(saved, change, rule):
    edit(saved, change)
    with pytest.raises(VerificationError) as caught:
        load_plan(saved)
    assert caught.value.rule == rule
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        set_in("operations", 0, "operator", to="aten.div.Tensor"),
        set_in("operations", 0, "keywords", to=[["alpha", 0.25]]),
        set_in("operations", 0, "source", to="other.py:1"),
        set_in("constants", 0, "value", to="AAAAAA=="),
        set_in("naive_bytes", to=0),
        set_in("formula_bytes", "target", to=1),
        set_in("strategy", to="sliced"),
        set_in("digest", to="sha256:0"),
    ],
)
def test_an_edit_that_leaves_a_valid_plan_is_refused_by_the_digest(saved, change):
    edit(saved, change)
    with pytest.raises(PlanFileError, match="digest: the file was changed"):
        load_plan(saved)


# Writing


def test_a_full_disk_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="not written: No space left") as caught:
        save_plan(synthetic_plan(50), saved)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(saved)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_saving_into_nowhere_or_over_a_directory_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="not written"):
        save_plan(small_plan(), tmp_path / "missing" / "plan.json")
    with pytest.raises(IsADirectoryError, match="not written"):
        save_plan(small_plan(), tmp_path)


def test_links_and_modes_are_kept(saved, tmp_path):
    saved.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(saved)
    save_plan(synthetic_plan(50), link)
    assert link.is_symlink()
    assert load_plan(saved) == synthetic_plan(50)
    assert saved.stat().st_mode & 0o777 == 0o640


def test_what_a_file_cannot_hold_is_not_saved(tmp_path):
    for argument, message in ((object(), "object"), (Dtype("float31"), "float31"), (2**70, "64 bits")):
        with pytest.raises(PlanFileError, match=rf"operation mm_1\[2\].*{re.escape(message)}"):
            save_plan(with_arguments(argument), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
    plan = small_plan()
    stray = replace(plan, graph=replace(plan.graph, values={"ghost": b""}))
    with pytest.raises(PlanFileError, match="ghost"):
        save_plan(stray, tmp_path / "plan.json")


def test_operations_without_results_survive(tmp_path):
    plan = small_plan()
    unused = Operation("unused", "aten.relu.default", (TensorRef(2),), (), (None,))
    graph = replace(plan.graph, operations=(*plan.graph.operations, unused))
    end = len(graph.operations)
    placements = tuple(replace(place, death=end) if place.death == end - 1 else place for place in plan.placements)
    live = small_plan().lower_bound_nbytes
    plan = replace(plan, graph=graph, placements=placements, lower_bound_nbytes=live)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
