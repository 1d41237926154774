"""Sections of a plan whose lanes run side by side, each slice of the attention matrix in one core's cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from runtime import team

if TYPE_CHECKING:
    from runtime.kernels.binding import Call  # which imports this module


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
        before = torch.get_num_threads()
        if workers <= 1:
            for lane in self.lanes:
                _run(lane)
            return
        if workers == before and team.found():
            team.run(self._take)  # within it ATen's and MKL's loops run on the thread that calls them
            return
        share = max(before // workers, 1)
        # ATen's thread count is partly per thread and partly global (MKL's), so it is set here as well as in the pool.
        torch.set_num_threads(share)
        try:
            team.in_pool(partial(_work, self.lanes[first::workers], share) for first in range(workers))
        finally:
            torch.set_num_threads(before)

    def _take(self, member: int, members: int) -> None:
        with torch.no_grad():
            for lane in self.lanes[member::members]:
                _run(lane)


def _work(lanes: list[list[Call]], share: int) -> None:
    if torch.get_num_threads() != share:
        torch.set_num_threads(share)
    with torch.no_grad():
        for lane in lanes:
            _run(lane)


def _run(lane: list[Call]) -> None:
    for call in lane:
        call()
