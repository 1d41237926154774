"""Give every operation the scratch its kernel needs, as storages of their own that live in that one step."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from planner.graph import ITEMSIZE, Graph, Role, dense_strides
from planner.operators import workspaces
from planner.rewrite.program import Program


def add_workspaces(graph: Graph) -> Graph:
    """The graph with `planner.operators.workspaces` added to each operation that has none yet."""
    program = Program(graph)
    for position, operation in enumerate(program.operations):
        needed = () if operation.workspaces else workspaces(operation, program.tensors)
        if not needed:
            continue
        scratch = []
        for number, wanted in enumerate(needed):
            name = f"{operation.name}.scratch{number}"
            storage = program.new_storage(name, prod(wanted.shape) * ITEMSIZE[wanted.dtype], Role.WORKSPACE)
            strides = dense_strides(wanted.shape)
            scratch.append(program.view(name, storage, 0, wanted.shape, strides, wanted.dtype))
        program.operations[position] = replace(operation, workspaces=tuple(scratch))
    return program.close()
