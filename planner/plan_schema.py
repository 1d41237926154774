"""The rows of a plan file, field for field as ``docs/plan-file.md`` documents them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from planner.graph import ITEMSIZE, Argument, Dtype, Role, TensorRef

#: No count, size, offset or step of a real plan comes near it; sums of two still fit 64 bits.
MAX_COUNT = 1 << 62
#: Integers among the arguments of an operation are PyTorch's 64-bit ones.
MAX_INT = (1 << 63) - 1
#: PyTorch's deepest argument is a list of lists.
MAX_DEPTH = 16

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
#: PyTorch's own limit; without one, the product of a hostile shape would take minutes.
Shape = Annotated[list[Count], Meta(max_length=64)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
_NON_FINITE: Mapping[str, float] = MappingProxyType({"inf": math.inf, "-inf": -math.inf, "nan": math.nan})


class ArgumentError(Exception):
    """An argument that a plan file cannot hold; ``where`` is its place inside the argument, ``"[0][1]"``."""

    def __init__(self, cause: str, where: str = "") -> None:
        self.cause = cause
        self.where = where
        super().__init__(cause)


class Head(Struct):
    """Read first, so that a file of another schema is named as such."""

    schema: str


class StorageRow(Struct, forbid_unknown_fields=True):
    """A storage and its placement."""

    name: str
    bytes: Count
    role: Role
    offset: Count
    birth: Count
    death: Count
    in_place_of: Count | None


class TensorRow(Struct, forbid_unknown_fields=True):
    """A view of a storage."""

    name: str
    storage: Count
    offset: Count
    shape: Shape
    strides: Shape
    dtype: str


class OperationRow(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One step; ``module`` is left out where it is empty, as in files written before there was one."""

    name: str
    operator: str
    arguments: list[Any]
    keywords: list[tuple[str, Any]]
    outputs: list[Count | None]
    workspaces: list[Count]
    source: str
    lane: Count | None
    module: str = ""


class PortRow(Struct, forbid_unknown_fields=True):
    """A named tensor at the border of the graph."""

    name: str
    tensor: Count | None


class ConstantRow(Struct, forbid_unknown_fields=True):
    """A port whose value (base64) belongs to the program."""

    name: str
    tensor: Count | None
    value: bytes | None


class FormulaRow(Struct, forbid_unknown_fields=True):
    """Closed forms, bytes."""

    target: Count
    lightseq2: Count


class UnplannedRow(Struct, forbid_unknown_fields=True):
    """What an operator allocates outside the arena, bytes."""

    operator: str
    bytes: Count


class Document(Struct, forbid_unknown_fields=True):
    """The whole file."""

    schema: str
    digest: str
    mode: Literal["forward", "backward", "joint"]
    strategy: str
    slices: Count | None
    algorithm: str
    proved_optimal: bool
    alignment: Positive
    arena_bytes: Count
    lower_bound_bytes: Count
    naive_bytes: Count
    formula_bytes: FormulaRow | None
    unplanned: list[UnplannedRow]
    storages: list[StorageRow]
    tensors: list[TensorRow]
    operations: list[OperationRow]
    inputs: list[PortRow]
    states: list[PortRow]
    constants: list[ConstantRow]
    outputs: list[PortRow]
    gradients: list[PortRow]
    mutated: list[PortRow]


#: The fields of a document that are lists of rows.
ROW_TYPES: Mapping[str, type[Struct]] = MappingProxyType(
    {
        "unplanned": UnplannedRow,
        "storages": StorageRow,
        "tensors": TensorRow,
        "operations": OperationRow,
        "inputs": PortRow,
        "states": PortRow,
        "constants": ConstantRow,
        "outputs": PortRow,
        "gradients": PortRow,
        "mutated": PortRow,
    }
)


def encode_argument(argument: Argument) -> Any:
    """The JSON of an argument: tensors, dtypes and non-finite numbers as objects of one key, tuples as lists."""
    if isinstance(argument, TensorRef):
        return {"tensor": argument.tensor}
    if isinstance(argument, Dtype):
        if argument.name not in ITEMSIZE:
            raise ArgumentError(f"unknown dtype {argument.name!r}")
        return {"dtype": argument.name}
    if isinstance(argument, tuple):
        return [_encode_item(item, index) for index, item in enumerate(argument)]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": "nan" if math.isnan(argument) else "inf" if argument > 0 else "-inf"}
    _check_int(argument)
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ArgumentError(f"a plan file cannot hold a {type(argument).__name__}")


def decode_argument(value: Any, tensors: int, depth: int = 0) -> Argument:
    """The argument written as ``value``; references must be below ``tensors``."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return tuple(_decode_item(item, tensors, depth, index) for index, item in enumerate(value))
    if isinstance(value, dict):
        return _decode_object(value, tensors)
    _check_int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ArgumentError(f"a plan file cannot hold a {type(value).__name__}")


def _check_int(value: object) -> None:
    if isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
        raise ArgumentError("the integer does not fit 64 bits")


def _encode_item(item: Argument, index: int) -> Any:
    try:
        return encode_argument(item)
    except ArgumentError as error:
        raise ArgumentError(error.cause, f"[{index}]{error.where}") from error


def _decode_item(item: Any, tensors: int, depth: int, index: int) -> Argument:
    try:
        return decode_argument(item, tensors, depth + 1)
    except ArgumentError as error:
        raise ArgumentError(error.cause, f"[{index}]{error.where}") from error


def _decode_object(value: dict[str, Any], tensors: int) -> Argument:
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "tensor" and isinstance(inner, int) and not isinstance(inner, bool):
            if not 0 <= inner < tensors:
                raise ArgumentError(f"tensor {inner} does not exist; there are {tensors}")
            return TensorRef(inner)
        if key == "dtype" and isinstance(inner, str):
            if inner not in ITEMSIZE:
                raise ArgumentError(f"unknown dtype {inner!r}")
            return Dtype(inner)
        if key == "float" and isinstance(inner, str) and inner in _NON_FINITE:
            return _NON_FINITE[inner]
    raise ArgumentError('expected {"tensor": index}, {"dtype": name} or {"float": "inf", "-inf" or "nan"}')
