"""A graph opened for rewriting: the same lists, mutable, and closed again into a `Graph`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.graph import FILLED_ROLES, Graph, Operation, Port, Role, Storage, Tensor


class Program:
    """Mutable storages, tensors and operations of a graph, with the look-ups the passes share."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storages: list[Storage] = list(graph.storages)
        self.tensors: list[Tensor] = list(graph.tensors)
        self.operations: list[Operation] = list(graph.operations)
        self._names = {storage.name for storage in graph.storages} | {tensor.name for tensor in graph.tensors}
        self._views = {(t.storage, t.offset, t.shape, t.strides, t.dtype): i for i, t in enumerate(graph.tensors)}
        results = {graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None}
        filled = {index for index, storage in enumerate(graph.storages) if storage.role in FILLED_ROLES}
        #: Storages the caller fills or reads: their layout is fixed.
        self.border: frozenset[int] = frozenset(results | filled)

    def storage_of(self, tensor: int) -> int:
        """The storage a tensor lies in."""
        return self.tensors[tensor].storage

    def new_storage(self, name: str, nbytes: int, role: Role) -> int:
        """Add a storage."""
        self.storages.append(Storage(self._unique(name), nbytes, role))
        return len(self.storages) - 1

    def view(
        self, name: str, storage: int, offset: int, shape: Iterable[int], strides: Iterable[int], dtype: str
    ) -> int:
        """The tensor with this geometry, added if new."""
        key = (storage, offset, tuple(shape), tuple(strides), dtype)
        if key not in self._views:
            self.tensors.append(Tensor(self._unique(name), storage, offset, key[2], key[3], dtype))
            self._views[key] = len(self.tensors) - 1
        return self._views[key]

    def touching(self, storage: int) -> list[int]:
        """Positions of the operations that read or write a storage."""
        return [
            position
            for position, operation in enumerate(self.operations)
            if any(self.tensors[index].storage == storage for index in operation.reads + operation.writes)
        ]

    def touches(self, operation: Operation, storage: int) -> bool:
        """Whether the operation reads or writes any tensor of the storage."""
        return self.reads_storage(operation, storage) or self.writes_storage(operation, storage)

    def reads_storage(self, operation: Operation, storage: int) -> bool:
        """Whether the operation reads any tensor of the storage."""
        return any(self.tensors[index].storage == storage for index in operation.reads)

    def writes_storage(self, operation: Operation, storage: int) -> bool:
        """Whether the operation writes any tensor of the storage."""
        return any(self.tensors[index].storage == storage for index in operation.writes)

    def close(self) -> Graph:
        """The rewritten graph, unused storages and tensors dropped."""
        return compact(
            replace(
                self.graph,
                storages=tuple(self.storages),
                tensors=tuple(self.tensors),
                operations=tuple(self.operations),
            )
        )

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}~{count}"
        self._names.add(candidate)
        return candidate


def compact(graph: Graph) -> Graph:
    """The same graph without storages and tensors that nothing refers to, renumbered in order of first mention."""
    order: dict[int, int] = {}
    for port in graph.filled:
        if port.tensor is not None:
            order.setdefault(port.tensor, len(order))
    for operation in graph.operations:
        for index in operation.reads + operation.writes:
            order.setdefault(index, len(order))
    for port in graph.results:
        if port.tensor is not None:
            order.setdefault(port.tensor, len(order))
    storages: dict[int, int] = {}
    for index in order:
        storages.setdefault(graph.tensors[index].storage, len(storages))

    def ports(items: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(Port(port.name, None if port.tensor is None else order[port.tensor]) for port in items)

    return replace(
        graph,
        storages=tuple(graph.storages[index] for index in storages),
        tensors=tuple(replace(graph.tensors[index], storage=storages[graph.tensors[index].storage]) for index in order),
        operations=tuple(operation.renumbered(lambda index: order[index]) for operation in graph.operations),
        inputs=ports(graph.inputs),
        states=ports(graph.states),
        constants=ports(graph.constants),
        outputs=ports(graph.outputs),
        gradients=ports(graph.gradients),
        mutated=ports(graph.mutated),
    )
