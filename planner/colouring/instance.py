"""A problem made ready for the algorithms: groups joined, split where nothing is alive, in the largest common unit."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import NamedTuple

from planner.bounds import lower_bound
from planner.errors import ProblemError
from planner.problem import Lifetime, Problem

FREE = -1
"""Pin of an item that may lie anywhere."""


class Block(NamedTuple):  # There may be very many: tuples are made faster than dataclasses.
    """A rectangle of an item: ``size`` units at ``rise`` above the item's offset, during ``[start, end)``."""

    rise: int
    size: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Instance:
    """Items that are packed together: one connected component of the conflict graph.

    Steps are ranks of the births and deaths, sizes and offsets are in units of ``unit`` bytes. A group is one item.
    If its members differ in lifetime or leave gaps, the item is the hull of its blocks.

    Attributes:
        size, start, end, alignment: of each item (of its hull).
        span: how many real steps each item lives; ranks lose that, and it orders items better.
        pin: the offset an item is fixed at, or ``FREE``.
        blocks: the rectangles of each item; one for all but ragged groups.
        members: for each item, pairs of a lifetime's index in the problem and its rise in bytes.
        unit: bytes in a unit.
        bound: units that no packing can go below.
        ragged: whether an item's hull is larger than its blocks, so that packing hulls may lose something.
    """

    size: list[int]
    start: list[int]
    end: list[int]
    span: list[int]
    alignment: list[int]
    pin: list[int]
    blocks: list[tuple[Block, ...]]
    members: list[tuple[tuple[int, int], ...]]
    unit: int
    bound: int
    ragged: bool

    def __len__(self) -> int:
        return len(self.size)

    def peak(self, offsets: list[int]) -> int:
        """Return the largest end of an item, in units."""
        return max(offset + size for offset, size in zip(offsets, self.size, strict=True))


class _Item(NamedTuple):
    """An item in bytes and steps, before it is scaled."""

    birth: int
    death: int
    nbytes: int
    alignment: int
    pin: int
    blocks: tuple[Block, ...]
    members: tuple[tuple[int, int], ...]


def instances(problem: Problem) -> list[Instance]:
    """Split a problem into instances that share no step, in order of time. Zero-byte storages are left out."""
    items = _items(problem)
    items.sort(key=lambda item: item.birth)
    parts: list[list[_Item]] = []
    latest = 0
    for item in items:
        if not parts or item.birth >= latest:
            parts.append([])
            latest = item.death
        parts[-1].append(item)
        latest = max(latest, item.death)
    return [_instance(problem, sorted(part, key=lambda item: item.members[0][0])) for part in parts]


def zero_offset(lifetime: Lifetime) -> int:
    """Return where a zero-byte storage that is in no group lies."""
    return lifetime.offset if lifetime.offset is not None else 0


def _items(problem: Problem) -> list[_Item]:
    """Return one item for each storage of at least a byte or group of them, in problem order."""
    groups: dict[str, list[int]] = {}
    items: list[_Item] = []
    for index, lifetime in enumerate(problem.lifetimes):
        if lifetime.group is not None:
            groups.setdefault(lifetime.group, []).append(index)
        elif lifetime.nbytes:
            items.append(
                _Item(
                    lifetime.birth,
                    lifetime.death,
                    lifetime.nbytes,
                    lifetime.alignment,
                    FREE if lifetime.offset is None else lifetime.offset,
                    (Block(0, lifetime.nbytes, lifetime.birth, lifetime.death),),
                    ((index, 0),),
                )
            )
    items += [_group(problem, name, indices) for name, indices in groups.items()]
    return items


def _group(problem: Problem, name: str, indices: list[int]) -> _Item:
    """Lay the members of a group one behind the other."""
    members: list[tuple[int, int]] = []
    blocks: list[Block] = []
    rise = 0
    pin = FREE
    for index in indices:
        lifetime = problem.lifetimes[index]
        rise += -rise % lifetime.alignment
        members.append((index, rise))
        if lifetime.offset is not None:
            base = lifetime.offset - rise
            if base < 0 or pin not in (FREE, base):
                raise ProblemError(
                    "problem", f"group {name!r}: pinned member {lifetime.name!r} does not fit the others"
                )
            pin = base
        if lifetime.nbytes:
            blocks.append(Block(rise, lifetime.nbytes, lifetime.birth, lifetime.death))
        rise += lifetime.nbytes
    lifetimes = [problem.lifetimes[index] for index in indices]
    if pin != FREE and any((pin + up) % problem.lifetimes[index].alignment for index, up in members):
        raise ProblemError("problem", f"group {name!r}: the pinned offset leaves a member misaligned")
    alone = [lifetime for lifetime in lifetimes if lifetime.nbytes] or lifetimes
    return _Item(
        min(lifetime.birth for lifetime in alone),
        max(lifetime.death for lifetime in alone),
        rise,
        lcm(*(lifetime.alignment for lifetime in lifetimes)),
        pin,
        _joined(blocks),
        tuple(members),
    )


def _joined(blocks: list[Block]) -> tuple[Block, ...]:
    """Join blocks that touch and live equally long."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last and last.rise + last.size == block.rise and (last.start, last.end) == (block.start, block.end):
            joined[-1] = Block(last.rise, last.size + block.size, last.start, last.end)
        else:
            joined.append(block)
    return tuple(joined)


def _instance(problem: Problem, items: list[_Item]) -> Instance:
    """Scale one component. Any packing can be pushed down until every offset is a sum of sizes, pins and paddings."""
    unit = gcd(*(value for item in items for block in item.blocks for value in (block.rise, block.size)))
    unit = gcd(unit, *(item.nbytes for item in items), *(item.pin for item in items if item.pin != FREE))
    if any(unit % item.alignment for item in items):
        unit = gcd(unit, *(item.alignment for item in items))
    unit = max(unit, 1)
    steps = sorted({step for item in items for block in item.blocks for step in (block.start, block.end)})
    rank = {step: index for index, step in enumerate(steps)}
    lifetimes = tuple(problem.lifetimes[index] for item in items for index, _ in item.members)
    pinned = max((item.pin + item.nbytes for item in items if item.pin != FREE), default=0)
    return Instance(
        size=[item.nbytes // unit for item in items],
        start=[rank.get(item.birth, 0) for item in items],
        end=[rank.get(item.death, 1) for item in items],
        span=[item.death - item.birth for item in items],
        alignment=[max(1, item.alignment // unit) if unit % item.alignment else 1 for item in items],
        pin=[item.pin // unit if item.pin != FREE else FREE for item in items],
        blocks=[
            tuple(
                Block(block.rise // unit, block.size // unit, rank[block.start], rank[block.end])
                for block in item.blocks
            )
            for item in items
        ],
        members=[item.members for item in items],
        unit=unit,
        bound=-(-max(pinned, *(item.nbytes for item in items), lower_bound(Problem(lifetimes))) // unit),
        ragged=any(len(item.blocks) > 1 or item.blocks[0].size != item.nbytes for item in items if item.blocks),
    )
