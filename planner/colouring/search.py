"""The decision search on one instance: its arrays, and one run with its own numbering of the items and target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from planner.colouring import search_kernel
from planner.colouring.backend import Backend
from planner.colouring.instance import FREE, Instance
from planner.colouring.search_kernel import REGISTERS, SOLVED

MEMORY = 1 << 15
"""Slots for what is known to fail. More hardly helps: failures that recur do so soon."""


def sections(instance: Instance) -> tuple[list[int], list[int], int]:
    """Return the first and (exclusive) last maximal clique of each item, and how many there are, in order of time.

    A clique is maximal where a birth was the last thing to happen before a death.
    """
    steps = max(instance.end) + 1
    born, died = [False] * steps, [False] * steps
    for start, end in zip(instance.start, instance.end, strict=True):
        born[start] = True
        died[end] = True
    number = []
    section = -1
    fresh = False
    for step in range(steps):
        if died[step]:
            fresh = False
        if born[step] and not fresh:
            fresh = True
            section += 1
        number.append(section)
    return [number[start] for start in instance.start], [number[end - 1] + 1 for end in instance.end], section + 1


class Layout:
    """What every search of an instance shares: sections, neighbours and pins, and the kernel's arrays of them."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.first, self.stop, self.moments = sections(instance)
        self.free = [item for item, pin in enumerate(instance.pin) if pin == FREE]
        self.alive: list[list[int]] = [[] for _ in range(self.moments)]
        begins: list[list[int]] = [[] for _ in range(self.moments)]
        for item in self.free:
            begins[self.first[item]].append(item)
            for moment in range(self.first[item], self.stop[item]):
                self.alive[moment].append(item)
        self.near: list[list[int]] = [[] for _ in range(len(instance))]
        for item in self.free:
            others = list(self.alive[self.first[item]])
            for moment in range(self.first[item] + 1, self.stop[item]):
                others += begins[moment]
            others.remove(item)
            self.near[item] = others
        pinned = sorted(
            (pin, pin + instance.size[item], self.first[item], self.stop[item])
            for item, pin in enumerate(instance.pin)
            if pin != FREE
        )
        pins: list[list[int]] = [[] for _ in range(len(instance))]
        walls: list[list[int]] = [[] for _ in range(self.moments)]
        for low, high, first, stop in pinned:
            for moment in range(first, stop):
                walls[moment] += low, high
            for item in self.free:
                if self.first[item] < stop and first < self.stop[item]:
                    pins[item] += low, high
        self.pins, self.walls = pins, walls
        self.low = [_lowest(*item) for item in zip(instance.size, instance.alignment, pins, strict=True)]
        self.remaining = [sum(instance.size[item] for item in items) for items in self.alive]
        taken = [sum(wall[1::2]) - sum(wall[::2]) for wall in walls]
        self.ends = [self.low[item] + instance.size[item] for item in self.free]
        self.least = max([left + wall for left, wall in zip(self.remaining, taken, strict=True)] + self.ends)
        self.by_first = sorted(self.free, key=lambda item: (self.first[item], item))
        self._tables: dict[Backend, tuple[Any, ...]] = {}

    def tables(self, backend: Backend) -> tuple[Any, ...]:
        """Return the arrays that no search changes, made once for each backend."""
        if backend not in self._tables:
            instance = self.instance
            near, section = _flat(self.near), _flat(self.alive)
            pins, walls = _flat(self.pins, 2), _flat(self.walls, 2)
            tables = (instance.size, self.first, self.stop, instance.alignment, *near, *section, *pins, *walls)
            self._tables[backend] = tuple(backend.array(table) for table in tables)
        return self._tables[backend]


class Search:
    """A search for a packing no higher than ``target`` units, paused and resumed at will.

    ``order`` numbers the items; a node tries its candidates by ``weights[0] * offset + weights[1] * number``.
    """

    def __init__(
        self, layout: Layout, order: Sequence[int], weights: tuple[int, int], target: int, backend: Backend
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.target = target
        self.backend = backend
        self._hopeless = layout.least > target
        if not self._hopeless:
            self._fill(order)

    def _fill(self, order: Sequence[int]) -> None:
        """Set up the arrays of the kernel."""
        layout, instance, array, full = self.layout, self.layout.instance, self.backend.array, self.backend.full
        self._problem = layout.tables(self.backend)
        number = [0] * len(instance)
        twin = [-1] * len(instance)
        kinds: dict[tuple[int, int, int, int], int] = {}
        for index, item in enumerate(order):
            number[item] = index
            if instance.pin[item] == FREE:
                kind = (instance.size[item], layout.first[item], layout.stop[item], instance.alignment[item])
                twin[item] = kinds.get(kind, -1)
                kinds[kind] = item
        count = len(layout.free)
        triangle = count * (count + 3) // 2 + 2
        items = full(count + triangle, 0)
        items[:count] = array(layout.by_first)
        frames = full((count + 2) * search_kernel.FRAME, 0)
        frames[search_kernel.END] = frames[search_kernel.ITEMS_BASE] = count
        frames[search_kernel.TO] = layout.moments
        frames[search_kernel.DEADLINE] = min(layout.ends, default=0)
        frames[search_kernel.LAST] = frames[search_kernel.TRIED] = frames[search_kernel.KEY] = -1
        self._low = array(layout.low)
        self._state = (
            array(number),
            array(twin),
            self._low,
            full(len(instance), 0),  # placed
            array(layout.remaining),
            array([items[0] if items else 0 for items in layout.alive]),  # witness
            full(len(instance), -1),  # support
            full(layout.moments, 0),  # limits
            full(2 * (sum(map(len, layout.near)) + count + 1), 0),  # trails
            items,
            full(triangle, 0),  # candidates
            frames,
            full((2 * count + 4) * search_kernel.PIECE_SIZE, 0),  # pieces
            full(MEMORY, -1),  # failed
        )
        self._registers = full(REGISTERS, 0)

    @property
    def nodes(self) -> int:
        """Nodes counted so far."""
        return 0 if self._hopeless else int(self._registers[search_kernel.NODES])

    def advance(self, nodes: int) -> int:
        """Search on for up to ``nodes`` nodes; return ``SOLVED``, ``EXHAUSTED`` or ``PAUSED``."""
        if self._hopeless:
            return search_kernel.EXHAUSTED
        if not self.layout.free:
            return SOLVED
        limit = self.nodes + nodes
        return self.backend.advance(self._problem, self._state, self._registers, self.target, *self.weights, limit)

    def offsets(self) -> list[int]:
        """Return the packing found, by item of the instance."""
        pins = self.layout.instance.pin
        return [int(low) if pin == FREE else pin for low, pin in zip(self._low, pins, strict=True)]


def _lowest(size: int, alignment: int, pins: list[int]) -> int:
    """Return the lowest offset between the pins, given as pairs of ends."""
    at = 0
    for low, high in zip(pins[::2], pins[1::2], strict=True):
        if at < high and at + size > low:
            at = high + -high % alignment
    return at


def _flat(rows: list[list[int]], width: int = 1) -> tuple[list[int], list[int]]:
    """Return where each row begins, in entries of ``width`` numbers, and the rows as one list."""
    return [0, *accumulate(len(row) // width for row in rows)], [value for row in rows for value in row]
