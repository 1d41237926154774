"""Placing storages in the order of their births, depth first: for long problems of which little is alive at once.

A decision search over time. Each birth takes an end of a gap between what is alive; where it finds none, the search
goes back to the latest birth that has another end. What is alive and where decides all that follows, so a state that
failed once is not entered again (Gergov, SODA 1999, sweeps in the same order, without going back). Trying only the
ends of gaps is not exhaustive: not finding a packing proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from planner.colouring.instance import FREE, Instance


def sweep(instance: Instance, target: int, nodes: int, deadline: float, tick: Callable[[], None]) -> list[int] | None:
    """Return offsets no higher than ``target``, or ``None`` if none were found in ``nodes`` placements or time."""
    if instance.ragged or any(pin != FREE for pin in instance.pin):
        return None
    size, start, end, alignment = instance.size, instance.start, instance.end, instance.alignment
    order = sorted(range(len(instance)), key=lambda item: (start[item], -end[item], -size[item], item))
    offsets = [FREE] * len(instance)
    failed: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
    choices: list[list[int]] = []
    alive: list[list[tuple[int, int, int]]] = [[]]  # (offset, end, death) by offset, before each birth
    while len(choices) < len(order):
        depth = len(choices)
        item = order[depth]
        alive[depth] = [entry for entry in alive[depth] if entry[2] > start[item]]
        state = (depth, tuple((entry[0], entry[2]) for entry in alive[depth]))
        found = [] if state in failed else _places(alive[depth], size[item], end[item], alignment[item], target)
        choices.append(found)
        while not choices[-1]:
            choices.pop()
            failed.add((len(choices), tuple((entry[0], entry[2]) for entry in alive[len(choices)])))
            alive.pop()
            if not choices:
                return None
        nodes -= 1
        if nodes < 0:
            return None
        if not nodes % 256:
            tick()
            if time.monotonic() > deadline:
                return None
        depth = len(choices) - 1
        item = order[depth]
        at = choices[-1].pop()
        offsets[item] = at
        alive.append(sorted([*alive[depth], (at, at + size[item], end[item])]))
    return offsets


def _places(alive: list[tuple[int, int, int]], size: int, death: int, alignment: int, target: int) -> list[int]:
    """Return the ends of the gaps that hold ``size``, best last: beside what dies last before, in the tightest gap."""
    ranked: list[tuple[int, int, int]] = []
    walls = [(0, 0, death), *alive, (target, target, death)]
    for (_, low, below), (high, _, above) in pairwise(walls):
        bottom = low + -low % alignment
        top = (high - size) // alignment * alignment
        if bottom > top:
            continue
        slack = high - low - size
        ranked.append((abs(below - death), slack, bottom))
        if top != bottom:
            ranked.append((abs(above - death), slack, top))
    ranked.sort(key=lambda place: (place[1] > 0, place[0], place[1], place[2]), reverse=True)
    return [place for _, _, place in ranked]
