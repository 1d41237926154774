"""The border of a graph: split forward from backward, drop what nobody needs, give every storage its role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from planner.errors import TraceError
from planner.graph import FILLED_ROLES, Graph, Operation, Port, Role, Storage
from planner.operators import is_random
from planner.rewrite.program import compact
from planner.trace.builder import Builder
from planner.trace.capture import Captured


def finish(builder: Builder, captured: Captured, nodes: dict[str, torch.fx.Node], output: torch.fx.Node) -> Graph:
    """The graph of a captured step whose nodes were all lowered."""
    returned = output.args[0]
    if not isinstance(returned, (list, tuple)):
        raise TraceError("the output", "its structure is unexpected", "report this as a bug")
    flat = _flat(returned)
    count = len(captured.output_names)
    outputs = tuple(_port(builder, name, item) for name, item in zip(captured.output_names, flat, strict=False))
    gradients = tuple(
        _port(builder, name, item) for name, item in zip(captured.gradient_names, flat[count:], strict=True)
    )
    operations = tuple(builder.operations)
    backward = captured.mode == "backward"
    if backward:
        operations = tuple(o for o in operations if o.name in builder.backward_operations)
        outputs = ()
    operations = _needed(builder, operations, outputs + gradients)

    def port(name: str) -> Port:
        return _port(builder, name, nodes[name])

    grad_outputs = tuple(port(name) for name in captured.grad_output_names)
    states = tuple(port(name) for name in captured.state_names)
    inputs = tuple(port(name) for name in captured.input_names)
    constants = tuple(builder.constants)
    mutated = _mutated(builder, operations, states + inputs)
    forward = None
    if backward:
        saved, forward = _saved(builder, captured, nodes, operations, gradients, output)
        inputs, states, constants, mutated = (*saved, *grad_outputs), (), (), ()
    else:
        inputs += grad_outputs
    _assign_roles(builder, captured, outputs, gradients)
    used = {port.tensor for port in constants}
    return compact(
        Graph(
            mode=captured.mode,
            storages=tuple(builder.storages),
            tensors=tuple(builder.tensors),
            operations=operations,
            inputs=inputs,
            states=states,
            constants=constants,
            outputs=outputs,
            gradients=gradients,
            mutated=mutated,
            values={builder.tensors[i].name: builder.values[builder.tensors[i].name] for i in used if i is not None},
            bindings=captured.bindings if not backward else {},
            forward=forward,
            rebuild=captured.rebuild,
        )
    )


def _flat(items: Any) -> list[Any]:
    if isinstance(items, (list, tuple)):
        return [leaf for item in items for leaf in _flat(item)]
    return [items]


def _port(builder: Builder, name: str, node: Any) -> Port:
    if not isinstance(node, torch.fx.Node):
        return Port(name, None)
    return Port(name, builder.index(node))


def _needed(builder: Builder, operations: tuple[Operation, ...], results: tuple[Port, ...]) -> tuple[Operation, ...]:
    """Operations whose effect someone sees; random ones stay, so that the generator advances as in eager."""
    live = {builder.tensors[port.tensor].storage for port in results if port.tensor is not None}
    live |= {
        index
        for index, storage in enumerate(builder.storages)
        if storage.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT)
    }
    kept: list[Operation] = []
    for operation in reversed(operations):
        written = {builder.tensors[index].storage for index in operation.writes}
        if not written & live and not is_random(operation.operator):
            continue
        live |= {builder.tensors[index].storage for index in operation.reads} | written
        kept.append(operation)
    return tuple(reversed(kept))


def _mutated(builder: Builder, operations: tuple[Operation, ...], ports: tuple[Port, ...]) -> tuple[Port, ...]:
    written = {builder.tensors[index].storage for operation in operations for index in operation.writes}
    return tuple(
        Port(port.name, port.tensor)
        for port in ports
        if port.tensor is not None and builder.tensors[port.tensor].storage in written
    )


def _saved(
    builder: Builder,
    captured: Captured,
    nodes: dict[str, torch.fx.Node],
    operations: tuple[Operation, ...],
    gradients: tuple[Port, ...],
    output: torch.fx.Node,
) -> tuple[tuple[Port, ...], Callable[..., tuple[object, tuple[object, ...]]]]:
    """What the backward reads of the forward, one tensor per storage, and the forward that produces it."""
    written: set[int] = set()
    needed: dict[int, None] = {}
    for operation in operations:
        for index in operation.reads:
            storage = builder.tensors[index].storage
            if storage not in written:
                needed.setdefault(storage, None)
        # An operation that mutates what the forward left needs it as well.
        written |= {builder.tensors[index].storage for index in operation.writes}
    for port in gradients:
        if port.tensor is not None and builder.tensors[port.tensor].storage not in written:
            needed.setdefault(builder.tensors[port.tensor].storage, None)
    grad_outputs = set(captured.grad_output_names)
    ports = [builder.tensors[builder.index(nodes[name])] for name in captured.input_names]
    pairs = [(ports[i], ports[j]) for i, j, _ in _aliased(builder, captured, nodes)]
    # Inputs that are the same part of it lose nothing.
    shared = {
        one.storage
        for one, two in pairs
        if (one.offset, one.shape, one.strides, one.dtype) != (two.offset, two.shape, two.strides, two.dtype)
    }
    saved: list[Port] = []
    producers: list[torch.fx.Node] = []
    for storage in needed:
        if builder.storages[storage].name in grad_outputs and builder.storages[storage].role is Role.GRAD_OUTPUT:
            continue
        node = builder.node_of_storage.get(storage)
        found = builder.tensor_of.get(node) if node is not None else None
        if node is None or not isinstance(found, int):
            node, found = _whole(builder, storage)
        elif storage in shared and not _covers(builder, found):
            node, found = _whole_input(builder, storage)
        index = found
        saved.append(Port(f"saved.{builder.tensors[index].name}", index))
        producers.append(node)
        if builder.storages[storage].role not in (Role.PARAMETER, Role.BUFFER):
            builder.storages[storage] = replace(builder.storages[storage], role=Role.SAVED)
    return tuple(saved), _forward(captured, producers, output, _aliased(builder, captured, nodes))


def _aliased(builder: Builder, captured: Captured, nodes: dict[str, torch.fx.Node]) -> list[tuple[int, int, int]]:
    """``(first, second, bytes between them)`` for every two inputs that share a storage."""
    inputs = [
        (position, builder.tensors[builder.index(nodes[name])]) for position, name in enumerate(captured.input_names)
    ]
    found = []
    for place, (second, two) in enumerate(inputs):
        for first, one in inputs[:place]:
            if one.storage == two.storage and one.numel and two.numel:
                found.append((first, second, two.offset - one.offset))
    return found


def _covers(builder: Builder, index: int) -> bool:
    """Whether a tensor is every byte of its storage."""
    tensor = builder.tensors[index]
    whole = builder.storages[tensor.storage].nbytes
    return tensor.offset == 0 and tensor.end == whole == tensor.numel * tensor.itemsize


def _whole_input(builder: Builder, storage: int) -> tuple[torch.fx.Node, int]:
    """The first fx node that is all of a storage which several inputs share: of a part, the rest would be lost.

    Raises:
        TraceError: there is none.
    """
    for node, index in builder.tensor_of.items():
        if isinstance(index, int) and builder.tensors[index].storage == storage and _covers(builder, index):
            return node, index
    raise TraceError(
        builder.storages[storage].name,
        "inputs share its memory, and none of them is all of it",
        'pass copies of them (clone()), or trace with mode="joint"',
    )


def _whole(builder: Builder, storage: int) -> tuple[torch.fx.Node, int]:
    """The first fx node whose tensor starts and ends with its storage."""
    for node, index in builder.tensor_of.items():
        if isinstance(index, int) and builder.tensors[index].storage == storage:
            tensor = builder.tensors[index]
            if tensor.offset == 0 and tensor.end == builder.storages[storage].nbytes:
                return node, index
    raise TraceError(builder.storages[storage].name, "no single tensor covers its storage", "report this as a bug")


def _forward(
    captured: Captured, saved: list[torch.fx.Node], output: torch.fx.Node, aliased: list[tuple[int, int, int]]
) -> Callable[..., tuple[object, tuple[object, ...]]]:
    """``forward(*inputs) -> (outputs, saved)``: the forward part of the fx graph, run eagerly."""
    graph = torch.fx.Graph()
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    in_forward = captured.backward_starts_after is not None
    for node in captured.module.graph.nodes:
        if node.op == "output":
            continue
        if in_forward or node.op in ("placeholder", "get_attr"):
            twins[node] = graph.node_copy(node, lambda old: twins[old])
        if node.name == captured.backward_starts_after:
            in_forward = False
    returned = output.args[0]
    flat = _flat(returned)[: len(captured.output_names)]
    graph.output(([twins[n] if isinstance(n, torch.fx.Node) else n for n in flat], [twins[node] for node in saved]))
    module = torch.fx.GraphModule(captured.module, graph)
    states = [captured.bindings.get(name) for name in captured.state_names]
    names = [*captured.input_names]

    def forward(*inputs: object, **named: object) -> tuple[object, tuple[object, ...]]:
        leaves = [leaf for leaf in pytree.tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor)]
        if len(leaves) != len(names):
            raise TraceError(
                "forward", f"it takes {len(names)} tensors, {len(leaves)} given", "pass the module's inputs"
            )
        for first, second, distance in aliased:
            if leaves[second].data_ptr() - leaves[first].data_ptr() != distance:
                cause = f"{names[second]} shared memory with {names[first]} when traced and does not now"
                raise TraceError("forward", cause, "trace again")
        if any(state is None for state in states):
            raise TraceError(
                "forward", "the module's parameters have no data (meta)", "trace a module with real parameters"
            )
        placeholders = [*states, *leaves, *([None] * len(captured.grad_output_names))]
        try:
            with torch.no_grad():
                outputs, kept = module(*placeholders)
        except NotImplementedError as error:
            if "arenaplan::" not in str(error):
                raise
            cause = "the fused attention has no kernel for these tensors"
            raise TraceError(
                "forward", cause, "import runtime.kernels, and pass tensors on the CPU or a CUDA device"
            ) from error
        return captured.rebuild(list(outputs)), tuple(kept)

    return forward


def _assign_roles(builder: Builder, captured: Captured, outputs: tuple[Port, ...], gradients: tuple[Port, ...]) -> None:
    for ports, role in ((outputs, Role.OUTPUT), (gradients, Role.GRADIENT)):
        for port in ports:
            if port.tensor is None:
                continue
            index = builder.tensors[port.tensor].storage
            storage = builder.storages[index]
            wanted = role
            if role is Role.GRADIENT and port.name in captured.parameter_names:
                wanted = Role.PARAMETER_GRADIENT
            if storage.role not in FILLED_ROLES:
                name = f"{port.name}.grad" if role is Role.GRADIENT and storage.role is Role.TEMPORARY else storage.name
                builder.storages[index] = Storage(name, storage.nbytes, wanted)
