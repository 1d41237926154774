"""What a memory snapshot holds, checked field by field but not yet made sense of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Frames = Sequence[dict[str, Any]]
"""A stack, innermost frame first: ``filename``, ``line``, ``name``. Frames are checked where they are shown."""


class Event(NamedTuple):
    """One entry of a device's trace. A tuple, since a trace has hundreds of thousands.

    Attributes:
        action: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``,
            ``segment_map``, ``segment_unmap``, ``oom``, ``snapshot``, or a word unknown to us.
        address: where; 0 for ``oom``.
        nbytes: bytes asked for (not rounded); of a segment, its size.
        time_us: microseconds since some origin, or ``None``.
        free_nbytes: what the device had left, for ``oom``.
    """

    action: str
    address: int
    nbytes: int
    stream: int
    time_us: float | None
    frames: Frames
    category: str | None
    free_nbytes: int


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """A block of a segment as it was when the snapshot was taken.

    Attributes:
        address: as the file states it, or ``None`` where it does not.
        nbytes: bytes it takes of its segment.
        requested_nbytes: bytes asked for.
        state: ``active_allocated``, ``active_pending_free`` (waits for another stream), or ``inactive``.
    """

    address: int | None
    nbytes: int
    requested_nbytes: int
    state: str
    frames: Frames

    @property
    def active(self) -> bool:
        """Whether something lies in it."""
        return self.state != "inactive"


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory the caching allocator holds from the driver, cut into blocks."""

    device: int
    address: int
    nbytes: int
    stream: int
    pool: tuple[int, int]
    blocks: tuple[SegmentBlock, ...]


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What a snapshot says about one device: the segments as they are after the last event, and the events."""

    device: int
    segments: tuple[Segment, ...]
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file read.

    Attributes:
        source: the file.
        form: how it was written: ``"pickle, protocol 4"``, ``"JSON"``.
        nbytes: its size.
        traced: whether it is of the form that has traces; a bare list of segments has none.
        devices: those with a segment or an event, by number.
    """

    source: str
    form: str
    nbytes: int
    traced: bool
    devices: tuple[DeviceRecord, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a file that does not add up; the figures are then what can still be said.

    Attributes:
        kind: one word or two, the same for every finding of a kind.
        count: how often.
        message: what, with the first example.
    """

    kind: str
    count: int
    message: str
