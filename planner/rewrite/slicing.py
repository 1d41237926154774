"""Slicing: run the products around the attention matrix a few (batch, head) slices at a time.

Storages that only live between the sliced operations shrink from all slices to the few in flight; everything else is
read and written through views. Each slice computes exactly what it computed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from planner.graph import Graph, Operation, Role, dense_strides
from planner.operators import MATMUL, batch_rank, may_overwrite
from planner.rewrite.program import Program
from planner.schedule.dependencies import dependencies

#: Bytes of the sliced temporaries in flight that still lie in a core's second-level cache (1-2 MiB a core on current
#: server chips) beside what they are computed from.
CACHE_NBYTES = 4 * 2**20
#: Lanes of one section; more would split the cache further than there are cores to use it.
MOST_LANES = 4


@dataclass(frozen=True, slots=True)
class Region:
    """Operations that can run slice by slice.

    Attributes:
        operations: their positions, ascending.
        private: storages used by nothing else, which shrink.
        batch: the leading dimensions, (B, N) or (B·N,), they are sliced along.
        slice_nbytes: bytes of one slice of the largest private storage.
    """

    operations: tuple[int, ...]
    private: frozenset[int]
    batch: tuple[int, ...]
    slice_nbytes: int


def find_region(graph: Graph) -> Region | None:
    """The region round the largest temporaries that are batched over (B, N), or ``None`` if there is none."""
    best: Region | None = None
    for batch in sorted({b for operation in graph.operations for b in _batches(graph, operation)}):
        region = _region(graph, batch)
        if region is not None and (best is None or region.slice_nbytes > best.slice_nbytes):
            best = region
    return best


def default_slices(region: Region) -> int:
    """Slices in flight that keep the sliced temporary in cache, at least one; whole rows of heads where several fit."""
    heads, everything = region.batch[-1], prod(region.batch)
    fit = max(CACHE_NBYTES // max(region.slice_nbytes, 1), 1)
    return min(fit // heads * heads if fit >= heads else fit, everything)


def slice_graph(graph: Graph, slices: int) -> Graph | None:
    """The graph with its region cut into groups of slices, or ``None`` if nothing can be cut.

    At most ``slices`` slices are in flight: up to MOST_LANES lanes, each with a buffer of its own for the temporaries,
    that may run at the same time; the groups are dealt to them in turn.
    """
    region = find_region(graph)
    if region is None:
        return None
    program = Program(graph)
    private = _fold(program, region)
    in_flight = min(slices, prod(region.batch))
    lanes = min(MOST_LANES, in_flight)
    groups = _groups(region.batch, in_flight // lanes)
    before, after = _around(graph, set(region.operations))
    operations = [program.operations[position] for position in before]
    slots: list[dict[int, int]] = [{} for _ in range(lanes)]
    largest = max(prod(high - low for low, high in bounds) for bounds in groups)
    for number, bounds in enumerate(groups):
        group = _Group(program, region.batch, private, number, bounds, largest, slots[number % lanes])
        for position in region.operations:
            operation = program.operations[position].renumbered(group.part)
            lane = number % lanes if lanes > 1 else None
            operations.append(replace(operation, name=f"{operation.name}[{number}]", lane=lane))
    operations += [program.operations[position] for position in after]
    program.operations = operations
    return program.close()


def _fold(program: Program, region: Region) -> frozenset[int]:
    """Let operations of the region write onto the temporary they read last, so that a lane needs one buffer.

    Returns the private storages that are left.
    """
    private = set(region.private)
    for place, position in enumerate(region.operations):
        operation = program.operations[position]
        earlier = [program.operations[p] for p in region.operations[:place]]
        later = [program.operations[p] for p in region.operations[place + 1 :]]
        for output in operation.outputs:
            if output is None or program.storage_of(output) not in private:
                continue
            if any(program.touches(o, program.storage_of(output)) for o in earlier):
                continue
            for operand in operation.reads:
                old = program.storage_of(operand)
                dies = old in private and not any(program.reads_storage(o, old) for o in later)
                alone = [program.storage_of(index) for index in operation.reads].count(old) == 1
                tensors = program.tensors[output], program.tensors[operand]
                if dies and alone and may_overwrite(operation, *tensors, operand):
                    _replace_storage(program, program.storage_of(output), old)
                    private.discard(program.storage_of(output))
                    break
    return frozenset(private)


def _replace_storage(program: Program, storage: int, by: int) -> None:
    def moved(index: int) -> int:
        tensor = program.tensors[index]
        if tensor.storage != storage:
            return index
        return program.view(tensor.name, by, tensor.offset, tensor.shape, tensor.strides, tensor.dtype)

    program.operations = [operation.renumbered(moved) for operation in program.operations]


def _batches(graph: Graph, operation: Operation) -> set[tuple[int, ...]]:
    """Leading dimensions of a matrix product's result."""
    if operation.operator != MATMUL or operation.outputs[0] is None:
        return set()
    shape = graph.tensors[operation.outputs[0]].shape
    return {shape[:-2]} if len(shape) > 2 and all(shape) else set()


def _sliceable(graph: Graph, operation: Operation, batch: tuple[int, ...]) -> bool:
    """Whether every tensor of the operation has ``batch`` in front, or is broadcast over it."""
    depth = len(batch)
    written = [graph.tensors[index] for index in operation.writes]
    if not written or any(tensor.shape[:depth] != batch for tensor in written):
        return False
    rank = len(written[0].shape)
    if batch_rank(operation, rank) < depth or operation.workspaces or any(len(t.shape) != rank for t in written):
        return False
    return all(
        tensor.shape[:depth] == batch if len(tensor.shape) == rank else len(tensor.shape) <= rank - depth
        for tensor in (graph.tensors[index] for index in operation.reads)
    )


