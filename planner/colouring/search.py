"""The decision search on one instance: its arrays, and one run with its own numbering of the items and target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.colouring import search_kernel
from planner.colouring.backend import Backend
from planner.colouring.instance import FREE, Instance
from planner.colouring.search_kernel import REGISTERS, SOLVED

MEMORY = 1 << 15
"""Slots for what is known to fail. More hardly helps: failures that recur do so soon."""

NearAt = tuple[list[int], list[int]]


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
    """What every search of an instance shares: sections, neighbours and pins, in the instance's own numbering."""

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
        self.pinned = sorted(
            (pin, pin + instance.size[item], self.first[item], self.stop[item])
            for item, pin in enumerate(instance.pin)
            if pin != FREE
        )
        self.by_first = sorted(self.free, key=lambda item: (self.first[item], item))

    def pins_during(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the pinned ranges alive in some of the sections, lowest first."""
        return [(low, high) for low, high, begins, ends in self.pinned if begins < stop and first < ends]


class Search:
    """A search for a packing no higher than ``target`` units, paused and resumed at will.

    ``order`` numbers the items; a node tries its candidates by ``weights[0] * offset + weights[1] * number``.
    """

    def __init__(
        self, layout: Layout, order: Sequence[int], weights: tuple[int, int], target: int, backend: Backend
    ) -> None:
        self.layout = layout
        self.order = [item for item in order if layout.instance.pin[item] == FREE]
        self.weights = weights
        self.target = target
        self.backend = backend
        self._hopeless = not self._fill()

    def _fill(self) -> bool:
        """Set up the arrays of the kernel; return whether the target is not plainly out of reach."""
        layout, backend, order = self.layout, self.backend, self.order
        count = len(order)
        number = dict(zip(order, range(count), strict=True))
        size = [layout.instance.size[item] for item in order]
        first = [layout.first[item] for item in order]
        stop = [layout.stop[item] for item in order]
        alignment = [layout.instance.alignment[item] for item in order]
        near_at, near = _flat([[number[other] for other in layout.near[item]] for item in order])
        section_at, section = _flat([sorted(number[item] for item in items) for items in layout.alive])
        if layout.pinned:
            pins = [layout.pins_during(*bounds) for bounds in zip(first, stop, strict=True)]
            walls = [layout.pins_during(moment, moment + 1) for moment in range(layout.moments)]
        else:
            pins, walls = [[]] * count, [[]] * layout.moments
        low = [_lowest(*item) for item in zip(size, alignment, pins, strict=True)]
        remaining = [sum(layout.instance.size[item] for item in items) for items in layout.alive]
        self._low = low
        for nbytes, wall in zip(remaining, walls, strict=True):
            if nbytes + sum(high - bottom for bottom, high in wall) > self.target:
                return False
        deadline = min((at + nbytes for at, nbytes in zip(low, size, strict=True)), default=0)
        if any(at + nbytes > self.target for at, nbytes in zip(low, size, strict=True)):
            return False
        kinds: dict[tuple[int, int, int, int], int] = {}
        twin = []
        for index, kind in enumerate(zip(size, first, stop, alignment, strict=True)):
            twin.append(kinds.get(kind, -1))
            kinds[kind] = index
        array, full = backend.array, backend.full
        tables = [size, first, stop, alignment, twin, near_at, near, section_at, section]
        for rows in (pins, walls):
            tables += [
                [0, *accumulate(len(row) for row in rows)],
                [bottom for row in rows for bottom, _ in row],
                [high for row in rows for _, high in row],
            ]
        frames, moves, pieces = count + 2, len(near) + count + 1, 2 * count + 4
        items = full(count + count * (count + 3) // 2 + 2, 0)
        items[:count] = array([number[item] for item in layout.by_first])
        witness = [section[at] if at < len(section) else 0 for at in section_at[:-1]]
        self._low = array(low)
        self._problem = tuple(array(table) for table in tables)
        self._state = (
            self._low,
            full(count, 0),  # placed
            array(remaining),
            array(witness),
            full(count, -1),  # support
            full(moves, 0),  # trail_item
            full(moves, 0),  # trail_value
            items,
            full(frames, 0),  # begin
            full(frames, 0),  # end
            full(frames, 0),  # floor
            full(frames, -1),  # last
            full(frames, 0),  # deadline
            full(frames, -1),  # tried
            full(frames, -1),  # tried_rank
            full(frames, 0),  # trail_base
            full(frames, 0),  # items_base
            full(frames, 0),  # piece_base
            full(frames, 0),  # piece
            full(frames, 0),  # piece_end
            full(pieces, 0),  # piece_from
            full(pieces, 0),  # piece_to
            full(pieces, 0),  # piece_deadline
            full(pieces, 0),  # piece_key
            full(frames, 0),  # key
            full(MEMORY, -1),  # failed
        )
        self._state[9][0] = count
        self._state[12][0] = deadline
        self._state[16][0] = count
        self._registers = full(REGISTERS, 0)
        return True

    @property
    def nodes(self) -> int:
        """Nodes counted so far."""
        return 0 if self._hopeless else int(self._registers[search_kernel.NODES])

    def advance(self, nodes: int) -> int:
        """Search on for up to ``nodes`` nodes; return ``SOLVED``, ``EXHAUSTED`` or ``PAUSED``."""
        if self._hopeless:
            return search_kernel.EXHAUSTED
        if not self.order:
            return SOLVED
        limit = self.nodes + nodes
        return self.backend.advance(self._problem, self._state, self._registers, self.target, *self.weights, limit)

    def offsets(self) -> list[int]:
        """Return the packing found, by item of the instance."""
        offsets = list(self.layout.instance.pin)
        for index, item in enumerate(self.order):
            offsets[item] = int(self._low[index])
        return offsets


def _lowest(size: int, alignment: int, pins: list[tuple[int, int]]) -> int:
    """Return the lowest offset between the pins."""
    at = 0
    for low, high in pins:
        if at < high and at + size > low:
            at = high + -high % alignment
    return at


def _flat(rows: list[list[int]]) -> NearAt:
    """Return where each row begins, and the rows as one list."""
    return [0, *accumulate(len(row) for row in rows)], [value for row in rows for value in row]
