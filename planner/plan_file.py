"""Plans as files: JSON of the schema ``arenaplan/plan/1`` (``docs/plan-file.md``), checked from end to end on load.

A file is trusted in four steps, each naming what is wrong: the JSON and its types, the indices, the graph's own rules
and the verification of the plan, and last a digest, which also catches edits that leave a valid plan (a changed scale).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from planner import plan_schema as schema
from planner.errors import GraphError, PlanFileError, VerificationError
from planner.files import write_whole
from planner.graph import Argument, Graph, Operation, Port, Storage, Tensor, check_graph
from planner.plan import SCHEMA, Formula, Placement, Plan, Unplanned
from planner.verify import verify

#: Larger files are refused before they are read: a plan takes a few hundred bytes per tensor.
MAX_FILE_NBYTES = 1 << 30


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan; the same plan gives the same bytes, and the file is replaced whole or not at all.

    Raises:
        PlanFileError: the plan holds something the file cannot say.
        OSError: the file cannot be written; what was there before is untouched.
    """
    document = _document(plan, str(path))
    document.digest = _digest(document)
    write_whole(path, _readable(document))


def load_plan(path: Path) -> Plan:
    """Read a plan and check everything about it.

    Raises:
        PlanFileError: there is no such file, it is no plan, or it was edited.
        VerificationError: it is a plan that must not run; the error names the file.
    """
    source = str(path)
    document = _decode(_read(path), source)
    plan = _Reader(source, document).plan()
    try:
        check_graph(plan.graph)
    except GraphError as error:
        raise PlanFileError(source, f"{error.args[0]}") from error
    try:
        verify(plan)
    except VerificationError as error:
        raise VerificationError(error.rule, error.storages, error.cause, source) from error
    if document.digest != _digest(document):
        raise PlanFileError(
            source, "digest: the file was changed after it was saved; save the plan again from its graph"
        )
    return plan


