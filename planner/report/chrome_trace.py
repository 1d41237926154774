"""The plan as a Chrome trace (``chrome://tracing``, Perfetto): one millisecond a step."""

from __future__ import annotations

import heapq
import json
from typing import Any

from planner.plan import Plan
from planner.report.facts import live_nbytes

_STEP_MICROSECONDS = 1000
_OPERATIONS, _ARENA = 1, 2  # Process numbers: one row of operations, many of storages.


def offset_map_chrome_trace(plan: Plan) -> str:
    """JSON with the operations, the storages (in as few rows as they fit without overlap) and the live bytes."""
    events: list[dict[str, Any]] = [
        _name("process_name", _OPERATIONS, 0, "operations"),
        _name("process_name", _ARENA, 0, "arena"),
    ]
    for step, operation in enumerate(plan.graph.operations):
        facts = {"step": step, "operator": operation.operator, "source": operation.source}
        events.append(_slice(operation.name, operation.operator, _OPERATIONS, 0, step, step + 1, facts))
    for index, row in enumerate(_rows(plan)):
        storage, place = plan.graph.storages[index], plan.placements[index]
        facts = {"bytes": storage.nbytes, "offset": place.offset, "role": storage.role.value}
        if place.in_place_of is not None:
            facts["in_place_of"] = plan.graph.storages[place.in_place_of].name
        events.append(_slice(storage.name, storage.role.value, _ARENA, row, place.birth, place.death, facts))
    events += [
        {
            "name": "live bytes",
            "ph": "C",
            "pid": _ARENA,
            "tid": 0,
            "ts": step * _STEP_MICROSECONDS,
            "args": {"live": live},
        }
        for step, live in enumerate(live_nbytes(plan))
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"arena_bytes": plan.arena_nbytes}}
    return json.dumps(document, separators=(",", ":"))


def _rows(plan: Plan) -> list[int]:
    """A row for each storage, so that those in one row take turns."""
    rows = [0] * len(plan.placements)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (death, row)
    used = 0
    order = sorted(range(len(rows)), key=lambda index: (plan.placements[index].birth, plan.placements[index].offset))
    for index in order:
        place = plan.placements[index]
        while busy and busy[0][0] <= place.birth:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            rows[index] = heapq.heappop(free)
        else:
            rows[index], used = used, used + 1
        heapq.heappush(busy, (place.death, rows[index]))
    return rows


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, category: str, process: int, thread: int, birth: int, death: int, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": birth * _STEP_MICROSECONDS,
        "dur": (death - birth) * _STEP_MICROSECONDS,
        "args": facts,
    }
