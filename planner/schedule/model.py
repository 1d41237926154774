"""Live bytes as a function of what has run: what the schedulers minimise the peak of."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import FILLED_ROLES, Graph
from planner.inplace import overwritable, permanent_storages, result_storages
from planner.plan import padded


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Sizes and users of every storage that comes and goes.

    Attributes:
        nbytes: padded size of each storage; zero for those alive throughout.
        users: positions of the operations that touch each storage.
        touched: for each operation, the storages it touches.
        stays: storages that outlive the last operation.
        starts_alive: storages filled before the first.
        overwrites: for each operation, ``(output storage, candidate input storages)`` that may share bytes.
        base_nbytes: bytes alive throughout.
    """

    nbytes: tuple[int, ...]
    users: tuple[frozenset[int], ...]
    touched: tuple[tuple[int, ...], ...]
    stays: frozenset[int]
    starts_alive: frozenset[int]
    overwrites: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    base_nbytes: int


def memory_model(graph: Graph, alignment: int, donate: bool) -> MemoryModel:
    """The model of a graph; ``donate`` says whether the caller's inputs are free space once dead."""
    fixed, results = permanent_storages(graph, donate=donate), result_storages(graph)
    users: list[set[int]] = [set() for _ in graph.storages]
    touched = []
    for position, operation in enumerate(graph.operations):
        storages = {graph.tensors[index].storage for index in operation.reads + operation.writes}
        touched.append(tuple(sorted(storages)))
        for storage in storages:
            users[storage].add(position)
    sizes = [padded(storage.nbytes, alignment) for storage in graph.storages]
    return MemoryModel(
        nbytes=tuple(0 if index in fixed else size for index, size in enumerate(sizes)),
        users=tuple(frozenset(items) for items in users),
        touched=tuple(touched),
        stays=results | fixed,
        starts_alive=frozenset(i for i, storage in enumerate(graph.storages) if storage.role in FILLED_ROLES),
        overwrites=tuple(overwritable(graph, operation, alignment, fixed | results) for operation in graph.operations),
        base_nbytes=sum(sizes[index] for index in fixed),
    )


class State:
    """Live bytes while operations run in some order."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model
        self.left = [len(items) for items in model.users]
        self.alive = set(model.starts_alive)
        self.live_nbytes = model.base_nbytes + sum(model.nbytes[index] for index in self.alive)
        for storage in list(self.alive):
            if not self.left[storage] and storage not in model.stays:
                self._kill(storage)

    def _kill(self, storage: int) -> None:
        self.alive.discard(storage)
        self.live_nbytes -= self.model.nbytes[storage]

    def cost(self, position: int) -> tuple[int, int]:
        """Live bytes during the operation, and after it, if it ran now."""
        model = self.model
        born = [s for s in model.touched[position] if s not in self.alive]
        dying = [s for s in model.touched[position] if self.left[s] == 1 and s not in model.stays]
        during = self.live_nbytes + sum(model.nbytes[s] for s in born)
        after = during - sum(model.nbytes[s] for s in dying)
        taken: set[int] = set()
        for output, candidates in model.overwrites[position]:
            if output in self.alive:
                continue
            for candidate in candidates:
                if candidate in dying and candidate in self.alive and candidate not in taken:
                    taken.add(candidate)
                    during -= model.nbytes[output]
                    break
        return during, after

    def run(self, position: int) -> None:
        """Account for the operation having run."""
        for storage in self.model.touched[position]:
            if storage not in self.alive:
                self.alive.add(storage)
                self.live_nbytes += self.model.nbytes[storage]
            self.left[storage] -= 1
            if not self.left[storage] and storage not in self.model.stays:
                self._kill(storage)


def peak_of(model: MemoryModel, order: tuple[int, ...]) -> int:
    """Peak live bytes of an order."""
    state = State(model)
    peak = state.live_nbytes
    for position in order:
        during, _ = state.cost(position)
        peak = max(peak, during)
        state.run(position)
    return peak
