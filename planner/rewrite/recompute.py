"""Recomputation of cheap operators: a tensor that only waits for the backward is computed again from what waits anyway.

Between its last use in the forward and its first in the backward such a tensor holds memory for nothing, if the
operands of the operator that made it are alive at the second point in any case. Nothing random is recomputed, so
dropout masks stay the ones the forward drew. The idea is that of Chen et al., Training Deep Nets with Sublinear
Memory Cost (2016), restricted to recomputation that needs no longer lifetimes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from planner.graph import FILLED_ROLES, Graph, Operation, Role
from planner.operators import COPY, is_elementwise, is_mutating, is_random
from planner.rewrite.program import Program

#: Operations between two uses from which a tensor counts as waiting.
GAP = 8
#: Operations that may be run again for one tensor.
CHAIN = 4
#: Smaller storages are not worth another call.
LEAST_NBYTES = 1 << 16
_CHEAP = frozenset({"aten.native_layer_norm.default", "aten._softmax.default"})


def recompute(graph: Graph, *, gap: int = GAP, least_nbytes: int = LEAST_NBYTES) -> Graph:
    """The graph with every such tensor recomputed just before its first use after the gap.

    Args:
        graph: to rewrite.
        gap: operations between two uses from which a tensor counts as waiting.
        least_nbytes: smaller storages are left alone; running an operator again costs a call.
    """
    return _Recomputation(graph, gap, least_nbytes).run()


@dataclass(frozen=True, slots=True)
class _Again:
    """A storage that is made again: from which position on its twin stands for it."""

    first_late: int
    twins: dict[int, int]


class _Recomputation:
    """One pass over the graph, deciding in the order in which tensors are made."""

    def __init__(self, graph: Graph, gap: int, least_nbytes: int) -> None:
        self.gap = gap
        self.least_nbytes = least_nbytes
        self.program = Program(graph)
        self.uses: dict[int, list[int]] = {}
        self.writers: dict[int, list[int]] = {}
        for position, operation in enumerate(graph.operations):
            for storage in {graph.tensors[index].storage for index in operation.reads + operation.writes}:
                self.uses.setdefault(storage, []).append(position)
            for storage in {graph.tensors[index].storage for index in operation.writes}:
                self.writers.setdefault(storage, []).append(position)
        self.again: dict[int, _Again] = {}
        self.inserted: dict[int, list[Operation]] = {}

    def run(self) -> Graph:
        program = self.program
        for storage in sorted(self.uses, key=lambda s: self.uses[s][0]):
            late = self._first_late(storage)
            if late is None:
                continue
            steps = self._recipe(storage, late, CHAIN)
            if steps:
                self._insert(storage, late, steps)
        operations: list[Operation] = []
        for position, operation in enumerate(program.operations):
            operations += self.inserted.get(position, [])
            operations.append(operation.renumbered(partial(self._current_at, position)))
        program.operations = operations
        return program.close()

    def _first_late(self, storage: int) -> int | None:
        """Position of the first use after the longest wait, if the storage may be made again."""
        program, uses = self.program, self.uses[storage]
        if storage in program.border or program.storages[storage].nbytes < self.least_nbytes or len(uses) < 2:
            return None
        if len(self.writers.get(storage, ())) != 1 or self.writers[storage][0] != uses[0]:
            return None
        wait, late = max((uses[k + 1] - uses[k], -k) for k in range(len(uses) - 1))
        return uses[1 - late] if wait >= self.gap else None

    def _recipe(self, storage: int, late: int, budget: int) -> list[int] | None:
        """Positions of the operations to run again, in order; ``None`` if something they need is gone by then."""
        if budget < 1 or len(self.writers.get(storage, ())) != 1:
            return None
        position = self.writers[storage][0]
        operation = self.program.operations[position]
        cheap = is_elementwise(operation.operator) or operation.operator in _CHEAP or operation.operator == COPY
        if not cheap or is_random(operation.operator) or is_mutating(operation) or operation.lane is not None:
            return None
        written = {self.program.storage_of(index) for index in operation.writes}
        if any(self.program.storage_of(index) in written for index in operation.reads):
            return None
        if storage in self.program.border or any(len(self.writers[other]) != 1 for other in written):
            return None
        steps: list[int] = []
        for operand in dict.fromkeys(self.program.storage_of(index) for index in operation.reads):
            if self._alive(operand, position, late):
                continue
            before = self._recipe(operand, late, budget - 1 - len(steps))
            if before is None:
                return None
            steps += [step for step in before if step not in steps]
        return [*steps, position] if len(steps) < budget else None

    def _alive(self, storage: int, made: int, late: int) -> bool:
        """Whether the storage still holds at ``late`` what it held at ``made``, and is needed from there on anyway."""
        if any(made < writer < late for writer in self.writers.get(storage, ())):
            return False
        role = self.program.storages[storage].role
        if role in (Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
            return True
        if storage in self.again and self.again[storage].first_late > late:
            return False
        return self.uses[storage][-1] >= late or (role in FILLED_ROLES and role is not Role.INPUT)

    def _insert(self, storage: int, late: int, steps: list[int]) -> None:
        """Insert copies of the operations at ``late``, writing twins of what they wrote."""
        program = self.program
        twins: dict[int, int] = {}
        operations = self.inserted.setdefault(late, [])
        for step in steps:
            operation = program.operations[step]
            for index in operation.writes:
                old = program.storage_of(index)
                if old not in twins:
                    twins[old] = program.new_storage(
                        f"{program.storages[old].name}.again", program.storages[old].nbytes, Role.TEMPORARY
                    )

            def moved(index: int) -> int:
                home = twins.get(program.storage_of(index))
                return self._current_at(late, index) if home is None else self._twin(index, home)

            again = operation.renumbered(moved)
            operations.append(replace(again, name=f"{operation.name}.again{len(operations)}@{late}"))
        self.again[storage] = _Again(late, {storage: twins[storage]})

    def _twin(self, index: int, home: int) -> int:
        tensor = self.program.tensors[index]
        return self.program.view(
            f"{tensor.name}.again", home, tensor.offset, tensor.shape, tensor.strides, tensor.dtype
        )

    def _current_at(self, position: int, index: int) -> int:
        """The tensor that stands for ``index`` at a position: its twin once that exists."""
        storage = self.program.storage_of(index)
        again = self.again.get(storage)
        if again is None or position < again.first_late:
            return index
        return self._twin(index, again.twins[storage])
