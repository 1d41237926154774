"""Give every operation the scratch its kernel needs, as storages of their own that live in that one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from planner.graph import ITEMSIZE, Graph, Role, dense_strides
from planner.operators import workspaces
from planner.plan import padded
from planner.rewrite.program import Program


def add_workspaces(graph: Graph) -> Graph:
    """The graph with `planner.operators.workspaces` added to each operation that has none yet.

    Operations of one lane run one after the other, so they share what they need, the largest of each.
    """
    program = Program(graph)
    shared: dict[tuple[int, int], int] = {}
    for position, operation in enumerate(program.operations):
        needed = () if operation.workspaces else workspaces(operation, program.tensors)
        scratch = []
        for number, wanted in enumerate(needed):
            name = f"{operation.name}.scratch{number}"
            nbytes = prod(wanted.shape) * ITEMSIZE[wanted.dtype]
            key = (-1 if operation.lane is None else operation.lane, number)
            storage = shared.get(key)
            if operation.lane is None or storage is None:
                storage = program.new_storage(name, nbytes, Role.WORKSPACE)
                shared[key] = storage
            old = program.storages[storage]
            program.storages[storage] = replace(old, nbytes=max(old.nbytes, nbytes))
            strides = dense_strides(wanted.shape)
            scratch.append(program.view(name, storage, 0, wanted.shape, strides, wanted.dtype))
        if scratch:
            program.operations[position] = replace(operation, workspaces=tuple(scratch))
    return program.close()


def without_workspaces(graph: Graph) -> Graph:
    """The graph with the scratch of every operation taken away again."""
    program = Program(graph)
    program.operations = [replace(operation, workspaces=()) for operation in program.operations]
    return program.close()


def workspace_nbytes(graph: Graph, positions: Iterable[int], alignment: int) -> int:
    """Scratch that operations need, each lane's share of it counted once, each piece padded to the alignment."""
    largest: dict[tuple[int, int], int] = {}
    for position in positions:
        operation = graph.operations[position]
        needed = () if operation.workspaces else workspaces(operation, graph.tensors)
        for number, wanted in enumerate(needed):
            key = (-1 if operation.lane is None else operation.lane, number)
            nbytes = padded(prod(wanted.shape) * ITEMSIZE[wanted.dtype], alignment)
            largest[key] = max(largest.get(key, 0), nbytes)
    return sum(largest.values())
