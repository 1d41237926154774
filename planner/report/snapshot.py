"""The plan as a PyTorch memory snapshot, for the viewers and tools that read those.

The arena is one segment. Every storage is allocated at its offset when it is born and freed when it dies; bytes handed
over in place are freed and taken again at that step, since a snapshot may not hold two live blocks at one address.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from planner.graph import FILLED_ROLES, Operation
from planner.plan import Plan, padded
from planner.report.facts import first_writers, handed_over

#: Where the arena seems to lie: like a device address, and below 2^53, the largest a browser counts exactly.
BASE = 0x7F00_0000_0000
_STEP_MICROSECONDS = 1000
#: Viewers need one entry of this category once any entry has one.
_UNKNOWN = "unknown"


def snapshot(plan: Plan) -> dict[str, Any]:
    """Plain dicts, lists, strings and integers, as ``torch.cuda.memory._snapshot`` returns them."""
    events = _Events(plan)
    if plan.arena_nbytes:
        events.add("segment_alloc", 0, plan.arena_nbytes, 0, _UNKNOWN, [])
    deaths: dict[int, list[int]] = {}
    births: dict[int, list[int]] = {}
    after = handed_over(plan)
    for index, (storage, place) in enumerate(zip(plan.graph.storages, plan.placements, strict=True)):
        if not storage.nbytes:
            continue  # It has no address of its own.
        filled = storage.role in FILLED_ROLES and place.birth == 0
        births.setdefault(-1 if filled else place.birth, []).append(index)
        death = place.death
        if index in after:
            death = min(death, plan.placements[after[index]].birth)
        deaths.setdefault(death, []).append(index)
    for step in range(-1, plan.steps):
        if step >= 0:
            for index in deaths.get(step, ()):
                events.free(index, step)
        for index in births.get(step, ()):
            events.allocate(index, max(step, 0))
    segments = [_segment(plan, events.frames, after)] if plan.arena_nbytes else []
    return {"segments": segments, "device_traces": [events.entries]}


def snapshot_pickle(plan: Plan) -> bytes:
    """The snapshot as a pickle of protocol 4, the newest that the viewers read."""
    return pickle.dumps(snapshot(plan), protocol=4)


def snapshot_json(plan: Plan) -> bytes:
    """The snapshot as JSON, which the newest viewers read as well; pairs become lists."""
    return json.dumps(snapshot(plan), separators=(",", ":")).encode()


class _Events:
    """The trace of one device, in order of time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.entries: list[dict[str, Any]] = []
        writers = first_writers(plan)
        self.frames = [
            _frames(storage.name, writer) for storage, writer in zip(plan.graph.storages, writers, strict=True)
        ]

    def add(
        self, action: str, offset: int, nbytes: int, step: int, category: str, frames: list[dict[str, Any]]
    ) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": BASE + offset,
                "size": nbytes,
                "stream": 0,
                "time_us": step * _STEP_MICROSECONDS,
                "category": category,
                "frames": frames,
            }
        )

    def allocate(self, storage: int, step: int) -> None:
        self._of("alloc", storage, step)

    def free(self, storage: int, step: int) -> None:
        self._of("free_requested", storage, step)
        self._of("free_completed", storage, step)

    def _of(self, action: str, index: int, step: int) -> None:
        storage = self.plan.graph.storages[index]
        nbytes = padded(storage.nbytes, self.plan.alignment)
        offset = self.plan.placements[index].offset
        self.add(action, offset, nbytes, step, storage.role.value, self.frames[index])


def _frames(storage: str, writer: Operation | None) -> list[dict[str, Any]]:
    if writer is None:
        return [{"filename": "arena", "line": 0, "name": f"{storage} (filled by the caller)"}]
    file, _, line = writer.source.rpartition(":")
    where = {"filename": file or writer.source or "arena", "line": int(line) if line.isdecimal() else 0}
    return [{"filename": "arena", "line": 0, "name": storage}, {**where, "name": f"{writer.name} = {writer.operator}"}]


def _segment(plan: Plan, frames: list[list[dict[str, Any]]], after: dict[int, int]) -> dict[str, Any]:
    """The arena after the last step: blocks in order of address that tile it."""
    alive = sorted(
        (place.offset, index)
        for index, place in enumerate(plan.placements)
        if place.death >= plan.steps and index not in after and plan.graph.storages[index].nbytes
    )
    blocks: list[dict[str, Any]] = []
    end = 0
    for offset, index in alive:
        if offset > end:
            blocks.append(_block(end, offset - end, 0, []))
        nbytes = plan.graph.storages[index].nbytes
        size = padded(nbytes, plan.alignment)
        blocks.append(_block(offset, size, nbytes, frames[index]))
        end = offset + size
    if end < plan.arena_nbytes:
        blocks.append(_block(end, plan.arena_nbytes - end, 0, []))
    active = [block for block in blocks if block["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": BASE,
        "total_size": plan.arena_nbytes,
        "allocated_size": sum(block["size"] for block in active),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(offset: int, size: int, requested: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": BASE + offset,
        "size": size,
        "requested_size": requested,
        "state": "active_allocated" if requested else "inactive",
        "frames": frames,
    }
