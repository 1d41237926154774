"""The figures of a device's history: peaks, fragmentation, and who holds the bytes at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from planner.snapshot.frames import Place, places, printable, user_place
from planner.snapshot.problem import ALLOCATOR_ROUNDING
from planner.snapshot.replay import Block, Replay, live_nbytes, streams

_MOST_FRAMES = 50
"""Frames of a stack that are reported; a training step's stacks are shorter."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A block alive at the peak, with the stack that allocated it, innermost first."""

    block: Block
    place: Place | None
    stack: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks alive at the peak that share a place in the code (or a category)."""

    name: str
    nbytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class EndState:
    """The segments when the snapshot was taken.

    Attributes:
        reserved_nbytes: their sizes.
        active_nbytes: their blocks in use, as rounded by the allocator.
        requested_nbytes: what was asked for of those.
        free_nbytes: their blocks not in use.
        largest_free_nbytes: the largest of these: a request above it needs a new segment.
    """

    segments: int
    reserved_nbytes: int
    active_nbytes: int
    requested_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that are not in the largest free block; 0 where nothing is free."""
        return 1 - self.largest_free_nbytes / self.free_nbytes if self.free_nbytes else 0.0


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a report says about one device; bytes as asked for unless said otherwise.

    Attributes:
        peak_live_nbytes: most bytes alive at once, first at ``peak_step``.
        peak_rounded_nbytes: the same with every block rounded up to 512 bytes, as the caching allocator does.
        peak_reserved_nbytes: most bytes in segments, first at ``peak_reserved_step``.
        reserved_at_peak_nbytes: bytes in segments at ``peak_step``.
        pending_peak_nbytes: most bytes waiting for another stream after their free was requested.
        stream_peaks_nbytes: the peak of each stream alone, by stream.
        seconds: between the first and the last event that has a time, or ``None``.
    """

    device: int
    events: int
    blocks: int
    seconds: float | None
    start_live_nbytes: int
    end_live_nbytes: int
    peak_live_nbytes: int
    peak_step: int
    peak_rounded_nbytes: int
    peak_blocks: int
    peak_reserved_nbytes: int
    peak_reserved_step: int
    reserved_at_peak_nbytes: int
    pending_peak_nbytes: int
    stream_peaks_nbytes: dict[int, int]
    pools: dict[tuple[int, int], int]
    end: EndState
    largest: tuple[Holder, ...]
    by_place: tuple[Group, ...]
    by_category: tuple[Group, ...]

    @property
    def fragmentation(self) -> float:
        """Share of the most bytes ever reserved that even the peak of live bytes left unused."""
        if not self.peak_reserved_nbytes:
            return 0.0
        return max(0.0, 1 - self.peak_live_nbytes / self.peak_reserved_nbytes)


def device_figures(history: Replay, seconds: float | None = None, largest: int = 10) -> DeviceFigures:
    """Sum up a history; name the ``largest`` blocks and places at its peak."""
    peak = max(history.live)
    step = history.live.index(peak)
    alive = [block for block in history.blocks if block.birth <= step < block.death]
    most_reserved = max(history.reserved)
    top = sorted(alive, key=lambda block: -block.nbytes)[:largest]
    by_stream = streams(history.blocks)
    return DeviceFigures(
        device=history.device,
        events=history.steps - 1,
        blocks=len(history.blocks),
        seconds=seconds,
        start_live_nbytes=history.live[0],
        end_live_nbytes=history.live[-1],
        peak_live_nbytes=peak,
        peak_step=step,
        peak_rounded_nbytes=max(live_nbytes(history.blocks, history.steps, ALLOCATOR_ROUNDING)),
        peak_blocks=len(alive),
        peak_reserved_nbytes=most_reserved,
        peak_reserved_step=history.reserved.index(most_reserved),
        reserved_at_peak_nbytes=history.reserved[step],
        pending_peak_nbytes=_pending_peak(history),
        stream_peaks_nbytes={
            stream: peak if len(by_stream) == 1 else max(live_nbytes(blocks, history.steps))
            for stream, blocks in sorted(by_stream.items())
        },
        pools=_pools(history),
        end=_end_state(history),
        largest=tuple(
            Holder(block, user_place(block.frames), places(block.frames, most=_MOST_FRAMES)) for block in top
        ),
        by_place=_by_place(alive)[:largest],
        by_category=_by_category(alive),
    )


def place_name(block: Block, place: Place | None) -> str:
    """Where a block was allocated, or why that is not known."""
    if place is not None:
        return str(place)
    return "(no stack recorded)" if block.birth else "(allocated before the history begins)"


def _pending_peak(history: Replay) -> int:
    waiting = [
        Block(block.address, block.nbytes, block.stream, block.requested_step, block.death, ())
        for block in history.blocks
        if block.requested_step is not None and block.requested_step + 1 < block.death
    ]
    return max(live_nbytes(waiting, history.steps)) if waiting else 0


def _pools(history: Replay) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = defaultdict(int)
    for segment in history.segments:
        found[segment.pool] += segment.nbytes
    return dict(sorted(found.items()))


def _end_state(history: Replay) -> EndState:
    blocks = [block for segment in history.segments for block in segment.blocks]
    free = [block.nbytes for block in blocks if not block.active]
    return EndState(
        segments=len(history.segments),
        reserved_nbytes=history.reserved[-1],
        active_nbytes=sum(block.nbytes for block in blocks if block.active),
        requested_nbytes=sum(block.requested_nbytes for block in blocks if block.active),
        free_nbytes=sum(free),
        largest_free_nbytes=max(free, default=0),
    )


def _by_place(alive: Sequence[Block]) -> tuple[Group, ...]:
    """The blocks by the line of the user's code that allocated them, most bytes first."""
    known: dict[int, str] = {}  # Blocks of one stack share its list.
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for block in alive:
        if not block.frames:
            name = place_name(block, None)
        elif (name := known.get(id(block.frames), "")) == "":
            name = known[id(block.frames)] = place_name(block, user_place(block.frames))
        sums[name][0] += block.nbytes
        sums[name][1] += 1
    return _groups(sums)


def _by_category(alive: Sequence[Block]) -> tuple[Group, ...]:
    if not any(block.category for block in alive):
        return ()
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for block in alive:
        name = printable(block.category) or "unknown"
        sums[name][0] += block.nbytes
        sums[name][1] += 1
    return _groups(sums)


def _groups(sums: dict[str, list[int]]) -> tuple[Group, ...]:
    groups = (Group(name, nbytes, blocks) for name, (nbytes, blocks) in sums.items())
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.name)))
