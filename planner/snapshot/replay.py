"""A device's trace replayed: the lifetime of every block, what was reserved when, and what does not add up.

Time is counted in events: step 0 is the moment before the first event, step ``k`` begins with the ``k``-th. A block is
alive from its ``alloc`` to its ``free_completed``, when the allocator may use its bytes again; between
``free_requested`` and that it waits for another stream. A block freed without an ``alloc`` was there from the start, as
was one that the segments hold although no event speaks of it: a history that is switched on late, or that overwrites
its oldest entries, has many. One without a free lives to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from planner.snapshot.consistency import Findings, check_addresses, check_segments
from planner.snapshot.records import DeviceRecord, Event, Finding, Frames, Segment, SegmentBlock


@dataclass(slots=True)
class Block:
    """One allocation, from when to when.

    Attributes:
        nbytes: bytes asked for.
        birth, death: half-open steps; birth 0 means before the trace, a death after the last step that it stays.
        requested_step: when its free was requested, or ``None``.
    """

    address: int
    nbytes: int
    stream: int
    birth: int
    death: int
    frames: Frames
    category: str | None = None
    requested_step: int | None = None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The allocator gave up: what was asked for, and what there was.

    Attributes:
        free_nbytes: what the driver had left.
    """

    step: int
    nbytes: int
    free_nbytes: int
    live_nbytes: int
    reserved_nbytes: int
    frames: Frames

    @property
    def fits_unfragmented(self) -> bool:
        """Whether it would have fitted if the reserved memory were in one piece."""
        return self.live_nbytes + self.nbytes <= self.reserved_nbytes + self.free_nbytes


@dataclass(frozen=True, slots=True)
class Replay:
    """A device's history.

    Attributes:
        steps: number of steps, the one before the first event included.
        blocks: in order of birth; those there from the start first.
        live: bytes asked for and not yet free again, at each step.
        reserved: bytes held in segments, at each step.
        out_of_memory: every ``oom`` event.
        snapshots: number of ``snapshot`` events.
        findings: what does not add up.
    """

    device: int
    steps: int
    blocks: tuple[Block, ...]
    live: tuple[int, ...]
    reserved: tuple[int, ...]
    out_of_memory: tuple[OutOfMemory, ...]
    snapshots: int
    segments: tuple[Segment, ...]
    findings: tuple[Finding, ...]


def replay(record: DeviceRecord) -> Replay:
    """Rebuild the lifetimes of one device."""
    actions = {event.action for event in record.events}
    history = _History(
        record.segments, "free_requested" in actions, "free_completed" in actions, _pending(record.segments)
    )
    check_segments(record.segments, history.findings)
    for step, event in enumerate(record.events, 1):
        history.take(step, event)
    steps = len(record.events) + 1
    if not record.events:
        history.findings.add("no trace", "the file has no events of this device, only its state at the end")
    blocks = history.finish(steps, record.events)
    early = [block for block in blocks if not block.birth]
    if early and record.events:
        nbytes = sum(block.nbytes for block in early)
        message = f"{nbytes} bytes were there before the first event; the history begins later or was cut at its start"
        history.findings.add("alive at the start", message, len(early))
    live = live_nbytes(blocks, steps)
    reserved = _reserved(record.segments, record.events, history.findings)
    check_addresses(blocks, record.segments, record.events, history.findings)
    above = [step for step, (now, held) in enumerate(zip(live, reserved, strict=True)) if now > held]
    if above and any(reserved):
        history.findings.add(
            "more alive than reserved",
            f"at step {above[0]} {live[above[0]]} bytes are alive in {reserved[above[0]]} reserved",
            len(above),
        )
    failures = tuple(
        replace(oom, reserved_nbytes=reserved[oom.step], live_nbytes=live[oom.step]) for oom in history.ooms
    )
    return Replay(
        device=record.device,
        steps=steps,
        blocks=blocks,
        live=live,
        reserved=reserved,
        out_of_memory=failures,
        snapshots=history.snapshots,
        segments=record.segments,
        findings=history.findings.all(),
    )


