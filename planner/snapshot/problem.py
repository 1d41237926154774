"""A device's history as an allocation problem: the blocks' lifetimes and sizes, without their addresses."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from planner.files import write_whole
from planner.plan import padded
from planner.problem import Lifetime, Problem
from planner.snapshot.replay import Replay

ARENA_ALIGNMENT = 256
"""Bytes every offset of an arena is a multiple of, unless asked otherwise; what a plan of a module has, too."""

ALLOCATOR_ROUNDING = 512
"""Bytes the caching allocator rounds every request up to: ``kMinBlockSize`` in ``c10/core/AllocatorConfig.h``."""


def as_problem(history: Replay, alignment: int = ARENA_ALIGNMENT) -> Problem:
    """One lifetime for each block that has bytes, its size rounded up to ``alignment``.

    With all sizes multiples of the alignment, first fit and everything built on it puts every block at a multiple of
    it, so the lifetimes need none of their own.
    """
    return Problem(
        tuple(
            Lifetime(f"block{index}", padded(block.nbytes, alignment), block.birth, block.death)
            for index, block in enumerate(history.blocks)
            if block.nbytes
        )
    )


def write_problem(path: Path, problem: Problem) -> None:
    """Write a problem in the columns that minimalloc and ``arenaplan pack`` read."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("id", "lower", "upper", "size"))
    writer.writerows((item.name, item.birth, item.death, item.nbytes) for item in problem.lifetimes)
    write_whole(path, out.getvalue().encode())
