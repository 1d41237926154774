"""What a snapshot's segments, blocks and events must agree on; each disagreement becomes a finding, never an error."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from planner.snapshot.records import Event, Finding, Segment

STATES = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free", "inactive"})


class Placed(Protocol):
    """A block of memory with a lifetime."""

    address: int
    nbytes: int
    birth: int
    death: int


@dataclass(slots=True)
class Findings:
    """Collects findings: of each kind the first example and how many there are."""

    _examples: dict[str, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Count a finding; its example is kept if it is the first of its kind."""
        self._examples.setdefault(kind, example)
        self._counts[kind] = self._counts.get(kind, 0) + count

    def all(self) -> tuple[Finding, ...]:
        """The findings in the order in which their kinds came up."""
        return tuple(Finding(kind, self._counts[kind], example) for kind, example in self._examples.items())


def check_segments(segments: Sequence[Segment], findings: Findings) -> None:
    """Segments may not overlap; their blocks lie one behind the other, fill them, and are in a state known to us."""
    for number, segment in enumerate(segments):
        where = f"segment {number} at {segment.address:#x}"
        total = sum(block.nbytes for block in segment.blocks)
        if total != segment.nbytes:
            findings.add("blocks do not tile", f"{where}: blocks of {total} bytes in {segment.nbytes}")
        expected = segment.address
        last = None
        for index, block in enumerate(segment.blocks):
            if block.address is not None:
                if last is not None and block.address <= last:
                    kind = "addresses repeat" if block.address == last else "addresses go backwards"
                    findings.add(kind, f"{where}: block {index} at {block.address:#x}")
                elif block.address != expected:
                    findings.add("blocks do not tile", f"{where}: block {index} is not at {expected:#x}")
                last = block.address
            expected = (expected if block.address is None else block.address) + block.nbytes
            if block.state not in STATES:
                findings.add("unknown state", f"{where}: block {index} is {block.state[:40]!r}")
            if block.active and block.requested_nbytes > block.nbytes:
                sizes = f"{block.requested_nbytes} bytes asked for in {block.nbytes}"
                findings.add("size differs", f"{where}: block {index}: {sizes}")
    ordered = sorted(segments, key=lambda segment: segment.address)
    for before, after in pairwise(ordered):
        if before.address == after.address:
            findings.add("segments repeat", f"two at {after.address:#x}")
        elif before.address + before.nbytes > after.address:
            findings.add("segments overlap", f"those at {before.address:#x} and {after.address:#x}")


def check_addresses(
    blocks: Sequence[Placed], segments: Sequence[Segment], events: Sequence[Event], findings: Findings
) -> None:
    """Blocks alive together may not share a byte, and lie in memory that is a segment at some time."""
    _check_overlaps(blocks, findings)
    ranges = [(segment.address, segment.address + segment.nbytes) for segment in segments]
    ranges += [
        (event.address, event.address + event.nbytes)
        for event in events
        if event.action in ("segment_alloc", "segment_map", "segment_free", "segment_unmap")
    ]
    starts, ends = _union(ranges)
    if not starts:
        if blocks:
            findings.add("no segments", "the file names no segment; what was reserved is unknown")
        return
    for block in blocks:
        at = bisect_right(starts, block.address) - 1
        if at < 0 or block.address + block.nbytes > ends[at]:
            findings.add("outside every segment", f"address {block.address:#x} of {block.nbytes} bytes")


def _check_overlaps(blocks: Sequence[Placed], findings: Findings) -> None:
    """Sweep over time with the blocks alive in order of address; only neighbours can overlap first."""
    moments = [(block.death, 0, index) for index, block in enumerate(blocks) if block.nbytes]
    moments += [(block.birth, 1, index) for index, block in enumerate(blocks) if block.nbytes]
    alive: list[tuple[int, int]] = []  # (address, index), by address
    for step, born, index in sorted(moments):
        block = blocks[index]
        entry = (block.address, index)
        if not born:
            del alive[bisect_left(alive, entry)]
            continue
        at = bisect_left(alive, entry)
        for near in (at - 1, at):
            if 0 <= near < len(alive) and _share(block, blocks[alive[near][1]]):
                other = blocks[alive[near][1]]
                findings.add("blocks overlap", f"those at {other.address:#x} and {block.address:#x} at step {step}")
        insort(alive, entry)


def _share(one: Placed, other: Placed) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def _union(ranges: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and ends of the ranges, merged where they touch."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(ranges):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends
