"""How each storage of a graph came to hold what it holds, and whether those operations may run once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from planner.graph import FILLED_ROLES, Graph, Role
from planner.operators import is_random
from planner.rewrite.costs import cost


@dataclass(frozen=True, slots=True)
class Recipes:
    """Storages in groups: those that one operation writes belong together, and are made again together.

    Attributes:
        group_of: the group of every storage that some operation writes.
        members: the storages of each group.
        operations: positions of the operations that write them, in order.
        operands: storages outside the group that those operations read.
        dependents: for each storage, the groups that have it as an operand.
        repeatable: whether the operations may run once more: nothing random, nothing the caller fills or reads, and
            every operand holds from then on what it held for them.
        cost: of running them, as `planner.rewrite.costs`.
    """

    #: Groups that may be run again for one storage.
    MOST_GROUPS: ClassVar[int] = 128

    group_of: Mapping[int, int]
    members: tuple[frozenset[int], ...]
    operations: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[int, ...], ...]
    dependents: Mapping[int, tuple[int, ...]]
    repeatable: tuple[bool, ...]
    cost: tuple[int, ...]

    def is_complete(self, storage: int, position: int) -> bool:
        """Whether the storage can be made again and no operation from ``position`` on writes it."""
        group = self.group_of.get(storage)
        return group is not None and self.repeatable[group] and self.operations[group][-1] < position

    def operands_of(self, storage: int) -> tuple[int, ...]:
        """What the storage is made from."""
        group = self.group_of.get(storage)
        return () if group is None else self.operands[group]


def recipes(graph: Graph) -> Recipes:
    """The recipes of a graph, in time linear in its size."""
    written = [tuple(dict.fromkeys(graph.tensors[i].storage for i in o.writes)) for o in graph.operations]
    read = [tuple(dict.fromkeys(graph.tensors[i].storage for i in o.reads)) for o in graph.operations]
    last_write = {storage: position for position, storages in enumerate(written) for storage in storages}
    group_of = _groups(written)
    count = max(group_of.values(), default=-1) + 1
    members: list[set[int]] = [set() for _ in range(count)]
    for storage, group in group_of.items():
        members[group].add(storage)
    results = {graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None}
    border = results | {
        s for s, item in enumerate(graph.storages) if item.role in FILLED_ROLES or item.role is Role.PARAMETER_GRADIENT
    }
    operations: list[list[int]] = [[] for _ in range(count)]
    operands: list[dict[int, None]] = [{} for _ in range(count)]
    repeatable = [not members[group] & border for group in range(count)]
    costs = [0] * count
    dependents: dict[int, dict[int, None]] = {}
    for position, operation in enumerate(graph.operations):
        if not written[position]:
            continue
        group = group_of[written[position][0]]
        operations[group].append(position)
        costs[group] += cost(operation, graph.tensors)
        outside = [storage for storage in read[position] if storage not in members[group]]
        operands[group].update(dict.fromkeys(outside))
        for storage in outside:
            dependents.setdefault(storage, {})[group] = None
        changed = any(last_write.get(storage, -1) > position for storage in outside)
        if changed or is_random(operation.operator) or operation.lane is not None:
            repeatable[group] = False
    return Recipes(
        group_of=group_of,
        members=tuple(frozenset(items) for items in members),
        operations=tuple(tuple(items) for items in operations),
        operands=tuple(tuple(items) for items in operands),
        dependents={storage: tuple(items) for storage, items in dependents.items()},
        repeatable=tuple(repeatable),
        cost=tuple(costs),
    )


def _groups(written: list[tuple[int, ...]]) -> dict[int, int]:
    """A number for every written storage, the same for those that one operation writes; numbered by first mention."""
    parent: dict[int, int] = {}

    def root(item: int) -> int:
        while parent.setdefault(item, item) != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for storages in written:
        for storage in storages:
            parent[root(storage)] = root(storages[0])
    numbers: dict[int, int] = {}
    return {storage: numbers.setdefault(root(storage), len(numbers)) for storages in written for storage in storages}
