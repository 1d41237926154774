"""The optimizer's update as operations of a plan, its states as storages behind the parameters and their gradients.

The update reads and writes only storages that live from the first step to the last, so it changes nothing about the
packing: it is put behind a finished plan, and everything above the gradients moves up by the bytes of the states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.errors import GraphError
from planner.graph import ITEMSIZE, Argument, Graph, Operation, Port, Role, Storage, Tensor, TensorRef, dense_strides
from planner.operators import CHECK_GRADIENTS, COPY, UPDATE
from planner.plan import Placement, Plan, Unplanned, padded
from planner.verify import verify

#: Elements of the control block, all float64. What the check writes: overflow (0 or 1), the factor the update
#: multiplies gradients by, their norm (NaN where it was not needed), steps skipped so far, and the loss scale with what
#: it goes by: steps since it last changed, overflows in a row, and whether there was one at its floor.
FOUND, FACTOR, NORM, SKIPPED, SCALE, GOOD_STEPS, IN_A_ROW, FLOORED = range(8)
#: What it is told: whether to look for overflow, the largest norm allowed (infinite for none), and how the loss scale
#: grows, backs off, after how many good steps it grows, and its bounds.
CHECKED, MAX_NORM, GROWTH, BACKOFF, INTERVAL, MIN_SCALE, MAX_SCALE = range(8, 15)
CONTROL_NUMEL = 15
#: A control block before its first step, with the loss scale's ordinary settings.
_CONTROL = (0.0, 1.0, math.nan, 0.0, 65536.0, 0.0, 0.0, 0.0, 1.0, math.inf, 2.0, 0.5, 2000.0, 1.0, 16777216.0)
#: A row of ordinary settings by rule, in the order of the runtime's: AdamW's defaults, and plain gradient descent.
_ORDINARY = {"adam": (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, 1.0), "sgd": (1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)}
_BOTTOM = frozenset({Role.PARAMETER, Role.BUFFER, Role.PARAMETER_GRADIENT})


@dataclass(frozen=True, slots=True)
class Block:
    """A flat state of an optimizer: its name, dtype and number of elements."""

    name: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes, unpadded."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Launch:
    """The update of all parameters of one dtype.

    Attributes:
        dtype: of parameters and gradients.
        parameters: names of states of the graph, in the order in which they lie in the blocks.
        groups: number of each one's parameter group, a row of the settings.
        blocks: moments, their scales, and the master or remainder.
        steps: FP32 count of each parameter's updates.
    """

    dtype: str
    parameters: tuple[str, ...]
    groups: tuple[int, ...]
    blocks: tuple[Block, ...]
    steps: Block


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer's update.

    Attributes:
        rule, master, states, seed: as the runtime's optimizers name them.
        launches: one for each dtype.
        settings: learning rate and so on, a row of float64 for each parameter group.
        control: what the check is told and what it finds; `CONTROL_NUMEL` float64.
        scale: name of the graph's state that the loss was multiplied by, which the check adapts, or ``None``.
        scratch_nbytes: what the kernels hold outside the arena at most, at once.
    """

    rule: str
    master: str
    states: str
    seed: int
    launches: tuple[Launch, ...]
    settings: Block
    control: Block
    scale: str | None = None
    scratch_nbytes: int = 0

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them, in the order in which they lie in the arena."""
        own = [block for launch in self.launches for block in (*launch.blocks, launch.steps)]
        return (*own, self.settings, self.control)

    def nbytes(self, alignment: int) -> int:
        """What the states add to an arena."""
        return sum(padded(block.nbytes, alignment) for block in self.blocks)


def with_own_gradients(graph: Graph, names: frozenset[str]) -> Graph:
    """The graph in which the named parameters' gradients are laid out as the parameters are, in storages of their own.

    A gradient that is not (it is expanded, transposed, or a part of another tensor) is copied once at the end.
    """
    storages, tensors, operations = list(graph.storages), list(graph.tensors), list(graph.operations)
    places = {port.name: port.tensor for port in graph.states}
    taken: set[int] = set()
    gradients: list[Port] = []
    for port in graph.gradients:
        parameter = places.get(port.name)
        if port.name not in names or port.tensor is None or parameter is None:
            gradients.append(port)
            continue
        given, wanted = tensors[port.tensor], tensors[parameter]
        own = storages[given.storage].role is Role.PARAMETER_GRADIENT and given.storage not in taken
        if own and _layout(given) == _layout(wanted):
            taken.add(given.storage)
            gradients.append(port)
            continue
        storages.append(Storage(f"{port.name}.grad.own", wanted.end - wanted.offset, Role.PARAMETER_GRADIENT))
        made = replace(wanted, name=f"{port.name}.grad.own", storage=len(storages) - 1, offset=0)
        tensors.append(made)
        index = len(tensors) - 1
        operations.append(Operation(f"{port.name}.grad.copy", COPY, (TensorRef(port.tensor),), (), (index,)))
        gradients.append(Port(port.name, index))
    kept = {tensors[port.tensor].storage for port in (*graph.outputs, *gradients) if port.tensor is not None}
    storages = [
        replace(storage, role=Role.TEMPORARY)
        if storage.role is Role.PARAMETER_GRADIENT and index not in kept
        else storage
        for index, storage in enumerate(storages)
    ]
    return replace(
        graph,
        storages=tuple(storages),
        tensors=tuple(tensors),
        operations=tuple(operations),
        gradients=tuple(gradients),
    )


def _layout(tensor: Tensor) -> tuple[object, ...]:
    steps = tuple((size, stride) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1)
    return (tensor.shape, steps, tensor.dtype)


def with_update(plan: Plan, update: Update, bindings: Mapping[str, object] | None = None) -> Plan:
    """The plan that ends with the update of its parameters.

    Args:
        plan: of a joint graph that went through `with_own_gradients`.
        update: what to do, and what it keeps.
        bindings: live tensors behind the blocks, by name.

    Returns:
        A verified plan: as large as ``plan`` and the states together; parameters and gradients stay where they were.

    Raises:
        GraphError: a parameter of the update is no state of the graph.
    """
    builder = _Builder(plan, update)
    graph = replace(
        plan.graph,
        storages=tuple(builder.storages),
        tensors=tuple(builder.tensors),
        operations=tuple(builder.operations),
        states=(*plan.graph.states, *builder.states),
        mutated=(*plan.graph.mutated, *builder.mutated),
        bindings={**plan.graph.bindings, **(bindings or {})},
    )
    unplanned = plan.unplanned
    if update.scratch_nbytes:
        unplanned += (Unplanned(UPDATE, update.scratch_nbytes),)
    made = replace(
        plan,
        graph=graph,
        unplanned=unplanned,
        placements=tuple(builder.placements),
        arena_nbytes=plan.arena_nbytes + builder.added,
        lower_bound_nbytes=plan.lower_bound_nbytes + builder.added,
        naive_nbytes=plan.naive_nbytes + builder.added,
    )
    verify(made, graph)
    return made


def ordinary_values(graph: Graph) -> dict[str, tuple[float, ...]]:
    """Settings and control, by name, with which the update of a loaded graph does what an optimizer's first step does.

    For a run on generated values, all other states being zero; empty without an update.
    """
    found: dict[str, tuple[float, ...]] = {}
    for operation in graph.operations:
        if operation.operator != UPDATE:
            continue
        settings, control = operation.arguments[4:6]
        row = _ORDINARY.get(str(dict(operation.keywords).get("rule")))
        if isinstance(settings, TensorRef) and isinstance(control, TensorRef) and row is not None:
            table = graph.tensors[settings.tensor]
            found[table.name] = row * (table.numel // len(row))
            found[graph.tensors[control.tensor].name] = _CONTROL
    return found


class _Builder:
    """The storages, tensors and operations of a plan, and those of its update behind them."""

    def __init__(self, plan: Plan, update: Update) -> None:
        graph = plan.graph
        self.storages = list(graph.storages)
        self.tensors = list(graph.tensors)
        self.operations = list(graph.operations)
        self.states: list[Port] = []
        self._places = {port.name: port.tensor for port in graph.states}
        self._gradients = {port.name: port.tensor for port in graph.gradients}
        self.added = update.nbytes(plan.alignment)
        bottom = _bottom(plan)
        end = len(graph.operations) + 1 + len(update.launches)
        lasting = _lasting(graph)
        self.placements = [
            replace(
                place,
                offset=place.offset + (self.added if place.offset >= bottom else 0),
                death=end if place.death == plan.steps and index in lasting else place.death,
            )
            for index, place in enumerate(plan.placements)
        ]
        self._next, self._end, self._alignment = bottom, end, plan.alignment
        self._blocks = {block.name: self._block(block) for block in update.blocks}
        self._check(update)
        for launch in update.launches:
            self._launch(update, launch)
        changed = {index for operation in self.operations[len(graph.operations) :] for index in operation.outputs}
        known = {port.name for port in graph.mutated}
        self.mutated = [
            port for port in (*graph.states, *self.states) if port.tensor in changed and port.name not in known
        ]

    def _block(self, block: Block) -> int:
        self.storages.append(Storage(block.name, block.nbytes, Role.OPTIMIZER_STATE))
        shape = (block.numel,)
        self.tensors.append(Tensor(block.name, len(self.storages) - 1, 0, shape, dense_strides(shape), block.dtype))
        self.placements.append(Placement(self._next, 0, self._end))
        self._next += padded(block.nbytes, self._alignment)
        self.states.append(Port(block.name, len(self.tensors) - 1))
        return len(self.tensors) - 1

    def _parameter(self, name: str) -> TensorRef:
        tensor = self._places.get(name)
        if tensor is None:
            raise GraphError(f"parameter {name}", "the graph has no such state; trace the model it belongs to")
        return TensorRef(tensor)

    def _gradient(self, name: str) -> Argument:
        tensor = self._gradients.get(name)
        return None if tensor is None else TensorRef(tensor)

    def _check(self, update: Update) -> None:
        gradients = tuple(
            gradient
            for launch in update.launches
            for name in launch.parameters
            if (gradient := self._gradient(name)) is not None
        )
        scale = None if update.scale is None else self._parameter(update.scale)
        control = self._blocks[update.control.name]
        arguments: tuple[Argument, ...] = (gradients, TensorRef(control), scale)
        changed = (control,) if scale is None else (control, scale.tensor)
        self.operations.append(Operation("check_gradients", CHECK_GRADIENTS, arguments, (), changed))

    def _launch(self, update: Update, launch: Launch) -> None:
        parameters = tuple(self._parameter(name) for name in launch.parameters)
        gradients = tuple(self._gradient(name) for name in launch.parameters)
        blocks = tuple(TensorRef(self._blocks[block.name]) for block in launch.blocks)
        steps = self._blocks[launch.steps.name]
        settings, control = (TensorRef(self._blocks[block.name]) for block in (update.settings, update.control))
        keywords: tuple[tuple[str, Argument], ...] = (
            ("blocks", tuple(block.name.rpartition(".")[2] for block in launch.blocks)),
            ("groups", launch.groups),
            ("master", update.master),
            ("rule", update.rule),
            ("seed", update.seed),
            ("states", update.states),
        )
        moved = [
            parameter.tensor for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None
        ]
        self.operations.append(
            Operation(
                f"update.{launch.dtype}",
                UPDATE,
                (parameters, gradients, blocks, TensorRef(steps), settings, control),
                keywords,
                (*moved, *(block.tensor for block in blocks), steps),
            )
        )


def _bottom(plan: Plan) -> int:
    """Bytes of the row of parameters, buffers and parameter gradients at the arena's bottom."""
    return max(
        (
            place.offset + padded(storage.nbytes, plan.alignment)
            for storage, place in zip(plan.graph.storages, plan.placements, strict=True)
            if storage.role in _BOTTOM
        ),
        default=0,
    )


def _lasting(graph: Graph) -> frozenset[int]:
    """Storages needed after the last step: permanent ones, and those somebody reads then."""
    results = {graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None}
    permanent = {
        index
        for index, storage in enumerate(graph.storages)
        if storage.role in _BOTTOM or storage.role in (Role.CONSTANT, Role.OPTIMIZER_STATE)
    }
    return frozenset(results | permanent)
