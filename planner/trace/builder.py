"""Storages, tensors and operations of a `Graph`, collected from fx nodes; storages are told apart by the fakes' own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import TraceError
from planner.graph import (
    Argument,
    Dtype,
    Operation,
    Port,
    Role,
    Storage,
    Tensor,
    TensorRef,
    dense_strides,
)
from planner.operators import COPY, FILL, base_name, is_random
from planner.trace import normalise
from planner.trace.capture import CONTROL_FLOW, CONTROL_FLOW_REMEDY
from planner.trace.nodes import (
    dtype_name,
    is_scalar_read,
    mutated_arguments,
    operator_name,
    refuse_layout,
    schema_name,
    source_of,
)
from planner.trace.origins import module_of

_MAKE = "make it outside and pass it in, or register it as a buffer"
#: Keywords that the arena decides: where and how the result lies.
_PLACEMENT_KEYWORDS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


class Builder:
    """Collects storages, tensors and operations while fx nodes are visited in order."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self.backward_operations: set[str] = set()
        self.backward = False
        self.values: dict[str, bytes] = {}
        self.constants: list[Port] = []
        self.storage_of_fake: dict[int, int] = {}
        self.base_of_storage: dict[int, int] = {}
        self.node_of_storage: dict[int, torch.fx.Node] = {}
        self.tensor_of: dict[torch.fx.Node, int | tuple[int | None, ...]] = {}
        self.views: dict[tuple[Any, ...], int] = {}
        self.names: set[str] = set()
        self.operation_counts: dict[str, int] = {}
        self.storage_counts: dict[str, int] = {}

    # -- storages and tensors ---------------------------------------------------------------------------------

    def unique(self, name: str) -> str:
        """``name``, or ``name.2``, ``name.3``, … if taken."""
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}.{count}"
        self.names.add(candidate)
        return candidate

    def new_storage(self, name: str, nbytes: int, role: Role) -> int:
        count = self.storage_counts[name] = self.storage_counts.get(name, 0) + 1
        self.storages.append(Storage(name if count == 1 else f"{name}.{count}", nbytes, role))
        return len(self.storages) - 1

    def view(
        self, name: str, storage: int, offset: int, shape: Iterable[int], strides: Iterable[int], dtype: str
    ) -> int:
        """The tensor with this geometry; equal geometries are one tensor."""
        key = (storage, offset, tuple(shape), tuple(strides), dtype)
        if key not in self.views:
            self.tensors.append(Tensor(self.unique(name), storage, offset, key[2], key[3], dtype))
            self.views[key] = len(self.tensors) - 1
        return self.views[key]

    def fresh(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
        """A tensor over a new temporary storage that is just large enough."""
        extent = Tensor(name, 0, 0, shape, strides, dtype).end
        storage = self.new_storage(name, extent, Role.TEMPORARY)
        return self.view(name, storage, 0, shape, strides, dtype)

    def known(self, value: torch.Tensor) -> int | None:
        """The storage a fake tensor lies in, if one was made."""
        return self.storage_of_fake.get(value.untyped_storage()._cdata)

    def add_value(
        self, name: str, value: torch.Tensor, role: Role, node: torch.fx.Node, *, compact: bool = False
    ) -> int:
        """The tensor of a fake value, over a known storage or a new one."""
        refuse_layout(value, node)
        dtype = dtype_name(value.dtype)
        storage = self.known(value)
        if storage is None:
            nbytes = value.untyped_storage().nbytes()
            base = 0
            if compact:
                base = int(value.storage_offset()) * value.element_size()
                nbytes = Tensor(name, 0, 0, tuple(value.shape), tuple(value.stride()), dtype).end
            storage = self.new_storage(name, nbytes, role)
            self.storage_of_fake[value.untyped_storage()._cdata] = storage
            self.base_of_storage[storage] = base
            self.node_of_storage[storage] = node
        offset = int(value.storage_offset()) * value.element_size() - self.base_of_storage.get(storage, 0)
        end = Tensor(name, storage, max(offset, 0), tuple(value.shape), tuple(value.stride()), dtype).end
        if offset < 0 or end > self.storages[storage].nbytes:
            self._grow(storage, offset, end, node)
            offset = int(value.storage_offset()) * value.element_size() - self.base_of_storage[storage]
        return self.view(name, storage, offset, value.shape, value.stride(), dtype)

    def _grow(self, storage: int, offset: int, end: int, node: torch.fx.Node) -> None:
        """Widen a compacted input storage so that an aliasing input outside its span fits too."""
        if self.storages[storage].role not in (Role.INPUT, Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
            raise TraceError(node.name, "it reaches outside its storage", "avoid as_strided beyond a tensor's own span")
        shift = max(-offset, 0)
        shift += -shift % 16
        old = self.storages[storage]
        self.base_of_storage[storage] -= shift
        self.storages[storage] = Storage(old.name, max(old.nbytes + shift, end + shift), old.role)
        if shift:
            for index, tensor in enumerate(self.tensors):
                if tensor.storage == storage:
                    self.tensors[index] = Tensor(
                        tensor.name, storage, tensor.offset + shift, tensor.shape, tensor.strides, tensor.dtype
                    )
            self.views = {
                (t.storage, t.offset, t.shape, t.strides, t.dtype): index for index, t in enumerate(self.tensors)
            }

    # -- nodes ------------------------------------------------------------------------------------------------

    def placeholder(self, node: torch.fx.Node, name: str, role: Role) -> None:
        self.tensor_of[node] = self.add_value(name, node.meta["val"], role, node, compact=True)

    def constant(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        """A tensor the program closes over; its bytes travel with the graph."""
        name = node.name.strip("_")
        with _disable_current_modes():  # AOTAutograd compiles under a fake mode; this tensor is real
            dense = value.detach().cpu().contiguous()
            flat = dense.reshape(-1)
            raw = flat.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        shape = tuple(dense.shape)
        index = self.fresh(name, shape, tuple(dense.stride()), dtype_name(dense.dtype))
        storage = self.tensors[index].storage
        self.storages[storage] = Storage(self.storages[storage].name, self.storages[storage].nbytes, Role.CONSTANT)
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            self.storage_of_fake[fake.untyped_storage()._cdata] = storage
        self.constants.append(Port(self.tensors[index].name, index))
        self.values[self.tensors[index].name] = raw
        self.tensor_of[node] = index

    def call(self, node: torch.fx.Node) -> None:
        """Lower one operator call: a view, a normalised copy or fill, or an operation of its own."""
        value = node.meta.get("val")
        if getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.target, torch._ops.OpOverload):
            whole = self.tensor_of[node.args[0]]  # type: ignore[index]
            if isinstance(whole, tuple) and isinstance(node.args[1], int):
                picked = whole[node.args[1]]
                if picked is not None:
                    self.tensor_of[node] = picked
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise TraceError(f"torch.{node.target}", CONTROL_FLOW, CONTROL_FLOW_REMEDY, source_of(node))
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TraceError(str(node.target), "it is no ATen operator", "report this as a bug", source_of(node))
        if is_scalar_read(node, value):
            raise TraceError(
                str(node.target), "it reads a value out of a tensor", "compute it outside the module", source_of(node)
            )
        self._alias_constant(node, value)
        if _is_view(node, value, self):
            self.tensor_of[node] = self._values(node, value)
            return
        special = normalise.TABLE.get(schema_name(node.target))
        if special is not None and special(self, node):
            return
        if torch.Tag.inplace_view in node.target.tags:  # `t_` and its like change a tensor's strides, not its elements
            self.tensor_of[node] = self._values(node, value)
            return
        self._operation(node, value)

    def _alias_constant(self, node: torch.fx.Node, value: Any) -> None:
        """Let a view of a captured tensor lie in its storage; fake mode makes another fake of it for each use."""
        source = self.tensor_of.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        target = node.target
        if not isinstance(source, int) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return
        storage = self.tensors[source].storage
        if self.storages[storage].role is not Role.CONSTANT or self.known(value) is not None:
            return
        if isinstance(target, torch._ops.OpOverload) and target._schema.returns[0].alias_info is not None:
            self.storage_of_fake[value.untyped_storage()._cdata] = storage

    def _values(self, node: torch.fx.Node, value: Any) -> int | tuple[int | None, ...]:
        if isinstance(value, torch.Tensor):
            return self.add_value(node.name, value, Role.TEMPORARY, node)
        return tuple(
            self.add_value(f"{node.name}.{index}", item, Role.TEMPORARY, node)
            if isinstance(item, torch.Tensor)
            else None
            for index, item in enumerate(value)
        )

    def _operation(self, node: torch.fx.Node, value: Any) -> None:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(str(target), "it is no ATen operator", "report this as a bug", source_of(node))
        arguments = tuple(self.argument(item) for item in node.args)
        keywords = tuple(
            (key, self.argument(item)) for key, item in sorted(node.kwargs.items()) if key not in _PLACEMENT_KEYWORDS
        )
        mutated = mutated_arguments(node)
        if any(argument.is_out for argument in target._schema.arguments):
            raise TraceError(str(target), "it is called with out=", "use the tensor it returns", source_of(node))
        if not mutated and not any(isinstance(item, torch.fx.Node) for item in node.all_input_nodes):
            raise TraceError(
                str(target), "it makes a tensor from numbers alone in a way that is not offered", _MAKE, source_of(node)
            )
        outputs: list[int | None] = []
        for item in mutated:
            index = self.index(item)
            self.refuse_overlap(index, node)
            outputs.append(index)
        results = (
            [value] if isinstance(value, torch.Tensor) else list(value) if isinstance(value, (list, tuple)) else []
        )
        named: list[int | None] = []
        for position, item in enumerate(results):
            if not isinstance(item, torch.Tensor):
                named.append(None)
                outputs += [] if mutated else [None]
                continue
            name = node.name if isinstance(value, torch.Tensor) else f"{node.name}.{position}"
            refuse_layout(item, node)
            fresh = self.known(item) is None
            index = self.add_value(name, item, Role.TEMPORARY, node)
            named.append(index)
            if fresh:
                self.refuse_overlap(index, node)
                outputs.append(index)
        if mutated and len(outputs) > len(mutated) and base_name(operator_name(target)) != "native_batch_norm":
            cause = "it changes one of its arguments and returns another tensor besides"
            raise TraceError(f"{target} ({node.name})", cause, "use a form that does one or the other", source_of(node))
        if results:
            self.tensor_of[node] = _only(named) if isinstance(value, torch.Tensor) else tuple(named)
        self.emit(node, operator_name(target), arguments, keywords, tuple(outputs))

    def emit(
        self,
        node: torch.fx.Node,
        operator: str,
        arguments: tuple[Argument, ...],
        keywords: tuple[tuple[str, Argument], ...],
        outputs: tuple[int | None, ...],
    ) -> None:
        """Append one operation.

        Raises:
            TraceError: it changes a tensor the program only closes over, or draws random numbers in the backward.
        """
        for index in outputs:
            storage = None if index is None else self.storages[self.tensors[index].storage]
            if storage is not None and storage.role is Role.CONSTANT:
                raise TraceError(
                    f"{node.target} ({node.name})",
                    f"it changes {storage.name}, a tensor that is no input, parameter or buffer",
                    "register it as a buffer, or pass it as an input",
                    source_of(node),
                )
        if self.backward and is_random(operator):
            raise TraceError(
                f"{node.target} ({node.name})",
                "it draws random numbers in the backward, where a recomputed forward (torch.utils.checkpoint) would "
                "need those it drew before",
                "leave out the checkpoint; plan() recomputes cheap operators itself",
                source_of(node),
            )
        count = self.operation_counts[node.name] = self.operation_counts.get(node.name, 0) + 1
        name = node.name if count == 1 else f"{node.name}.{count}"
        operation = Operation(
            name, operator, arguments, keywords, outputs, source=source_of(node), module=module_of(node)
        )
        self.operations.append(operation)
        if self.backward:
            self.backward_operations.add(name)

    def copy(self, node: torch.fx.Node, source: int, destination: int) -> None:
        """Append a copy of ``source`` into ``destination`` (broadcast to its shape)."""
        self.refuse_overlap(destination, node)
        self.emit(node, COPY, (TensorRef(self.broadcast(source, self.tensors[destination].shape)),), (), (destination,))

    def fill(self, node: torch.fx.Node, destination: int, value: float | int | bool) -> None:
        """Append a fill of ``destination`` with one value."""
        self.emit(node, FILL, (value,), (), (destination,))

    def broadcast(self, index: int, shape: tuple[int, ...]) -> int:
        """A view of a tensor expanded to ``shape`` by strides of zero."""
        tensor = self.tensors[index]
        if tensor.shape == shape:
            return index
        lead = len(shape) - len(tensor.shape)
        strides = [0] * lead + [
            stride if size == wanted else 0
            for size, stride, wanted in zip(tensor.shape, tensor.strides, shape[lead:], strict=True)
        ]
        return self.view(tensor.name, tensor.storage, tensor.offset, shape, strides, tensor.dtype)

    def index(self, node: Any) -> int:
        """The tensor an fx argument stands for."""
        found = self.tensor_of.get(node)
        if not isinstance(found, int):
            raise TraceError(str(node), "it is not a tensor", "report this as a bug")
        return found

    def argument(self, item: Any) -> Argument:
        """An fx argument as a `Graph` argument; lazily conjugated or negated tensors are resolved first."""
        if isinstance(item, torch.fx.Node):
            return TensorRef(self._resolved(item))
        if isinstance(item, (list, tuple)):
            return tuple(self.argument(part) for part in item)
        if isinstance(item, torch.dtype):
            return Dtype(dtype_name(item))
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, complex):
            return f"complex:{item.real!r},{item.imag!r}"
        if isinstance(item, (torch.memory_format, torch.layout, torch.device)):
            return str(item)
        if isinstance(item, torch.Generator):
            raise TraceError("a random operator", "it draws from a generator of its own", "use the default generator")
        raise TraceError(
            f"argument {item!r}", f"a {type(item).__name__} cannot be planned", "pass it as a tensor or number"
        )

    def _resolved(self, node: torch.fx.Node) -> int:
        value = node.meta.get("val")
        index = self.index(node)
        for lazy, operator in (("is_conj", "aten.conj_physical.default"), ("is_neg", "aten.neg.default")):
            if isinstance(value, torch.Tensor) and getattr(value, lazy)():
                raw = self.tensors[index]
                resolved = self.fresh(f"{raw.name}.{lazy[3:]}", raw.shape, dense_strides(raw.shape), raw.dtype)
                self.emit(node, operator, (TensorRef(index),), (), (resolved,))
                index = resolved
        return index

    def refuse_overlap(self, index: int, node: torch.fx.Node) -> None:
        """Refuse to write through a view whose elements share bytes."""
        tensor = self.tensors[index]
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)):
            raise TraceError(
                str(node.target),
                f"it writes {tensor.name}, whose elements overlap (an expanded view)",
                "call .contiguous() or .clone() first",
                source_of(node),
            )


def _only(items: list[int | None]) -> int:
    (item,) = items
    if item is None:
        raise TraceError("an operation", "it returns no tensor", "report this as a bug")
    return item


def _is_view(node: torch.fx.Node, value: Any, builder: Builder) -> bool:
    """Whether every tensor returned lies in a storage already known and nothing is written."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or mutated_arguments(node):
        return False
    values = [value] if isinstance(value, torch.Tensor) else list(value) if isinstance(value, (list, tuple)) else []
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    if not tensors or is_random(operator_name(target)):
        return False
    return all(item.layout == torch.strided and builder.known(item) is not None for item in tensors)
