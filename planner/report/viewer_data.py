"""What the offset map page draws, as compact as it goes: columns of numbers, tables of strings, compressed.

The block is zlib, in it the length of a JSON header (4 bytes, little-endian), the header, and the columns, each at a
multiple of 8 bytes. In the page it stands as base64, so no name in a plan can be read as markup. ``viewer/data.js``
reads it.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from planner.graph import Operation, Role
from planner.plan import Plan
from planner.report.colours import PALETTE, ROLE_COLOURS, role_text
from planner.report.difference import difference, difference_lines
from planner.report.facts import find_tensor, first_writers, live_nbytes

_OWNED = (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE)


def page_data(
    plans: Sequence[tuple[Plan, str]], *, at_step: int | None = None, tensor: str | None = None
) -> tuple[dict[str, Any], bytes]:
    """Header and columns of one plan, or of two to be compared, each with the label it is shown under.

    Args:
        at_step: the step at which the page opens.
        tensor: the tensor (or storage) of the first plan that is selected when it opens.

    Raises:
        ShapeError: the first plan has no such tensor.
    """
    columns = _Columns()
    first = plans[0][0]
    header: dict[str, Any] = {
        "roles": [{"name": role_text(role), "colour": colour} for role, colour in ROLE_COLOURS.items()],
        "palette": PALETTE,
        "open": {
            "step": at_step,
            "storage": None if tensor is None else first.graph.tensors[find_tensor(first, tensor)].storage,
        },
        "plans": [_plan_data(plan, label, columns) for plan, label in plans],
    }
    if len(plans) == 2:
        (before, old), (after, new) = plans
        rows = difference(before, after).rows
        header["difference"] = {
            "rows": [{"label": r.label, "before": r.before, "after": r.after, "unit": r.unit} for r in rows],
            "lines": difference_lines(before, after, (old, new)),
        }
    return header, bytes(columns.data)


def packed(header: dict[str, Any], columns: bytes) -> str:
    """The block as base64."""
    head = json.dumps(header, separators=(",", ":")).encode()
    start = struct.pack("<I", len(head)) + head
    return base64.b64encode(zlib.compress(start + bytes(-len(start) % 8) + columns)).decode()


class _Columns:
    """Numbers one after the other; each column is known by its type, its first byte and its length."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, kind: str, numbers: Iterable[int]) -> tuple[str, int, int]:
        """Append a column of 32-bit integers (``"i"``) or of doubles (``"d"``), exact up to 2^53."""
        column = array(kind, numbers)
        if sys.byteorder == "big":
            column.byteswap()
        start = len(self.data)
        self.data += column.tobytes() + bytes(-len(column) * column.itemsize % 8)
        return kind, start, len(column)


class _Table:
    """Each string once, in order of first appearance."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


def _plan_data(plan: Plan, label: str, columns: _Columns) -> dict[str, Any]:
    graph, places = plan.graph, plan.placements
    roles = list(ROLE_COLOURS)
    steps = {id(operation): step for step, operation in enumerate(graph.operations)}
    writers = [-1 if writer is None else steps[id(writer)] for writer in first_writers(plan)]
    operators, sources, dtypes, modules, shapes = _Table(), _Table(), _Table(), _Table(), _Table()
    storage_modules = _storage_modules(plan)
    first_dtype: dict[int, str] = {}
    for tensor in graph.tensors:
        first_dtype.setdefault(tensor.storage, tensor.dtype)
    reads = [_storages(plan, operation.reads) for operation in graph.operations]
    writes = [_storages(plan, operation.writes) for operation in graph.operations]
    found = {
        "size": columns.add("d", (storage.nbytes for storage in graph.storages)),
        "offset": columns.add("d", (place.offset for place in places)),
        "birth": columns.add("i", (place.birth for place in places)),
        "death": columns.add("i", (place.death for place in places)),
        "inPlaceOf": columns.add("i", (-1 if place.in_place_of is None else place.in_place_of for place in places)),
        "role": columns.add("i", (roles.index(storage.role) for storage in graph.storages)),
        "writer": columns.add("i", writers),
        # By step first, so that modules are in the order in which they run.
        "operationModule": columns.add("i", (modules.index(operation.module) for operation in graph.operations)),
        "module": columns.add("i", (modules.index(module) for module in storage_modules)),
        "dtype": columns.add("i", (dtypes.index(first_dtype.get(i, "none")) for i in range(len(graph.storages)))),
        "tensorStorage": columns.add("i", (tensor.storage for tensor in graph.tensors)),
        "tensorOffset": columns.add("d", (tensor.offset for tensor in graph.tensors)),
        "tensorDtype": columns.add("i", (dtypes.index(tensor.dtype) for tensor in graph.tensors)),
        "tensorShape": columns.add("i", (shapes.index(", ".join(map(str, tensor.shape))) for tensor in graph.tensors)),
        "operator": columns.add("i", (operators.index(operation.operator) for operation in graph.operations)),
        "source": columns.add("i", (sources.index(operation.source) for operation in graph.operations)),
        "readStart": columns.add("i", _starts(reads)),
        "readList": columns.add("i", (storage for row in reads for storage in row)),
        "writeStart": columns.add("i", _starts(writes)),
        "writeList": columns.add("i", (storage for row in writes for storage in row)),
        "live": columns.add("d", live_nbytes(plan)),
    }
    return {
        "label": label,
        "summary": plan.summary(),
        "steps": plan.steps,
        "names": [storage.name for storage in graph.storages],
        "tensorNames": [
            None if tensor.name == graph.storages[tensor.storage].name else tensor.name for tensor in graph.tensors
        ],
        "operationNames": [operation.name for operation in graph.operations],
        "operators": list(operators.places),
        "sources": list(sources.places),
        "modules": list(modules.places),
        "dtypes": list(dtypes.places),
        "shapes": list(shapes.places),
        "columns": found,
    }


def _storage_modules(plan: Plan) -> list[str]:
    """Of each storage: the owner of a parameter or buffer, else the module that first writes it, else reads it."""
    first: list[Operation | None] = list(first_writers(plan))
    for operation in plan.graph.operations:
        for tensor in operation.reads:
            index = plan.graph.tensors[tensor].storage
            first[index] = first[index] or operation
    found = []
    for storage, user in zip(plan.graph.storages, first, strict=True):
        owner = storage.name.rpartition(".")[0] if storage.role in _OWNED else ""
        found.append(owner or (user.module if user else ""))
    return found


def _storages(plan: Plan, tensors: Iterable[int]) -> list[int]:
    """The storages of some tensors, each once."""
    return list(dict.fromkeys(plan.graph.tensors[tensor].storage for tensor in tensors))


def _starts(rows: Sequence[Sequence[int]]) -> list[int]:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    return starts
