"""The graph: operations over tensors, and the storages those tensors are views of.

A graph is a program in execution order. Views cost nothing and are no operations: they are tensors over the same
storage. An operation writes its output tensors; when an output lies in a storage that an earlier operation (or the
caller) already filled, the program itself mutates it, as ``x.add_(y)`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from planner.errors import GraphError

#: Bytes per element of every dtype a plan can name (PyTorch's names).
ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "bool": 1,
    }
)


class Role(StrEnum):
    """What a storage is for; decides who fills it, who may overwrite it and how it is counted."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    SAVED = "saved"
    GRAD_OUTPUT = "grad_output"
    CONSTANT = "constant"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    OUTPUT = "output"
    GRADIENT = "gradient"
    PARAMETER_GRADIENT = "parameter_gradient"
    OPTIMIZER_STATE = "optimizer_state"


#: Roles filled by the caller before the first step.
FILLED_ROLES = frozenset(
    {
        Role.PARAMETER,
        Role.BUFFER,
        Role.INPUT,
        Role.SAVED,
        Role.GRAD_OUTPUT,
        Role.CONSTANT,
        Role.OPTIMIZER_STATE,
    }
)
#: Filled roles whose bytes become free space after their last use.
DONATED_ROLES = frozenset({Role.INPUT, Role.SAVED, Role.GRAD_OUTPUT})
#: Roles counted in ``resident_bytes``: there before the pass starts.
RESIDENT_ROLES = FILLED_ROLES | {Role.PARAMETER_GRADIENT}


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of ``nbytes`` bytes that gets one offset in the arena."""

    name: str
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True)
class Tensor:
    """A strided view of a storage.

    Attributes:
        name: unique within a graph.
        storage: index into ``Graph.storages``.
        offset: of element zero, in bytes from the start of the storage.
        shape: elements along each dimension.
        strides: in elements, non-negative.
        dtype: PyTorch's name, ``"float32"``.
    """

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Byte offset just past the last element touched (equal to ``offset`` for an empty tensor)."""
        if self.numel == 0:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.numel == 0 or dense_strides(self.shape) == tuple(
            stride if size != 1 else dense
            for size, stride, dense in zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        )


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """An argument that is a tensor: index into ``Graph.tensors``."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Dtype:
    """An argument that is a dtype."""

    name: str


Argument = TensorRef | Dtype | int | float | bool | str | None | tuple["Argument", ...]


def references(argument: Argument) -> Iterator[int]:
    """The tensors an argument refers to, in order, nested tuples included."""
    if isinstance(argument, TensorRef):
        yield argument.tensor
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def substitute(argument: Argument, change: Callable[[int], int]) -> Argument:
    """The argument with every tensor reference passed through ``change``."""
    if isinstance(argument, TensorRef):
        return TensorRef(change(argument.tensor))
    if isinstance(argument, tuple):
        return tuple(substitute(item, change) for item in argument)
    return argument


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: unique within a graph.
        operator: name in the runtime's table, ``"aten.mm.default"`` or ``"arenaplan.matmul"``.
        arguments: positional arguments.
        keywords: keyword arguments, ``(name, value)``, sorted by name.
        outputs: tensors written, in the operator's order; ``None`` for a result nobody uses.
        workspaces: scratch tensors alive during this operation only.
        source: ``"file.py:12"`` in the user's code, or ``""``.
        lane: consecutive operations with a lane are a section; its lanes may run at the same time, each in order.
        module: path of the submodule it comes from, ``"layers.0.attention"``, or ``""``; in the backward, of the
            submodule whose forward it differentiates.
    """

    name: str
    operator: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    outputs: tuple[int | None, ...]
    workspaces: tuple[int, ...] = ()
    source: str = ""
    lane: int | None = None
    module: str = ""

    @property
    def reads(self) -> tuple[int, ...]:
        """Tensors among the arguments, each once, in order."""
        found: dict[int, None] = {}
        for argument in self.arguments:
            found.update(dict.fromkeys(references(argument)))
        for _, argument in self.keywords:
            found.update(dict.fromkeys(references(argument)))
        return tuple(found)

    @property
    def writes(self) -> tuple[int, ...]:
        """Tensors written, scratch included."""
        return tuple(output for output in self.outputs if output is not None) + self.workspaces

    def renumbered(self, change: Callable[[int], int]) -> Operation:
        """The operation with every tensor index passed through ``change``."""
        return replace(
            self,
            arguments=tuple(substitute(argument, change) for argument in self.arguments),
            keywords=tuple((name, substitute(argument, change)) for name, argument in self.keywords),
            outputs=tuple(None if output is None else change(output) for output in self.outputs),
            workspaces=tuple(change(index) for index in self.workspaces),
        )


