"""Slicing: run the products around the attention matrix a few (batch, head) slices at a time.

Storages that only live between the sliced operations shrink from all slices to the few in flight; everything else is
read and written through views. Each slice computes exactly what it computed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from planner.graph import Graph, Operation, Role, dense_strides, substitute
from planner.operators import MATMUL, batch_rank
from planner.rewrite.program import Program
from planner.schedule.dependencies import dependencies

#: Bytes of the sliced temporaries in flight that still lie in a core's second-level cache (1-2 MiB a core on current
#: server chips) beside what they are computed from.
CACHE_NBYTES = 4 * 2**20


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
    """The graph with its region cut into groups of at most ``slices`` slices, or ``None`` if nothing can be cut."""
    region = find_region(graph)
    if region is None:
        return None
    program = Program(graph)
    inside = set(region.operations)
    before, after = _around(graph, inside)
    operations = [program.operations[position] for position in before]
    for number, bounds in enumerate(_groups(region.batch, slices)):
        operations += _group(program, region, number, bounds)
    operations += [program.operations[position] for position in after]
    program.operations = operations
    return program.close()


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


def _group(program: Program, region: Region, number: int, bounds: tuple[tuple[int, int], ...]) -> list[Operation]:
    depth = len(region.batch)
    counts = tuple(high - low for low, high in bounds)
    shrunk: dict[int, int] = {}
    tensors = program.tensors

    def part(index: int) -> int:
        tensor = tensors[index]
        if tensor.shape[:depth] != region.batch:
            return index
        name = f"{tensor.name}[{number}]"
        inner = tensor.shape[depth:]
        if tensor.storage not in region.private:
            first = sum(low * stride for (low, _), stride in zip(bounds, tensor.strides, strict=False))
            offset = tensor.offset + first * tensor.itemsize
            return program.view(name, tensor.storage, offset, counts + inner, tensor.strides, tensor.dtype)
        slice_numel = prod(inner)
        if tensor.storage not in shrunk:
            old = program.storages[tensor.storage].name
            nbytes = slice_numel * prod(counts) * tensor.itemsize
            shrunk[tensor.storage] = program.new_storage(f"{old}[{number}]", nbytes, Role.TEMPORARY)
        strides = tuple(stride * slice_numel for stride in dense_strides(counts)) + tensor.strides[depth:]
        return program.view(name, shrunk[tensor.storage], 0, counts + inner, strides, tensor.dtype)

    result = []
    for position in region.operations:
        operation = program.operations[position]
        result.append(
            replace(
                operation,
                name=f"{operation.name}[{number}]",
                arguments=tuple(substitute(a, part) for a in operation.arguments),
                keywords=tuple((k, substitute(a, part)) for k, a in operation.keywords),
                outputs=tuple(None if o is None else part(o) for o in operation.outputs),
            )
        )
    return result
