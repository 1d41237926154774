"""The offset map as one self-contained HTML file: ``viewer.html`` with the plan's data put in.

The data are one JSON object in a ``<script type="application/json">`` element, in which ``<``, ``>`` and ``&`` are
written as escapes, so that no name can end the element; the viewer shows names as text only, never as markup.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from planner.graph import Tensor
from planner.plan import Plan
from planner.report.colours import ROLE_COLOURS, role_text, text_colour
from planner.report.facts import first_writers, live_nbytes

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def offset_map_html(plan: Plan, title: str = "") -> str:
    """The viewer with this plan; needs no network and draws tens of thousands of storages."""
    title = title or f"Offset map: {plan.graph.mode} plan, {plan.strategy}"
    template = files("planner.report").joinpath("viewer.html").read_text(encoding="utf-8")
    data = json.dumps(viewer_data(plan), separators=(",", ":")).translate(_ESCAPES)
    before, between, after = template.replace("__TITLE__", escape(title)).partition("__PLAN__")
    return before + (data if between else "") + after


def viewer_data(plan: Plan) -> dict[str, Any]:
    """What the viewer draws, a list for each column."""
    graph = plan.graph
    roles = list(ROLE_COLOURS)
    steps = {operation.name: step for step, operation in enumerate(graph.operations)}
    writers = [-1 if writer is None else steps[writer.name] for writer in first_writers(plan)]
    views: list[list[str]] = [[] for _ in graph.storages]
    for tensor in graph.tensors:
        views[tensor.storage].append(_tensor_text(tensor, graph.storages[tensor.storage].name))
    return {
        "summary": plan.summary(),
        "steps": plan.steps,
        "roles": [{"name": role_text(role), "colour": ROLE_COLOURS[role], "text": text_colour(role)} for role in roles],
        "storages": {
            "name": [storage.name for storage in graph.storages],
            "bytes": [storage.nbytes for storage in graph.storages],
            "role": [roles.index(storage.role) for storage in graph.storages],
            "offset": [place.offset for place in plan.placements],
            "birth": [place.birth for place in plan.placements],
            "death": [place.death for place in plan.placements],
            "inPlaceOf": [-1 if place.in_place_of is None else place.in_place_of for place in plan.placements],
            "writer": writers,
            "tensors": views,
        },
        "operations": {
            "name": [operation.name for operation in graph.operations],
            "operator": [operation.operator for operation in graph.operations],
            "source": [operation.source for operation in graph.operations],
        },
        "live": live_nbytes(plan),
    }


def _tensor_text(tensor: Tensor, storage: str) -> str:
    """Dtype and shape, with the name where it differs from the storage's."""
    kind = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    return kind if tensor.name == storage else f"{tensor.name}: {kind}"