def _read(path: Path) -> bytes:
    source = str(path)
    try:
        # Non-blocking, so that a pipe nobody writes to cannot hang the reader.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise PlanFileError(source, "it is a directory; name the JSON file in it")
            if not stat.S_ISREG(status.st_mode):
                raise PlanFileError(source, "it is no regular file")
            data = file.read(MAX_FILE_NBYTES + 1)
    except FileNotFoundError as error:
        raise PlanFileError(source, "there is no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanFileError(source, f"it cannot be read: {reason}") from error
    if len(data) > MAX_FILE_NBYTES:
        raise PlanFileError(source, f"it is larger than {MAX_FILE_NBYTES} bytes, the most a plan may have")
    return data


def _decode(data: bytes, source: str) -> schema.Document:
    if not data.strip():
        raise PlanFileError(source, "the file is empty")
    try:
        head = msgspec.json.decode(data, type=schema.Head)
        if head.schema != SCHEMA:
            raise PlanFileError(source, f"schema: {head.schema!r} is unknown; this version reads {SCHEMA!r}")
        return msgspec.json.decode(data, type=schema.Document)
    except msgspec.ValidationError as error:
        raise PlanFileError(source, _with_index(data, error)) from error
    except RecursionError as error:
        raise PlanFileError(source, "it is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is no UTF-8.
        raise PlanFileError(source, f"it is not JSON, or cut short: {error}") from error


def _with_index(data: bytes, error: msgspec.ValidationError) -> str:
    """The message of ``error``, with the row where the decoder says only ``[...]``."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        document = None  # The rest of the file is worse; what the decoder met first is enough.
    for name, row_type in schema.ROW_TYPES.items():
        rows = document.get(name) if isinstance(document, dict) else None
        for index, row in enumerate(rows if isinstance(rows, list) else ()):
            try:
                msgspec.convert(row, row_type)
            except msgspec.ValidationError as bad:
                what, _, where = str(bad).partition(" - at `$")
                return f"{name}[{index}]{where.rstrip('`')}: {_plain(what)}"
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    return f"{field}: {_plain(what)}" if field else _plain(what)


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:].replace("`", "")


def _digest(document: schema.Document) -> str:
    """SHA-256 of the compact document without its digest, so that layout does not count and everything else does."""
    bare = msgspec.structs.replace(document, digest="")
    return "sha256:" + hashlib.sha256(msgspec.json.encode(bare)).hexdigest()


def _readable(document: schema.Document) -> bytes:
    """One line for each field, and for each row of a list of rows: short, and readable in a text comparison."""
    lines: list[str] = []
    for name in document.__struct_fields__:
        value = getattr(document, name)
        key = _json(name)
        if name in schema.ROW_TYPES and value:
            rows = ",\n".join(f"  {_json(row)}" for row in value)
            lines.append(f"{key}: [\n{rows}\n]")
        else:
            lines.append(f"{key}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _document(plan: Plan, source: str) -> schema.Document:
    graph = plan.graph
    unnamed = set(graph.values) - {port.name for port in graph.constants}
    if unnamed:
        raise PlanFileError(source, f"constants: a value is given for {min(unnamed)!r}, which is no constant")
    formula = plan.formula
    return schema.Document(
        schema=SCHEMA,
        digest="",
        mode=graph.mode,  # type: ignore[arg-type]  # Checked on load against the three modes.
        strategy=plan.strategy,
        slices=plan.slices,
        algorithm=plan.algorithm,
        proved_optimal=plan.proved_optimal,
        alignment=plan.alignment,
        arena_bytes=plan.arena_nbytes,
        lower_bound_bytes=plan.lower_bound_nbytes,
        naive_bytes=plan.naive_nbytes,
        formula_bytes=None if formula is None else schema.FormulaRow(formula.target, formula.lightseq2),
        unplanned=[schema.UnplannedRow(entry.operator, entry.nbytes) for entry in plan.unplanned],
        storages=[
            schema.StorageRow(
                storage.name, storage.nbytes, storage.role, place.offset, place.birth, place.death, place.in_place_of
            )
            for storage, place in zip(graph.storages, plan.placements, strict=True)
        ],
        tensors=[
            schema.TensorRow(
                tensor.name, tensor.storage, tensor.offset, list(tensor.shape), list(tensor.strides), tensor.dtype
            )
            for tensor in graph.tensors
        ],
        operations=[_operation_row(operation, source) for operation in graph.operations],
        inputs=_port_rows(graph.inputs),
        states=_port_rows(graph.states),
        constants=[schema.ConstantRow(port.name, port.tensor, graph.values.get(port.name)) for port in graph.constants],
        outputs=_port_rows(graph.outputs),
        gradients=_port_rows(graph.gradients),
        mutated=_port_rows(graph.mutated),
    )


def _operation_row(operation: Operation, source: str) -> schema.OperationRow:
    try:
        return schema.OperationRow(
            name=operation.name,
            operator=operation.operator,
            arguments=schema.encode_argument(operation.arguments),
            keywords=[(name, schema.encode_argument(argument)) for name, argument in operation.keywords],
            outputs=list(operation.outputs),
            workspaces=list(operation.workspaces),
            source=operation.source,
            lane=operation.lane,
            module=operation.module,
        )
    except schema.ArgumentError as error:
        raise PlanFileError(source, f"operation {operation.name}{error.where}: {error.cause}") from error


def _port_rows(ports: Sequence[Port]) -> list[schema.PortRow]:
    return [schema.PortRow(port.name, port.tensor) for port in ports]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns a decoded document into a plan, checking every index and argument."""

    source: str
    document: schema.Document

    def plan(self) -> Plan:
        document = self.document
        formula = document.formula_bytes
        return Plan(
            graph=self._graph(),
            placements=tuple(
                Placement(
                    row.offset,
                    row.birth,
                    row.death,
                    self._index(row.in_place_of, len(document.storages), f"storages[{index}].in_place_of"),
                )
                for index, row in enumerate(document.storages)
            ),
            alignment=document.alignment,
            arena_nbytes=document.arena_bytes,
            lower_bound_nbytes=document.lower_bound_bytes,
            naive_nbytes=document.naive_bytes,
            strategy=document.strategy,
            slices=document.slices,
            algorithm=document.algorithm,
            proved_optimal=document.proved_optimal,
            formula=None if formula is None else Formula(formula.target, formula.lightseq2),
            unplanned=tuple(Unplanned(row.operator, row.bytes) for row in document.unplanned),
        )

    def _graph(self) -> Graph:
        document = self.document
        for index, row in enumerate(document.tensors):
            self._index(row.storage, len(document.storages), f"tensors[{index}].storage")
        return Graph(
            mode=document.mode,
            storages=tuple(Storage(row.name, row.bytes, row.role) for row in document.storages),
            tensors=tuple(
                Tensor(row.name, row.storage, row.offset, tuple(row.shape), tuple(row.strides), row.dtype)
                for row in document.tensors
            ),
            operations=tuple(self._operation(index, row) for index, row in enumerate(document.operations)),
            inputs=self._ports("inputs", document.inputs),
            states=self._ports("states", document.states),
            constants=self._ports("constants", document.constants),
            outputs=self._ports("outputs", document.outputs),
            gradients=self._ports("gradients", document.gradients),
            mutated=self._ports("mutated", document.mutated),
            values={row.name: row.value for row in document.constants if row.value is not None},
        )

    def _operation(self, index: int, row: schema.OperationRow) -> Operation:
        field = f"operations[{index}]"
        count = len(self.document.tensors)
        return Operation(
            name=row.name,
            operator=row.operator,
            arguments=tuple(
                self._argument(argument, f"{field}.arguments[{position}]")
                for position, argument in enumerate(row.arguments)
            ),
            keywords=tuple(
                (name, self._argument(argument, f"{field}.keywords.{name}")) for name, argument in row.keywords
            ),
            outputs=tuple(self._index(tensor, count, f"{field}.outputs") for tensor in row.outputs),
            workspaces=tuple(self._existing(tensor, count, f"{field}.workspaces") for tensor in row.workspaces),
            source=row.source,
            lane=row.lane,
            module=row.module,
        )

    def _argument(self, argument: Any, field: str) -> Argument:
        try:
            return schema.decode_argument(argument, len(self.document.tensors))
        except schema.ArgumentError as error:
            raise PlanFileError(self.source, f"{field}{error.where}: {error.cause}") from error

    def _ports(self, field: str, rows: Sequence[schema.PortRow | schema.ConstantRow]) -> tuple[Port, ...]:
        count = len(self.document.tensors)
        return tuple(
            Port(row.name, self._index(row.tensor, count, f"{field}[{index}].tensor")) for index, row in enumerate(rows)
        )

    def _index(self, index: int | None, count: int, field: str) -> int | None:
        return None if index is None else self._existing(index, count, field)

    def _existing(self, index: int, count: int, field: str) -> int:
        if index >= count:
            raise PlanFileError(self.source, f"{field}: {index} does not exist; there are {count}")
        return index