def _region(graph: Graph, batch: tuple[int, ...]) -> Region | None:
    sliceable = {p for p, operation in enumerate(graph.operations) if _sliceable(graph, operation, batch)}
    border = Program(graph).border
    users: dict[int, set[int]] = {}
    for position, operation in enumerate(graph.operations):
        for index in operation.reads + operation.writes:
            users.setdefault(graph.tensors[index].storage, set()).add(position)
    private = {
        storage
        for storage, positions in users.items()
        if storage not in border
        and positions <= sliceable
        and all(_whole_and_dense(graph, index, storage, batch) for index in range(len(graph.tensors)))
    }
    if not private:
        return None
    largest = max(graph.storages[storage].nbytes for storage in private)
    private = {storage for storage in private if graph.storages[storage].nbytes == largest}
    inside = {position for storage in private for position in users[storage]}
    # A product that shares an operand with the region (∇V = DᵀdZ beside ∇D) joins it: its operands are in cache then.
    shared = {graph.tensors[i].storage for p in inside for i in graph.operations[p].reads}
    inside |= {
        p
        for p in sliceable
        if graph.operations[p].operator == MATMUL
        and any(graph.tensors[i].storage in shared for i in graph.operations[p].reads)
    }
    if not _convex(graph, inside):
        inside = {position for storage in private for position in users[storage]}
        if not _convex(graph, inside):
            return None
    private = {storage for storage in private if users[storage] <= inside}
    return Region(tuple(sorted(inside)), frozenset(private), batch, largest // prod(batch))


def _whole_and_dense(graph: Graph, index: int, storage: int, batch: tuple[int, ...]) -> bool:
    tensor = graph.tensors[index]
    if tensor.storage != storage:
        return True
    if tensor.shape[: len(batch)] != batch or tensor.numel * tensor.itemsize != graph.storages[storage].nbytes:
        return False
    dense = dense_strides(tensor.shape)
    return tensor.offset == 0 and all(n == 1 or s == d for n, s, d in zip(batch, tensor.strides, dense, strict=False))


def _convex(graph: Graph, inside: set[int]) -> bool:
    """Whether no path of dependencies leaves the region and comes back."""
    before = dependencies(graph)
    tainted: set[int] = set()
    for position, needed in enumerate(before):
        if position in inside:
            if needed & tainted:
                return False
        elif needed & (inside | tainted):
            tainted.add(position)
    return True


def _around(graph: Graph, inside: set[int]) -> tuple[list[int], list[int]]:
    """Operations to run before and after the region: all that stood before its last operation and do not need it."""
    needed_by = dependencies(graph)
    later: set[int] = set()
    for position, needed in enumerate(needed_by):
        if position not in inside and needed & (inside | later):
            later.add(position)
    last = max(inside)
    before = [p for p in range(len(needed_by)) if p not in inside and p not in later and p < last]
    after = [p for p in range(len(needed_by)) if p not in inside and (p in later or p > last)]
    return before, after


def _groups(batch: tuple[int, ...], slices: int) -> list[tuple[tuple[int, int], ...]]:
    """For each group its ``(first, past the last)`` along every batch dimension; at most ``slices`` slices each.

    The innermost dimensions are taken whole as far as they fit, the next one in steps, the outer ones one by one.
    """
    steps: list[int] = []
    left = slices
    for size in reversed(batch):
        steps.append(max(min(size, left), 1))
        left = left // size if left >= size else 0
    axes = [
        [(low, min(low + step, size)) for low in range(0, size, step)]
        for size, step in zip(batch, reversed(steps), strict=True)
    ]
    return list(product(*axes))


@dataclass(frozen=True, slots=True)
class _Group:
    """One group of slices, and where its lane keeps the temporaries.

    Attributes:
        program, batch, private: what is being cut.
        number: of the group.
        bounds: ``(first, past the last)`` along each batch dimension.
        largest: slices of the largest group, which decides the size of a lane's buffers.
        slots: the lane's buffer for each private storage.
    """

    program: Program
    batch: tuple[int, ...]
    private: frozenset[int]
    number: int
    bounds: tuple[tuple[int, int], ...]
    largest: int
    slots: dict[int, int]

    def part(self, index: int) -> int:
        """The part of a tensor that this group works on."""
        program, depth = self.program, len(self.batch)
        tensor = program.tensors[index]
        if tensor.shape[:depth] != self.batch:
            return index
        name = f"{tensor.name}[{self.number}]"
        counts = tuple(high - low for low, high in self.bounds)
        inner = tensor.shape[depth:]
        if tensor.storage not in self.private:
            first = sum(low * stride for (low, _), stride in zip(self.bounds, tensor.strides, strict=False))
            offset = tensor.offset + first * tensor.itemsize
            return program.view(name, tensor.storage, offset, counts + inner, tensor.strides, tensor.dtype)
        slice_numel = prod(inner)
        if tensor.storage not in self.slots:
            old = program.storages[tensor.storage].name
            nbytes = slice_numel * self.largest * tensor.itemsize
            self.slots[tensor.storage] = program.new_storage(f"{old}[{self.number}]", nbytes, Role.TEMPORARY)
        strides = tuple(stride * slice_numel for stride in dense_strides(counts)) + tensor.strides[depth:]
        return program.view(name, self.slots[tensor.storage], 0, counts + inner, strides, tensor.dtype)
