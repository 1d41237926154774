"""Sections of a plan whose lanes run side by side, each slice of the attention matrix in one core's cache."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from runtime.kernels.binding import Call


class Section:
    """Lanes of bound calls; within a lane the order counts, between lanes it does not."""

    def __init__(self, lanes: list[list[Call]]) -> None:
        self.lanes = lanes

    def __call__(self) -> None:
        """Run the lanes one after the other: what a section within a lane does."""
        self.run(1)

    def run(self, threads: int) -> None:
        """Run the lanes on ``threads`` threads, each with an equal share of them for ATen's own parallel loops."""
        workers = min(threads, len(self.lanes))
        if workers <= 1:
            for lane in self.lanes:
                _run(lane)
            return
        before = torch.get_num_threads()
        share = max(before // workers, 1)
        pool = _pool(workers)
        # ATen's thread count is partly per thread and partly global (MKL's), so it is set here as well as in the pool.
        torch.set_num_threads(share)
        try:
            shares = [self.lanes[first::workers] for first in range(workers)]
            waiting: list[Future[None]] = [pool.submit(_work, lanes, share) for lanes in shares]
            errors = [future.exception() for future in waiting]
        finally:
            torch.set_num_threads(before)
        for error in errors:
            if error is not None:
                raise error


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="arenaplan-lane")


def _work(lanes: list[list[Call]], share: int) -> None:
    if torch.get_num_threads() != share:
        torch.set_num_threads(share)
    with torch.no_grad():
        for lane in lanes:
            _run(lane)


def _run(lane: list[Call]) -> None:
    for call in lane:
        call()