def live_nbytes(blocks: Iterable[Block], steps: int, rounding: int = 1) -> tuple[int, ...]:
    """Bytes alive at each step, each block rounded up to a multiple of ``rounding``."""
    change = [0] * (steps + 1)
    for block in blocks:
        size = -(-block.nbytes // rounding) * rounding
        change[block.birth] += size
        change[block.death] -= size
    return tuple(accumulate(change[:-1]))


@dataclass(slots=True)
class _History:
    """The state between two events: what is alive, by address."""

    segments: Sequence[Segment]
    has_requests: bool
    has_completions: bool
    pending: frozenset[int]
    blocks: list[Block] = field(default_factory=list)
    live: dict[int, Block] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    ooms: list[OutOfMemory] = field(default_factory=list)
    snapshots: int = 0
    last_time: float | None = None
    findings: Findings = field(default_factory=Findings)

    def take(self, step: int, event: Event) -> None:
        """Apply one event."""
        if event.time_us is not None:
            if self.last_time is not None and event.time_us < self.last_time:
                self.findings.add("time goes backwards", f"at step {step}")
            self.last_time = event.time_us
        action = event.action
        if action == "alloc":
            self._alloc(step, event)
        elif action == "free_requested":
            self._free_requested(step, event)
        elif action == "free_completed":
            self._free_completed(step, event)
        elif action == "oom":
            self.ooms.append(OutOfMemory(step, event.nbytes, event.free_nbytes, 0, 0, event.frames))
        elif action == "snapshot":
            self.snapshots += 1
        elif action not in _SEGMENT_ACTIONS:
            self.findings.add("unknown action", f"{action[:40]!r} at step {step}")

    def _alloc(self, step: int, event: Event) -> None:
        before = self.live.get(event.address)
        if before is not None:
            self.findings.add(
                "allocated twice", f"address {event.address:#x} at step {step}, alive since step {before.birth}"
            )
            before.death = step
        block = Block(event.address, event.nbytes, event.stream, step, 0, event.frames, event.category)
        self.blocks.append(block)
        self.live[event.address] = block
        self.seen.add(event.address)

    def _free_requested(self, step: int, event: Event) -> None:
        block = self._freed(step, event)
        if block is None:
            return
        if block.requested_step is not None:
            self.findings.add("freed twice", f"address {event.address:#x} at step {step}")
        else:
            block.requested_step = step
        if not self.has_completions and event.address not in self.pending:
            self.findings.add("not recorded", "the history has no free_completed; free_requested is taken for it")
            block.death = step
            del self.live[event.address]

    def _free_completed(self, step: int, event: Event) -> None:
        block = self._freed(step, event)
        if block is None:
            return
        if block.requested_step is None and block.birth:
            if self.has_requests:
                self.findings.add("freed without a request", f"address {event.address:#x} at step {step}")
            else:
                self.findings.add("not recorded", "the history has no free_requested; waiting for streams is unknown")
        block.death = step
        del self.live[event.address]

    def _freed(self, step: int, event: Event) -> Block | None:
        """The block a free speaks of; one nobody allocated was there from the start."""
        block = self.live.get(event.address)
        if block is None:
            if event.address in self.seen:
                self.findings.add("freed while not alive", f"address {event.address:#x} at step {step}")
                return None
            block = Block(event.address, event.nbytes, event.stream, 0, 0, (), event.category)
            self.blocks.append(block)
            self.live[event.address] = block
            self.seen.add(event.address)
        elif block.nbytes != event.nbytes:
            self.findings.add(
                "size differs",
                f"address {event.address:#x}: {event.nbytes} bytes freed at step {step}, {block.nbytes} allocated",
            )
        return block

    def finish(self, steps: int, events: Sequence[Event]) -> tuple[Block, ...]:
        """Compare what is alive with the segments, add what only they know, and end what is still alive."""
        held = _active(self.segments)
        for address, (stream, kept) in held.items():
            known = self.live.get(address)
            if known is None and address not in self.seen:
                self.blocks.append(Block(address, kept.requested_nbytes, stream, 0, 0, kept.frames))
                self.live[address] = self.blocks[-1]
            elif known is None:
                self.findings.add("alive in the segments only", f"address {address:#x}, freed by the trace")
            else:
                if not known.frames:
                    known.frames = kept.frames
                if known.nbytes not in (kept.requested_nbytes, kept.nbytes):  # Some tools record rounded sizes.
                    sizes = f"{kept.requested_nbytes} bytes in its segment, {known.nbytes} in the trace"
                    self.findings.add("size differs", f"address {address:#x}: {sizes}")
        if self.segments and events:
            for address, block in self.live.items():
                if address not in held:
                    message = f"address {address:#x} of {block.nbytes} bytes: its free is missing, or the trace was cut"
                    self.findings.add("alive in the trace only", message)
        for block in self.live.values():
            block.death = steps
        return tuple(sorted(self.blocks, key=lambda block: block.birth))


def _pending(segments: Sequence[Segment]) -> frozenset[int]:
    """Addresses of blocks that waited for another stream when the snapshot was taken."""
    held = _active(segments)
    return frozenset(address for address, (_, block) in held.items() if block.state != "active_allocated")


_SEGMENT_ACTIONS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _active(segments: Sequence[Segment]) -> dict[int, tuple[int, SegmentBlock]]:
    """The blocks in use by address, counted from the segment's start where the file does not state it."""
    found: dict[int, tuple[int, SegmentBlock]] = {}
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            if block.active:
                found.setdefault(address if block.address is None else block.address, (segment.stream, block))
            address += block.nbytes
    return found


def _reserved(segments: Sequence[Segment], events: Sequence[Event], findings: Findings) -> tuple[int, ...]:
    """Bytes in segments at each step: those at the end are known, so the events are taken back from there."""
    changes = [_SEGMENT_ACTIONS.get(event.action, 0) * event.nbytes for event in events]
    end = sum(segment.nbytes for segment in segments)
    start = end - sum(changes)
    curve = list(accumulate(changes, initial=start))
    if (lowest := min(curve)) < 0:
        step = curve.index(lowest)
        message = f"the segments at the end hold {end} bytes, which makes {lowest} reserved at step {step}"
        findings.add("segments do not add up", message)
        curve = [held - lowest for held in curve]
    return tuple(curve)


def streams(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """The blocks of each stream."""
    found: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        found[block.stream].append(block)
    return dict(found)
