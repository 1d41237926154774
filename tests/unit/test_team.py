"""Work on ATen's own threads: once on each, errors raised, and the pool that stands in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from concurrent.futures import Future, wait
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import team
from runtime.lanes import Section


@pytest.fixture(params=["atens", "pool"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Three threads, ATen's and those of the pool that stands in for them."""
    if request.param == "pool":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    elif not team.found():
        pytest.skip("this build of PyTorch runs on another OpenMP library")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_every_member_works_once_and_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads, timeout=60)
    seen: list[tuple[int, int, int]] = []

    def work(member: int, members: int) -> None:
        together.wait()
        seen.append((member, members, threading.get_native_id()))

    for _ in range(3):
        seen.clear()
        team.run(work)
        assert sorted(item[:2] for item in seen) == [(member, threads) for member in range(threads)]
        assert len({item[2] for item in seen}) == threads


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_member_raises_is_raised_when_all_have_ended(threads: int, error: type[BaseException]) -> None:
    ended: list[int] = []

    def work(member: int, _: int) -> None:
        if member == 1:
            raise error("of one member")
        ended.append(member)

    with pytest.raises(error, match="of one member"):
        team.run(work)
    assert sorted(ended) == [0, 2]
    team.run(lambda member, _: ended.append(member))
    assert sorted(ended) == [0, 0, 1, 2, 2]


def test_one_thread_is_the_caller() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen: list[tuple[int, int, int]] = []
        team.run(lambda member, members: seen.append((member, members, threading.get_native_id())))
    finally:
        torch.set_num_threads(before)
    assert seen == [(0, 1, threading.get_native_id())]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_lanes_run_whole_and_in_order(threads: int, count: int, workers: int) -> None:
    order: list[list[int]] = [[] for _ in range(count)]
    settings: set[tuple[bool, int]] = set()

    def call(lane: int, number: int):
        def record() -> None:
            settings.add((torch.is_grad_enabled(), torch.get_num_threads()))
            order[lane].append(number)

        return record

    with torch.no_grad():
        Section([[call(lane, number) for number in range(4)] for lane in range(count)]).run(workers)
    assert order == [[0, 1, 2, 3]] * count
    assert not any(enabled for enabled, _ in settings)
    assert torch.get_num_threads() == threads


def test_a_failing_lane_is_reported(threads: int) -> None:
    def fail() -> None:
        raise RuntimeError("of a lane")

    with pytest.raises(RuntimeError, match="of a lane"):
        Section([[fail], [], []]).run(threads)
    assert torch.get_num_threads() == threads


def test_a_compiled_loop_is_called_by_each_member(threads: int) -> None:
    seen: list[tuple[int, int, int]] = []

    def loop(address: int) -> None:
        words = (ctypes.c_int64 * 3).from_address(address)
        seen.append((words[0], words[1], words[2]))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    given = np.array([7, 7, 42])
    team.share(address, given, threads)
    if team.found():
        assert seen == [(-1, threads, 42)] * threads  # each then asks OpenMP which it is
    else:
        assert sorted(seen) == [(member, threads, 42) for member in range(threads)]
    seen.clear()
    team.share(address, given, 1)
    assert seen == [(0, 1, 42)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_where_a_member_begins_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """There ctypes would print it and go on, with the share of one member not done."""
    library = team._openmp()
    if library is None:
        pytest.skip("this build of PyTorch runs on another OpenMP library")

    def interrupted() -> int:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return int(library.omp_get_thread_num())

    changed = SimpleNamespace(
        GOMP_parallel=library.GOMP_parallel,
        omp_get_thread_num=interrupted,
        omp_get_num_threads=library.omp_get_num_threads,
    )
    monkeypatch.setattr(team, "_openmp", lambda: changed)
    before, ended = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            team.run(lambda member, _: ended.append(member))
    finally:
        torch.set_num_threads(before)
    assert sorted(ended) == [1, 2]


def test_nothing_runs_on_in_the_pool_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), []

    def impatient(waiting: list[Future[None]]) -> None:
        if started.is_set():
            wait(waiting)
        else:
            started.set()
            raise KeyboardInterrupt

    def task(number: int) -> None:
        assert started.wait(timeout=60)
        ended.append(number)

    monkeypatch.setattr(team, "wait", impatient)
    with pytest.raises(KeyboardInterrupt):
        team.in_pool([partial(task, number) for number in range(4)])
    assert sorted(ended) == [0, 1, 2, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_a_pool_of_its_own() -> None:
    """As a worker of a `DataLoader` that was started after a plan ran."""
    together = threading.Barrier(3, timeout=60)
    team.in_pool([together.wait] * 3)  # so that the pool has all its threads
    process = multiprocessing.get_context("fork").Process(target=team.in_pool, args=([int] * 3,))
    process.start()
    process.join(60)
    alive = process.is_alive()
    process.kill()
    process.join()
    assert not alive
    assert process.exitcode == 0
