"""What the reports say about a plan, computed once and apart from how it is shown."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.errors import ShapeError
from planner.graph import FILLED_ROLES, Operation, Storage, Tensor
from planner.plan import Placement, Plan, padded


@dataclass(frozen=True, slots=True)
class Occupant:
    """A storage at one step: its index, where it lies, and whether the operation reads or writes it."""

    storage: int
    offset: int
    nbytes: int
    reads: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of the arena that nothing uses at one step."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The arena during one step.

    Attributes:
        operation: what runs, or ``None`` in a plan without operations.
        occupants: storages alive, by offset.
        gaps: free byte ranges, by offset.
        live_nbytes: bytes alive, each storage padded to the alignment, bytes handed over counted once.
    """

    step: int
    operation: Operation | None
    occupants: tuple[Occupant, ...]
    gaps: tuple[Gap, ...]
    live_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Everything about one tensor.

    Attributes:
        index: of the tensor in the graph.
        arena_offset: of its element zero, bytes from the start of the arena.
        writers, readers: steps at which this tensor itself is written and read.
        storage_writers, storage_readers: the same for any tensor over its storage.
        views: names of the other tensors over its storage.
        chain: storages that hand the same bytes on in place, first to last, this one included.
        below, above: the nearest storages alive at some time together with this one.
    """

    index: int
    tensor: Tensor
    storage: Storage
    placement: Placement
    arena_offset: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    storage_writers: tuple[int, ...]
    storage_readers: tuple[int, ...]
    views: tuple[str, ...]
    chain: tuple[int, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]


def live_nbytes(plan: Plan) -> tuple[int, ...]:
    """Bytes alive at each step, each storage padded to the alignment, bytes handed over in place counted once."""
    change = [0] * (plan.steps + 1)
    sizes = [padded(storage.nbytes, plan.alignment) for storage in plan.graph.storages]
    for size, place in zip(sizes, plan.placements, strict=True):
        change[place.birth] += size
        change[place.death] -= size
        if place.in_place_of is not None and plan.placements[place.in_place_of].death > place.birth:
            shared = min(size, sizes[place.in_place_of])
            change[place.birth] -= shared
            change[place.birth + 1] += shared
    return tuple(accumulate(change[:-1]))


def peak_step(plan: Plan) -> int:
    """The first step at which most bytes are alive."""
    live = live_nbytes(plan)
    return live.index(max(live))


def handed_over(plan: Plan) -> dict[int, int]:
    """For each storage overwritten in place, the storage that takes its bytes."""
    return {place.in_place_of: index for index, place in enumerate(plan.placements) if place.in_place_of is not None}


def chain(plan: Plan, storage: int, successors: dict[int, int]) -> tuple[int, ...]:
    """The storages that hand the same bytes on, first to last, ``storage`` among them."""
    first, seen = storage, {storage}
    while (before := plan.placements[first].in_place_of) is not None and before not in seen:
        first = before
        seen.add(first)
    found = [first]
    while (after := successors.get(found[-1])) is not None and after not in found:
        found.append(after)
    return tuple(found)


def first_writers(plan: Plan) -> tuple[Operation | None, ...]:
    """For each storage the operation that first writes it; ``None`` where the caller fills it."""
    found: list[Operation | None] = [None] * len(plan.graph.storages)
    for operation in plan.graph.operations:
        for tensor in operation.writes:
            storage = plan.graph.tensors[tensor].storage
            if found[storage] is None and plan.graph.storages[storage].role not in FILLED_ROLES:
                found[storage] = operation
    return tuple(found)


def by_offset(plan: Plan, storages: Iterable[int]) -> list[int]:
    """Storages in order of offset, then birth."""
    return sorted(storages, key=lambda index: (plan.placements[index].offset, plan.placements[index].birth, index))


def at_step(plan: Plan, step: int) -> StepFacts:
    """What is alive during ``step`` (0 is the first operation).

    Raises:
        ShapeError: the plan has no such step.
    """
    if not 0 <= step < plan.steps:
        raise ShapeError("step", step, f"the plan has the steps 0 to {plan.steps - 1}")
    graph = plan.graph
    operation = graph.operations[step] if graph.operations else None
    read = {graph.tensors[tensor].storage for tensor in operation.reads} if operation else set()
    written = {graph.tensors[tensor].storage for tensor in operation.writes} if operation else set()
    alive = [index for index, place in enumerate(plan.placements) if place.birth <= step < place.death]
    occupants = tuple(
        Occupant(index, plan.placements[index].offset, graph.storages[index].nbytes, index in read, index in written)
        for index in by_offset(plan, alive)
    )
    return StepFacts(step, operation, occupants, _gaps(occupants, plan), live_nbytes(plan)[step])


def _gaps(occupants: Sequence[Occupant], plan: Plan) -> tuple[Gap, ...]:
    gaps: list[Gap] = []
    end = 0
    for occupant in occupants:
        if not occupant.nbytes:
            continue
        if occupant.offset > end:
            gaps.append(Gap(end, occupant.offset - end))
        end = max(end, occupant.offset + padded(occupant.nbytes, plan.alignment))
    if end < plan.arena_nbytes:
        gaps.append(Gap(end, plan.arena_nbytes - end))
    return tuple(gaps)


def find_tensor(plan: Plan, name: str) -> int:
    """The tensor called ``name``, or the first one over the storage called so.

    Raises:
        ShapeError: there is none; the message names near matches.
    """
    for index, tensor in enumerate(plan.graph.tensors):
        if tensor.name == name:
            return index
    storages = {storage.name: index for index, storage in enumerate(plan.graph.storages)}
    for index, tensor in enumerate(plan.graph.tensors):
        if name in storages and tensor.storage == storages[name]:
            return index
    names = [tensor.name for tensor in plan.graph.tensors]
    near = [candidate for candidate in names if name and name.lower() in candidate.lower()][:5]
    near = near or difflib.get_close_matches(name, names, n=5)
    hint = f"near: {', '.join(near)}" if near else f"the plan has {len(names)} tensors, none with a similar name"
    raise ShapeError("tensor", name, f"there is no such tensor; {hint}")


def about_tensor(plan: Plan, name: str) -> TensorFacts:
    """Everything about the tensor (or the storage) called ``name``; raise `ShapeError` if there is none."""
    graph = plan.graph
    index = find_tensor(plan, name)
    tensor = graph.tensors[index]
    place = plan.placements[tensor.storage]
    family = {other for other, candidate in enumerate(graph.tensors) if candidate.storage == tensor.storage}
    return TensorFacts(
        index=index,
        tensor=tensor,
        storage=graph.storages[tensor.storage],
        placement=place,
        arena_offset=place.offset + tensor.offset,
        writers=_steps(plan, {index}, writes=True),
        readers=_steps(plan, {index}, writes=False),
        storage_writers=_steps(plan, family, writes=True),
        storage_readers=_steps(plan, family, writes=False),
        views=tuple(graph.tensors[other].name for other in sorted(family - {index})),
        chain=chain(plan, tensor.storage, handed_over(plan)),
        below=_neighbours(plan, tensor.storage, above=False),
        above=_neighbours(plan, tensor.storage, above=True),
    )


def _steps(plan: Plan, tensors: set[int], *, writes: bool) -> tuple[int, ...]:
    return tuple(
        step
        for step, operation in enumerate(plan.graph.operations)
        if not tensors.isdisjoint(operation.writes if writes else operation.reads)
    )


def _neighbours(plan: Plan, storage: int, *, above: bool) -> tuple[int, ...]:
    """The nearest storages above or below that are alive together with ``storage``; several where they take turns."""
    place, nbytes = plan.placements[storage], plan.graph.storages[storage].nbytes
    found: dict[int, int] = {}
    for index, other in enumerate(plan.placements):
        size = plan.graph.storages[index].nbytes
        if index == storage or not size or other.birth >= place.death or other.death <= place.birth:
            continue
        distance = other.offset - (place.offset + nbytes) if above else place.offset - (other.offset + size)
        if distance >= 0:
            found[index] = distance
    nearest = min(found.values(), default=0)
    return tuple(by_offset(plan, (index for index, distance in found.items() if distance < nearest + plan.alignment)))


def size_text(nbytes: int) -> str:
    """A byte count as a person reads it, in binary units: 1 MiB = 2^20 bytes."""
    if abs(nbytes) < 1 << 10:
        return f"{nbytes} B"
    units = ((1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"), (1 << 40, "TiB"))
    unit, name = units[bisect_right([limit for limit, _ in units], abs(nbytes)) - 1]
    return f"{nbytes / unit:,.2f} {name}"
