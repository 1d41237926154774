"""Recomputation within a limit: storages are dropped while they wait, and made again when they are needed.

The graph is walked in order while the live bytes are counted. Where an operation would exceed the limit, the storage
that is cheapest to drop goes: least cost of making it again, for the bytes it frees and the steps it stays away. What
is needed and gone is made again, from what is alive, by running the operations that made it once more; what those
need and is gone as well comes first. This is the heuristic of Kirisame et al., Dynamic Tensor Rematerialization (ICLR
2021), with the times of use known in advance. Nothing random runs again: a dropout's mask is kept, never redrawn.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from planner.graph import FILLED_ROLES, Graph, Operation, Role, Tensor
from planner.inplace import overwritable, permanent_storages, result_storages
from planner.plan import padded
from planner.rewrite.program import Program
from planner.rewrite.recipes import Recipes, recipes
from planner.rewrite.workspaces import workspace_nbytes

#: Operations run again for each one of the graph, beyond which a limit counts as out of reach.
MOST_REPEATS = 3
#: Storages looked at to find that nobody wants one any more, beyond which it is kept until room is needed. A gradient
#: leads through all those made from it, so a complete search would grow with the depth of the model.
MOST_LOOKED_AT = 48


class _OutOfReachError(Exception):
    """The limit cannot be kept."""


class Evictor:
    """A graph, ready to be recomputed within one limit or another.

    Args:
        graph: without scratch storages; its order is kept.
        alignment, donate: as `planner.plan`.
    """

    def __init__(self, graph: Graph, *, alignment: int = 256, donate: bool = True) -> None:
        self.graph = graph
        self.recipes: Recipes = recipes(graph)
        self.sizes = [padded(storage.nbytes, alignment) for storage in graph.storages]
        self.fixed = permanent_storages(graph, donate=donate)
        self.kept = self.fixed | result_storages(graph)
        self.units = _units(graph)
        self.touched = [self.touched_by(range(first, past)) for first, past in self.units]
        self.uses: list[list[int]] = [[] for _ in graph.storages]
        for unit, storages in enumerate(self.touched):
            for storage in storages:
                self.uses[storage].append(unit)
        self.scratch = [workspace_nbytes(graph, range(first, past), alignment) for first, past in self.units]
        self.scratch_at = [workspace_nbytes(graph, (p,), alignment) for p in range(len(graph.operations))]
        self.onto = [overwritable(graph, operation, alignment, self.kept) for operation in graph.operations]

    def touched_by(self, positions: Iterable[int]) -> frozenset[int]:
        """The storages that operations read or write."""
        operations = (self.graph.operations[position] for position in positions)
        return frozenset(self.graph.tensors[index].storage for o in operations for index in o.reads + o.writes)

    def within(self, limit_nbytes: int) -> Graph | None:
        """The graph with as much recomputed as keeps its live bytes within a limit, ``None`` where that fails."""
        try:
            return _Walk(self, limit_nbytes).run()
        except _OutOfReachError:
            return None

    @property
    def least_possible_nbytes(self) -> int:
        """A limit that nothing can be below: what is permanent, and what one operation touches."""
        most = 0
        for (first, past), touched, scratch in zip(self.units, self.touched, self.scratch, strict=True):
            saved = sum(self.sizes[output] for output, _ in self.onto[first]) if past == first + 1 else 0
            most = max(most, sum(self.sizes[index] for index in touched - self.fixed) + scratch - saved)
        return sum(self.sizes[index] for index in self.fixed) + most


class _Walk:
    """One pass over the graph under one limit."""

    def __init__(self, base: Evictor, limit_nbytes: int) -> None:
        self.base = base
        self.graph, self.recipes, self.sizes = base.graph, base.recipes, base.sizes
        self.fixed, self.kept, self.units, self.uses = base.fixed, base.kept, base.units, base.uses
        self.limit_nbytes = limit_nbytes
        self.program = Program(self.graph)
        self.unit = -1
        filled = {s for s, item in enumerate(self.graph.storages) if item.role in FILLED_ROLES}
        self.alive: set[int] = filled | self.fixed
        self.begun: set[int] = set(self.alive)
        self.live_nbytes = sum(self.sizes[s] for s in self.alive)
        self.pinned: set[int] = set()
        self.heap: list[tuple[float, int]] = []
        self.current: dict[int, int] = {}
        self.emitted: list[Operation] = []
        self.repeats: dict[int, int] = {}
        self.left = MOST_REPEATS * len(self.graph.operations)

    def run(self) -> Graph:
        """The rewritten graph; `_OutOfReachError` where the limit cannot be kept."""
        for storage in sorted(self.alive - self.fixed):
            self._settle(storage)
        if self.live_nbytes > self.limit_nbytes:
            raise _OutOfReachError
        for unit, (first, past) in enumerate(self.units):
            self.unit = unit
            self._unit(range(first, past), self.base.touched[unit])
        self.program.operations = self.emitted
        return self.program.close()

    # -- one step of the walk -------------------------------------------------------------------------------------

    def _unit(self, positions: range, touched: frozenset[int]) -> None:
        """One operation, or all operations of a section: what it needs is made, then it runs."""
        gone = [s for s in touched if s in self.begun and s not in self.alive]
        self.pinned = set(touched)
        if gone:
            self._make_again(gone, touched)
        born = [s for s in touched if s not in self.begun]
        scratch = self.base.scratch[self.unit]
        taken = 0
        if len(positions) == 1:
            taken = self._taken_over(positions[0], set(born), frozenset(), last=self.unit)
        self._make_room(sum(self.sizes[s] for s in born) + scratch - taken)
        for storage in born:
            self.begun.add(storage)
            self._revive(storage)
        for position in positions:
            operation = self.graph.operations[position]
            self.emitted.append(operation.renumbered(self._now))
        self.pinned = set()
        for storage in sorted(touched):
            self._settle(storage)
        for storage in sorted(touched):
            self._release_operands(storage)

    def _make_again(self, gone: Iterable[int], touched: frozenset[int]) -> None:
        """Run once more, in the order of the graph, whatever leads from what is alive to the storages that are gone."""
        groups = self._closure(gone)
        if groups is None:
            raise _OutOfReachError
        positions = sorted(position for group in groups for position in self.recipes.operations[group])
        self.left -= len(positions)
        if self.left < 0:
            raise _OutOfReachError
        last_use: dict[int, int] = {}
        for place, position in enumerate(positions):
            for storage in self.base.touched_by([position]):
                last_use[storage] = place
        self.pinned = set(touched) | set(last_use)
        twins: dict[int, int] = {}
        for place, position in enumerate(positions):
            operation = self.graph.operations[position]
            written = {self.graph.tensors[index].storage for index in operation.writes}
            born = sorted(storage for storage in written if storage not in twins)
            fresh = [storage for storage in born if storage not in self.alive]
            extra = sum(self.sizes[storage] for storage in born if storage in self.alive)
            scratch = self.base.scratch_at[position]
            later = touched | {storage for storage, at in last_use.items() if at > place}
            taken = self._taken_over(position, set(born), later, last=None)
            self._make_room(sum(self.sizes[storage] for storage in fresh) + extra + scratch - taken)
            for storage in born:
                twins[storage] = self._new_twin(storage)
            for storage in fresh:
                self._revive(storage)
            self._emit_again(position, twins, written)
            for storage in fresh:
                self.current[storage] = twins[storage]
            for storage in sorted(self.base.touched_by([position])):
                if storage not in later:
                    self.pinned.discard(storage)
                    self._settle(storage, at=self.unit - 1)

    def _emit_again(self, position: int, twins: dict[int, int], written: set[int]) -> None:
        operation = self.graph.operations[position]
        group = self.recipes.group_of[next(iter(written))]
        own = self.recipes.members[group]

        def moved(index: int) -> int:
            storage = self.graph.tensors[index].storage
            return self._view(index, twins[storage]) if storage in own else self._now(index)

        count = self.repeats[position] = self.repeats.get(position, 0) + 1
        again = operation.renumbered(moved)
        name = f"{operation.name}.again" if count == 1 else f"{operation.name}.again{count}"
        self.emitted.append(replace(again, name=name))

    # -- storages that come and go --------------------------------------------------------------------------------

    def _settle(self, storage: int, at: int | None = None) -> None:
        """After a use: free the storage if nobody wants it again, else offer it to be dropped."""
        if storage in self.kept or storage not in self.alive or storage in self.pinned:
            return
        if not self._wanted(storage, self.unit if at is None else at):
            self._drop(storage)
        elif self.recipes.is_complete(storage, self.units[self.unit][1] if self.unit >= 0 else 0):
            heapq.heappush(self.heap, (self._price(storage) or 0.0, storage))

    def _release_operands(self, storage: int) -> None:
        """Free what was only kept, or made, for the sake of a storage that has now been used."""
        work = [storage]
        while work:
            for operand in self.recipes.operands_of(work.pop()):
                idle = operand in self.alive and operand not in self.kept and operand not in self.pinned
                if idle and not self._wanted(operand, self.unit):
                    self._drop(operand)
                    work.append(operand)

    def _drop(self, storage: int) -> None:
        self.alive.discard(storage)
        self.live_nbytes -= self.sizes[storage]

    def _revive(self, storage: int) -> None:
        self.alive.add(storage)
        self.live_nbytes += self.sizes[storage]

    def _make_room(self, nbytes: int) -> None:
        """Drop storages until so much more fits, the cheapest first."""
        aside: list[tuple[float, int]] = []
        while self.live_nbytes + nbytes > self.limit_nbytes:
            if not self.heap:
                raise _OutOfReachError
            _, storage = heapq.heappop(self.heap)
            if storage not in self.alive or not self.sizes[storage]:
                continue
            if storage in self.pinned:
                aside.append((0.0, storage))
                continue
            if not self._wanted(storage, self.unit):
                self._drop(storage)
                continue
            price = self._price(storage)
            if price is None:
                continue
            if self.heap and price > self.heap[0][0]:
                heapq.heappush(self.heap, (price, storage))
                continue
            self._drop(storage)
        for item in aside:
            heapq.heappush(self.heap, item)

    def _price(self, storage: int) -> float | None:
        """Cost of making a storage again for each byte and step it is away; ``None`` where it cannot be made."""
        groups = self._closure([storage])
        if groups is None:
            return None
        again = self._next_use(storage, self.unit)
        wait = (len(self.units) if again is None else again) - self.unit
        return sum(self.recipes.cost[group] for group in groups) / (max(self.sizes[storage], 1) * max(wait, 1))

    def _closure(self, gone: Iterable[int]) -> set[int] | None:
        """The groups to run so that these storages hold their values again; ``None`` where something is lost."""
        made, now = self.recipes, self.units[self.unit][0]
        found: set[int] = set()
        work = list(gone)
        while work:
            group = made.group_of.get(work.pop())
            if group is None or not made.repeatable[group]:
                return None
            if group in found:
                continue
            found.add(group)
            if len(found) > made.MOST_GROUPS or made.operations[group][-1] >= now:
                return None
            work += [operand for operand in made.operands[group] if operand not in self.alive]
        return found

    def _wanted(self, storage: int, unit: int, without: Iterable[int] = ()) -> bool:
        """Whether somebody reads the storage after this unit: an operation, or one to be run again for one."""
        work, seen = [storage], {storage, *without}
        while work:
            item = work.pop()
            if self._next_use(item, unit) is not None or len(seen) > MOST_LOOKED_AT:
                return True
            for group in self.recipes.dependents.get(item, ()):
                for member in self.recipes.members[group]:
                    if member not in seen and member in self.begun and member not in self.alive:
                        seen.add(member)
                        work.append(member)
        return False

    def _next_use(self, storage: int, unit: int) -> int | None:
        uses = self.uses[storage]
        place = bisect_right(uses, unit)
        return uses[place] if place < len(uses) else None

    def _taken_over(self, position: int, born: set[int], later: Iterable[int], last: int | None) -> int:
        """Bytes that the storages born in an operation take over from operands that die in it."""
        unit = self.unit - 1 if last is None else last
        keep = frozenset(later)
        taken: set[int] = set()
        for output, candidates in self.base.onto[position]:
            if output not in born:
                continue
            for candidate in candidates:
                free = candidate in self.alive and candidate not in taken and candidate not in keep
                if free and not self._wanted(candidate, unit, born):
                    taken.add(candidate)
                    break
        return sum(self.sizes[storage] for storage in taken)

    # -- names ----------------------------------------------------------------------------------------------------

    def _new_twin(self, storage: int) -> int:
        item = self.graph.storages[storage]
        return self.program.new_storage(f"{item.name}.again", item.nbytes, Role.TEMPORARY)

    def _now(self, index: int) -> int:
        """The tensor that stands for ``index``: a view of the storage's latest twin."""
        home = self.current.get(self.graph.tensors[index].storage)
        return index if home is None else self._view(index, home)

    def _view(self, index: int, home: int) -> int:
        tensor: Tensor = self.graph.tensors[index]
        return self.program.view(
            f"{tensor.name}.again", home, tensor.offset, tensor.shape, tensor.strides, tensor.dtype
        )


def _units(graph: Graph) -> list[tuple[int, int]]:
    """``[first, past the last)`` of every operation, and of every section as a whole."""
    found: list[tuple[int, int]] = []
    in_section = False
    for position, operation in enumerate(graph.operations):
        if operation.lane is not None and in_section:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
        in_section = operation.lane is not None
    return found