@dataclass(frozen=True, slots=True)
class Port:
    """A named tensor at the border of a graph; ``tensor`` is ``None`` where there is none (an unused gradient)."""

    name: str
    tensor: int | None


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced program.

    Attributes:
        mode: ``"forward"``, ``"backward"`` or ``"joint"``.
        storages, tensors: what the operations work on.
        operations: in execution order.
        inputs: what ``run(*inputs)`` is handed, in order.
        states: parameters and buffers, by their names in the module.
        constants: tensors whose values belong to the program.
        outputs: what the module returns, flattened in order.
        gradients: by name; a parameter's name or ``input.K``.
        mutated: inputs and states the program changes in place, written back to the caller after the pass.
        values: the bytes of each constant, by name.
        bindings: live tensors behind ``states``; never compared and never saved.
        forward: in mode ``"backward"``: ``forward(*inputs) -> (outputs, saved)``, run eagerly.
        rebuild: puts flattened outputs back into the structure the module returned.
    """

    mode: str
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[Port, ...] = ()
    states: tuple[Port, ...] = ()
    constants: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    gradients: tuple[Port, ...] = ()
    mutated: tuple[Port, ...] = ()
    values: Mapping[str, bytes] = field(default_factory=dict)
    bindings: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    forward: Callable[..., tuple[Any, tuple[Any, ...]]] | None = field(default=None, compare=False, repr=False)
    rebuild: Callable[[list[Any]], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def filled(self) -> tuple[Port, ...]:
        """Ports the caller fills before the first step."""
        return self.inputs + self.states + self.constants

    @property
    def results(self) -> tuple[Port, ...]:
        """Ports the caller reads after the last step."""
        return self.outputs + self.gradients + self.mutated


def sections(graph: Graph) -> tuple[tuple[int, int], ...]:
    """``[first, past the last)`` of every run of operations that have a lane."""
    found: list[tuple[int, int]] = []
    for step, operation in enumerate(graph.operations):
        if operation.lane is None:
            continue
        if found and found[-1][1] == step:
            found[-1] = (found[-1][0], step + 1)
        else:
            found.append((step, step + 1))
    return tuple(found)


def check_graph(graph: Graph) -> None:
    """Check that indices are in range, names unique and tensors inside their storages; raise `GraphError`."""
    for kind, names in (
        ("storage", [storage.name for storage in graph.storages]),
        ("tensor", [tensor.name for tensor in graph.tensors]),
        ("operation", [operation.name for operation in graph.operations]),
    ):
        for name in names:
            if not name.isprintable():
                raise GraphError(f"{kind} {name!r}", "its name has characters that cannot be printed")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise GraphError(f"{kind} {twice}", "the name is used twice")
    for storage in graph.storages:
        if storage.nbytes < 0:
            raise GraphError(f"storage {storage.name}", f"negative size {storage.nbytes}")
    for tensor in graph.tensors:
        _check_tensor(graph, tensor)
    for operation in graph.operations:
        for index in operation.reads + operation.writes:
            if not 0 <= index < len(graph.tensors):
                raise GraphError(f"operation {operation.name}", f"refers to tensor {index}, which does not exist")
    for port in graph.filled + graph.results:
        if port.tensor is not None and not 0 <= port.tensor < len(graph.tensors):
            raise GraphError(f"port {port.name}", f"refers to tensor {port.tensor}, which does not exist")


def _check_tensor(graph: Graph, tensor: Tensor) -> None:
    if not 0 <= tensor.storage < len(graph.storages):
        raise GraphError(f"tensor {tensor.name}", f"storage {tensor.storage} does not exist")
    if tensor.dtype not in ITEMSIZE:
        raise GraphError(f"tensor {tensor.name}", f"unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) != len(tensor.strides):
        raise GraphError(f"tensor {tensor.name}", f"shape {tensor.shape} and strides {tensor.strides} differ in length")
    if tensor.offset < 0 or any(size < 0 for size in tensor.shape) or any(stride < 0 for stride in tensor.strides):
        raise GraphError(f"tensor {tensor.name}", "negative offset, size or stride")
    if tensor.offset % tensor.itemsize:
        raise GraphError(
            f"tensor {tensor.name}", f"offset {tensor.offset} is no multiple of its {tensor.itemsize}-byte items"
        )
    storage = graph.storages[tensor.storage]
    if tensor.end > storage.nbytes:
        raise GraphError(
            f"tensor {tensor.name}", f"ends at byte {tensor.end} of storage {storage.name}, which has {storage.nbytes}"
        )
