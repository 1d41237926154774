"""Settings chosen by timing: with a timer of our own, as there is no device here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from runtime.kernels.triton import norm, tune
from runtime.kernels.triton.launch import Launch


def bound(rows: int = 6, width: int = 43, dtype: torch.dtype = torch.float32) -> Launch:
    x, out, rstd = torch.ones(rows, width, dtype=dtype), torch.zeros(rows, width, dtype=dtype), torch.zeros(rows)
    launch = norm.launch(x, None, None, out, None, rstd, 1e-5)
    assert launch is not None
    return launch


class Clock:
    """Says how long a choice takes, and counts; runs the launch first."""

    def __init__(self, seconds: dict[tuple[int, int], float], *, fails: tuple[tuple[int, int], ...] = ()) -> None:
        self.seconds, self.fails, self.asked = seconds, fails, []

    def __call__(self, launch: Launch) -> float:
        choice = launch.setting.num_warps, launch.setting.num_stages
        self.asked.append(choice)
        launch()
        if choice in self.fails:
            raise RuntimeError("out of resources")
        return self.seconds.get(choice, 1.0)


def test_the_fastest_is_taken_once_and_kept(tmp_path):
    launch, path = bound(), tmp_path / "deep" / "settings.json"
    static = launch.setting.num_warps
    clock = Clock({(static * 2, 1): 0.5})
    (chosen,) = tune.tune([launch], clock, path, "chip")
    assert (chosen.setting.num_warps, chosen.setting.num_stages) == (static * 2, 1)
    assert chosen.setting.constants == launch.setting.constants
    assert chosen.grid == launch.grid
    assert clock.asked[0] == (static, 1)
    assert len(clock.asked) == len(set(clock.asked))
    again = Clock({})
    (second,) = tune.tune([bound()], again, path, "chip")
    assert not again.asked
    assert second.setting == chosen.setting


def test_what_the_launch_works_on_is_as_before():
    launch = bound()
    tune.tuned(launch, Clock({}), "chip", {})
    assert launch.arguments[3].count_nonzero() == 0  # the result, which the timed launches wrote
    launch()
    assert launch.arguments[3].count_nonzero() > 0


def test_a_little_faster_is_not_enough_and_what_fails_is_passed_over():
    launch = bound()
    static = launch.setting.num_warps
    close = Clock({(static * 2, 1): 0.99})
    assert tune.tuned(launch, close, "chip", {}).setting == launch.setting
    failing = Clock({(static * 2, 1): 0.1}, fails=((static * 2, 1),))
    assert tune.tuned(launch, failing, "chip", {}).setting == launch.setting


def test_keys_tell_apart_what_may_differ():
    keys = {
        tune.key_of(bound(), "chip"),
        tune.key_of(bound(), "another"),
        tune.key_of(bound(dtype=torch.float16), "chip"),
        tune.key_of(bound(width=300), "chip"),
        tune.key_of(bound(rows=600), "chip"),
    }
    assert len(keys) == 5
    assert tune.key_of(bound(rows=600), "chip") == tune.key_of(bound(rows=700), "chip")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 3}', '{"a": [1]}', '{"a": ["x", 1]}', '{"a": [true, 1]}'])
def test_a_damaged_file_counts_as_none(tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    assert tune.read(path) == {}
    tune.tune([bound()], Clock({}), path, "chip")
    assert len(json.loads(path.read_text())) == 1


def test_a_kept_choice_that_is_no_candidate_is_not_used(tmp_path):
    launch, path = bound(), tmp_path / "settings.json"
    path.write_text(json.dumps({tune.key_of(launch, "chip"): [64, 9]}))
    (chosen,) = tune.tune([launch], Clock({}), path, "chip")
    assert chosen.setting == launch.setting


def test_where_no_file_can_be_written_it_runs_all_the_same(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    (chosen,) = tune.tune([bound()], Clock({}), blocked / "settings.json", "chip")
    assert isinstance(chosen, Launch)


def test_kernels_that_read_places_from_memory_are_left_alone():
    launch = bound()
    other = replace(launch, kernel=type("Kernel", (), {"fn": staticmethod(lambda: None)})())
    clock = Clock({})
    assert tune.tuned(other, clock, "chip", {}) is other
    assert not clock.asked


def test_off_by_default_and_never_interpreted(monkeypatch):
    monkeypatch.delenv("ARENAPLAN_AUTOTUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "INTERPRETED", False)
    assert not tune.enabled()
    monkeypatch.setenv("ARENAPLAN_AUTOTUNE", "1")
    assert tune.enabled()
    monkeypatch.setattr(tune, "INTERPRETED", True)
    assert not tune.enabled()


def test_a_runtime_off_the_gpu_times_nothing(monkeypatch):
    from planner import plan, trace
    from runtime import ArenaRuntime

    monkeypatch.setattr(tune, "enabled", lambda: True)
    monkeypatch.setattr(tune, "tune", lambda _: pytest.fail("nothing to time on"))
    x = torch.randn(5, 7)
    run = ArenaRuntime(plan(trace(lambda y: y.softmax(-1), (x,), mode="forward")), kernels="triton")
    torch.testing.assert_close(run(x), x.softmax(-1))


def test_a_runtime_runs_what_was_chosen(monkeypatch):
    """The views say they lie on a GPU; the program that comes back is the one that runs."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from runtime import executor

    monkeypatch.setattr(tune, "enabled", lambda: True)
    monkeypatch.setattr(tune, "tune", lambda program: [*program, "chosen"])
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    views = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    assert executor._tuned([], views) == ["chosen"]
