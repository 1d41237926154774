"""Memory snapshots of real shape without a device: PyTorch's caching allocator in miniature, and steps that use it.

Rounding, pools and splitting follow ``c10/core/AllocatorConfig.h`` and the notes in PyTorch's "CUDA semantics" page:
requests are rounded to 512 bytes; up to 1 MiB they come from 2 MiB segments, up to 10 MiB from 20 MiB segments, larger
ones from segments rounded to 2 MiB; blocks are cut, best fit, and merged again when neighbours are free.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

UNIT = 512
SMALL = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
BIG_REQUEST = 10 * 2**20
BIG_UNIT = 2 * 2**20
BASE = 0x7F12_0000_0000


class OutOfMemoryError(Exception):
    """The device has no room for another segment."""


@dataclass(eq=False)
class Piece:
    """A block of a segment, between its neighbours."""

    address: int
    size: int
    segment: Segment
    requested: int = 0
    state: str = "inactive"
    frames: list[dict[str, Any]] = field(default_factory=list)
    before: Piece | None = None
    after: Piece | None = None


@dataclass(eq=False)
class Segment:
    """Memory of the driver."""

    address: int
    size: int
    stream: int
    small: bool
    first: Piece | None = None

    @property
    def pieces(self) -> list[Piece]:
        found, piece = [], self.first
        while piece is not None:
            found.append(piece)
            piece = piece.after
        return found


@dataclass
class CachingAllocator:
    """One device. ``history`` switches the trace on; ``most_entries`` makes it a ring that overwrites its oldest."""

    capacity: int = 80 * 2**30
    device: int = 0
    history: bool = True
    most_entries: int | None = None
    expandable: bool = False
    segments: list[Segment] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    used: dict[int, Piece] = field(default_factory=dict)
    free_lists: dict[tuple[int, bool], list[tuple[int, int, Piece]]] = field(default_factory=dict)
    clock: int = 1_700_000_000_000_000
    next_address: int = BASE

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def record(self, action: str, address: int, size: int, stream: int, frames: Any = (), **more: Any) -> None:
        self.clock += 7
        if not self.history:
            return
        key = "device_free" if action == "oom" else "addr"
        self.entries.append(
            {
                "action": action,
                key: address,
                "size": size,
                "stream": stream,
                "time_us": self.clock,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": list(frames),
                **more,
            }
        )

    def alloc(self, nbytes: int, frames: Any = (), stream: int = 0, **more: Any) -> int:
        """Return the address of ``nbytes`` bytes; raise `OutOfMemoryError` as the allocator would."""
        size = max(UNIT, -(-nbytes // UNIT) * UNIT)
        small = size <= SMALL
        free = self.free_lists.setdefault((stream, small), [])
        at = bisect_left(free, (size, 0))
        if at == len(free):
            self._grow(size, nbytes, stream, small, frames)
            at = bisect_left(free, (size, 0))
        piece = free.pop(at)[2]
        rest = piece.size - size
        if rest >= UNIT if small else rest > SMALL:
            piece.after = Piece(piece.address + size, rest, piece.segment, before=piece, after=piece.after)
            if piece.after.after is not None:
                piece.after.after.before = piece.after
            piece.size = size
            self._put(piece.after)
        piece.requested, piece.state, piece.frames = nbytes, "active_allocated", list(frames)
        self.used[piece.address] = piece
        self.record("alloc", piece.address, nbytes, stream, frames, **more)
        return piece.address

    def free(self, address: int, waits: bool = False, frames: Any = (), **more: Any) -> None:
        """Free a block; if it ``waits`` for another stream, `complete` must follow."""
        piece = self.used[address]
        self.record("free_requested", address, piece.requested, piece.segment.stream, frames, **more)
        piece.state = "active_pending_free"
        if not waits:
            self.complete(address, frames, **more)

    def complete(self, address: int, frames: Any = (), **more: Any) -> None:
        piece = self.used.pop(address)
        self.record("free_completed", address, piece.requested, piece.segment.stream, frames, **more)
        piece.state, piece.requested, piece.frames = "inactive", 0, []
        if piece.before is not None and piece.before.state == "inactive":
            self._take(piece.before)
            piece = self._join(piece.before)
        if piece.after is not None and piece.after.state == "inactive":
            self._take(piece.after)
            piece = self._join(piece)
        self._put(piece)

    def _join(self, piece: Piece) -> Piece:
        """Let a block take in the one after it."""
        other = piece.after
        assert other is not None
        piece.size += other.size
        piece.after = other.after
        if piece.after is not None:
            piece.after.before = piece
        return piece

    def empty_cache(self) -> None:
        """Give segments in which nothing lies back to the driver."""
        for segment in list(self.segments):
            pieces = segment.pieces
            if len(pieces) == 1 and pieces[0].state == "inactive":
                self._take(pieces[0])
                self.segments.remove(segment)
                action = "segment_unmap" if self.expandable else "segment_free"
                self.record(action, segment.address, segment.size, segment.stream)

    def state(self) -> list[dict[str, Any]]:
        """The segments as `torch.cuda.memory_snapshot` returns them."""
        return [self._segment(segment) for segment in sorted(self.segments, key=lambda one: one.address)]

    def trace(self) -> list[dict[str, Any]]:
        return self.entries if self.most_entries is None else self.entries[-self.most_entries :]

    def _grow(self, size: int, nbytes: int, stream: int, small: bool, frames: Any) -> None:
        if small:
            wanted = SMALL_SEGMENT
        elif size < BIG_REQUEST:
            wanted = LARGE_SEGMENT
        else:
            wanted = -(-size // BIG_UNIT) * BIG_UNIT
        if self.reserved + wanted > self.capacity:
            self.empty_cache()
        if self.reserved + wanted > self.capacity:
            self.record("oom", self.capacity - self.reserved, size, stream, frames)
            raise OutOfMemoryError(f"{nbytes} bytes")
        segment = Segment(self.next_address, wanted, stream, small)
        self.next_address += wanted + BIG_UNIT
        segment.first = Piece(segment.address, wanted, segment)
        self.segments.append(segment)
        self._put(segment.first)
        self.record("segment_map" if self.expandable else "segment_alloc", segment.address, wanted, stream, frames)

    def _put(self, piece: Piece) -> None:
        free = self.free_lists.setdefault((piece.segment.stream, piece.segment.small), [])
        insort(free, (piece.size, piece.address, piece))

    def _take(self, piece: Piece) -> None:
        free = self.free_lists[piece.segment.stream, piece.segment.small]
        del free[bisect_left(free, (piece.size, piece.address))]

    def _segment(self, segment: Segment) -> dict[str, Any]:
        blocks = [
            {
                "address": piece.address,
                "size": piece.size,
                "requested_size": piece.requested,
                "state": piece.state,
                "frames": piece.frames if self.history else [],
            }
            for piece in segment.pieces
        ]
        active = [block for block in blocks if block["state"] != "inactive"]
        return {
            "device": self.device,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self.expandable,
            "frames": [],
            "blocks": blocks,
        }


def snapshot_of(*allocators: CachingAllocator, devices: int | None = None) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot` returns on a machine with these devices."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(devices or 1 + max(one.device for one in allocators))]
    for allocator in allocators:
        traces[allocator.device] = allocator.trace()
    return {
        "segments": [segment for allocator in allocators for segment in allocator.state()],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        },
        "external_annotations": [],
    }


_LIBRARY = "/opt/env/lib/python3.11/site-packages/torch/nn/modules"


class Stacks:
    """Python stacks as PyTorch records them: one dict a frame, shared by all the stacks it occurs in."""

    def __init__(self, depth: int = 12) -> None:
        self.outer = [
            {"filename": f"{_LIBRARY}/module.py", "line": 1700 + depth, "name": "_call_impl"} for depth in range(depth)
        ]
        self.known: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def __call__(self, name: str, line: int) -> list[dict[str, Any]]:
        if (name, line) not in self.known:
            own = {"filename": "/home/someone/model.py", "line": line, "name": name}
            inner = {"filename": f"{_LIBRARY}/linear.py", "line": 125, "name": "forward"}
            last = {"filename": "/home/someone/train.py", "line": 88, "name": "train"}
            self.known[name, line] = [inner, own, *self.outer, last]
        return self.known[name, line]


def fragmented() -> CachingAllocator:
    """64 MiB of which 34 are free, in gaps of 5 MiB and less: 24 MiB do not fit, and would in one piece."""
    allocator = CachingAllocator(capacity=64 * 2**20)
    blocks = [allocator.alloc(5 * 2**20) for _ in range(12)]
    for address in blocks[::2]:
        allocator.free(address)
    return allocator


def train(
    allocator: CachingAllocator,
    *,
    layers: int = 6,
    width: int = 256,
    tokens: int = 1024,
    steps: int = 2,
    seed: int = 0,
    stacks: Stacks | None = None,
    side_stream: int = 0,
) -> dict[int, int]:
    """Training steps of a transformer: parameters that stay, saved activations, temporaries, gradients.

    Sizes change a little from step to step, as sequence lengths do, so the cache fragments. Returns what lives at the
    end, bytes by address.
    """
    random_numbers = random.Random(seed)
    stacks = stacks or Stacks()
    kept: list[int] = []
    for layer in range(layers):
        kept += [allocator.alloc(12 * width * width * 4 + layer, stacks("__init__", 20)) for _ in range(3)]
    for step in range(steps):
        length = tokens - random_numbers.randrange(tokens // 4)
        saved: list[list[int]] = []
        for _ in range(layers):
            saved.append(
                [
                    allocator.alloc(length * width * 4 * factor, stacks("forward", 40 + factor))
                    for factor in (1, 3, 1, 4, 4)
                ]
            )
            scratch = allocator.alloc(length * 64 * 4, stacks("attention", 61), stream=side_stream)
            allocator.free(scratch, waits=bool(side_stream))
            if side_stream:
                norm = allocator.alloc(length * 4, stacks("norm", 70))
                allocator.free(norm)
                allocator.complete(scratch)
        gradients: list[int] = []
        flowing = allocator.alloc(length * width * 4)
        for activations in reversed(saved):
            gradients.append(allocator.alloc(12 * width * width * 4))
            below = allocator.alloc(length * width * 4)
            for address in activations:
                allocator.free(address)
            allocator.free(flowing)
            flowing = below
        allocator.free(flowing)
        if step == 0:
            kept += [allocator.alloc(12 * width * width * 8, stacks("step", 90)) for _ in range(layers)]
        for address in gradients:
            allocator.free(address)
    return {address: allocator.used[address].requested for address in kept}
