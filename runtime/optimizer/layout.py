"""Where each parameter lies in a workspace, and the table of chunks that one launch works off.

Plain integer arithmetic on 64 bits; nothing here touches memory, so it holds for workspaces of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.optimizer import codes


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``offset`` to ``offset + length`` of a workspace; the next segment starts at ``offset + room``."""

    offset: int
    length: int
    room: int


def lay_out(lengths: Sequence[int], alignment: int) -> tuple[Segment, ...]:
    """Place so many elements for each, one after the other, each start a multiple of ``alignment`` elements."""
    segments = []
    offset = 0
    for length in lengths:
        room = -(-length // alignment) * alignment
        segments.append(Segment(offset, length, room))
        offset += room
    return tuple(segments)


def chunk_table(
    segments: Sequence[Segment],
    parameters: Sequence[int],
    gradients: Sequence[int],
    groups: Sequence[int],
    classes: Any,
    home: tuple[int, int] | None,
    itemsize: int,
    chunk: int,
) -> Any:
    """Rows of a launch, columns as `codes.PARAMETER` and on; one row has at most ``chunk`` elements.

    Args:
        segments: of every parameter of the workspace.
        parameters, gradients: address in bytes of each; a gradient of 0 leaves its parameter out.
        groups: number of each one's parameter group.
        classes: numbers; parameters of one number have taken the same steps.
        home: address of the workspaces of parameters and gradients, ``None`` if there are none.
        itemsize: bytes of an element of parameters and gradients.
        chunk: a multiple of 256.

    Neighbours that continue one another, padding included where it is the workspace's own, become one run: so
    thousands of small parameters cost no more than one large one.
    """
    offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
    lengths = np.array([segment.length for segment in segments], dtype=np.int64)
    rooms = np.array([segment.room for segment in segments], dtype=np.int64)
    where = np.array(parameters, dtype=np.int64)
    from_where = np.array(gradients, dtype=np.int64)
    kind = np.array(groups, dtype=np.int64)
    taken = np.flatnonzero((from_where != 0) & (lengths > 0))
    if taken.size == 0:
        return np.zeros((0, codes.COLUMNS), dtype=np.int64)
    offsets, lengths, rooms = offsets[taken], lengths[taken], rooms[taken]
    where, from_where, kind = where[taken], from_where[taken], kind[taken]
    alike = np.asarray(classes, dtype=np.int64)[taken]
    if home is None:
        own = np.zeros(taken.size, dtype=bool)
    else:
        own = (where == home[0] + itemsize * offsets) & (from_where == home[1] + itemsize * offsets)
    joins = (
        (offsets[1:] == offsets[:-1] + rooms[:-1])
        & (where[1:] == where[:-1] + itemsize * rooms[:-1])
        & (from_where[1:] == from_where[:-1] + itemsize * rooms[:-1])
        & (kind[1:] == kind[:-1])
        & (alike[1:] == alike[:-1])
        & ((own[1:] & own[:-1]) | (lengths[:-1] == rooms[:-1]))
    )
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [taken.size - 1]))
    run_lengths = offsets[last] + lengths[last] - offsets[first]
    counts = -(-run_lengths // chunk)
    run = np.repeat(np.arange(first.size), counts)
    within = (np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    table = np.empty((run.size, codes.COLUMNS), dtype=np.int64)
    start = first[run]
    table[:, codes.PARAMETER] = where[start] + itemsize * within
    table[:, codes.GRADIENT] = from_where[start] + itemsize * within
    table[:, codes.STATE] = offsets[start] + within
    table[:, codes.LENGTH] = np.minimum(run_lengths[run] - within, chunk)
    table[:, codes.STEP] = taken[start]
    table[:, codes.GROUP] = kind[start]
    return table
