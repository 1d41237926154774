"""``torch.compile(model, backend="arenaplan")``: AOTAutograd's forward and backward, planned into one arena.

The backward is planned round what its forward left: saved tensors are pinned where they lie, and their space is free
once they are dead. Parameters are read where they lie. What the caller gets are tensors of their own; what waits for
the backward stays in the arena, which goes back to the pool when the last saved tensor dies.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from planner.graph import Graph, Port, Role, Storage, Tensor
from planner.pipeline import plan
from planner.plan import Plan, padded
from planner.trace import ATTENTIONS, lower_fx
from planner.trace.fused import attention_as
from runtime.errors import InputError
from runtime.executor import ArenaRuntime, outside_nbytes
from runtime.guards import Shapes, aliases, kind_of, largest_shapes, read_as_numbers, with_numbers
from runtime.pool import ALIGNMENT, Block, Pool, needed_nbytes

#: Input shapes a compiled graph keeps plans for; the one unused for longest is planned again when it comes back.
MOST_SHAPES = 16

_POOL = Pool()


def backend(
    module: GraphModule, _example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that ``torch.compile`` finds under the name ``arenaplan``.

    Args:
        module: Dynamo's graph.
        options: ``{"attention": "fused"}`` holds no attention matrix where PyTorch's attention is called.

    Every set of concrete input shapes is planned when it first comes, so that dynamic dimensions need no symbolic plan.
    Where every dynamic dimension has a maximum (``mark_dynamic(x, 0, max=64)``), that shape is planned as well, and the
    arena is made large enough for it at once.
    """
    given = dict(options or {})
    attention = given.pop("attention", "math")
    if given or attention not in ATTENTIONS:
        unknown = ", ".join(given) or f"attention={attention!r}"
        raise InputError("options", f'{unknown} is unknown; use {{"attention": "math"}} or {{"attention": "fused"}}')
    return _Compiled(module, attention, largest_shapes(module))


class _Compiled:
    """A Dynamo graph with a planned version for each set of input shapes."""

    def __init__(self, module: GraphModule, attention: str, largest: Shapes | None) -> None:
        self.module = module
        self.attention = attention
        self.largest = largest
        self.wanted_nbytes = 0
        self._read = read_as_numbers(module)
        self._versions: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *arguments: Any) -> Any:
        numbers = {position: arguments[position].item() for position in self._read}
        kinds = (kind_of(argument) for argument in arguments)
        key = (torch.is_grad_enabled(), *numbers.values(), *kinds, aliases(arguments))
        version = self._versions.get(key)
        if version is None:
            _refuse_devices(arguments)
            module = with_numbers(self.module, numbers)
            with attention_as() if self.attention == "fused" else nullcontext():
                if self.largest is not None:
                    self.wanted_nbytes = _largest_nbytes(module, self.largest, arguments)
                    self.largest = None
                version = _Planner(self.wanted_nbytes).compile(module, arguments)
            self._versions[key] = version
            while len(self._versions) > MOST_SHAPES:
                self._versions.popitem(last=False)
        self._versions.move_to_end(key)
        return version(*arguments)


def _refuse_devices(arguments: Sequence[Any]) -> None:
    """The pool's arenas lie on the CPU."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
            cause = f"the compile backend runs on the CPU; use runtime.TrainingStep(device={argument.device.type!r})"
            raise InputError(f"a tensor on {argument.device}", cause)


def _largest_nbytes(module: GraphModule, largest: Shapes, arguments: Sequence[Any]) -> int:
    """Bytes of arena that the forward and the backward of the largest shape need."""
    mode = FakeTensorMode()
    twins: list[Any] = []
    for position, argument in enumerate(arguments):
        shape = largest.get(position)
        if isinstance(argument, torch.Tensor) and isinstance(shape, tuple):
            with mode:
                made = torch.empty_strided(*shape, dtype=argument.dtype, requires_grad=argument.requires_grad)
            twins.append(made)
        elif isinstance(argument, torch.Tensor):
            twins.append(mode.from_tensor(argument))
        else:
            twins.append(argument if shape is None else shape)
    planner = _Planner(0)
    planner.compile(module, twins)
    return planner.nbytes


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that a forward leaves for its backward.

    Attributes:
        name, nbytes: of its storage in the forward's plan.
        view: what it is of that storage.
        offset: of the storage in the arena, or ``None`` if it is a parameter, which is read where it lies.
    """

    name: str
    nbytes: int
    view: Tensor
    offset: int | None


class _Planner:
    """Plans the forward and the backward of one graph for one set of shapes."""

    def __init__(self, wanted_nbytes: int) -> None:
        self.wanted_nbytes = wanted_nbytes
        self.nbytes = 0
        self.outputs = 0
        self.parameters: frozenset[int] = frozenset()
        self.saved: list[_Saved | None] = []
        self.unplanned: GraphModule | None = None
        self.entries: dict[str, tuple[_Entry, tuple[int, ...]]] = {}

    def compile(self, module: GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The graph as a function of its arguments, differentiable through autograd."""
        self.parameters = frozenset(
            position for position, argument in enumerate(arguments) if isinstance(argument, torch.nn.Parameter)
        )
        options: dict[str, Any] = {
            "fw_compiler": self.forward,
            "bw_compiler": self.backward,
            "inference_compiler": self.inference,
            "partition_fn": self._partition,
        }
        return aot_module_simplified(module, list(arguments), **options)

    def _partition(self, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
        self.outputs = num_fwd_outputs
        _use_all(joint)
        forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        self.unplanned = backward
        return forward, backward

    def inference(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A forward that nothing waits for."""
        self.outputs = len(_returned(module))
        return self.forward(module, inputs)

    def forward(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan the forward; results after the first ``outputs`` stay in the arena for the backward."""
        graph, tensors = lower_fx(module), [i for i, item in enumerate(inputs) if isinstance(item, torch.Tensor)]
        # Only speed hangs on which inputs are parameters: whatever is passed in their place is read.
        chosen = {place for place, position in enumerate(tensors) if position in self.parameters}
        graph, outside = _with_states(graph, chosen)
        made = self._planned(graph, {})
        self.saved = [_saved(made, port.tensor) for port in made.graph.outputs[self.outputs :]]
        entry = _Entry(made, _constants(module), outside, self)
        if self.unplanned is not None:
            # Now, not when it first runs: so the arena is large enough for both, and what cannot be planned is refused.
            self._planned_backward(self.unplanned)
            self.unplanned = None
        return make_boxed_func(partial(_run_forward, entry, self.outputs, _copies(made, self.outputs)))

    def backward(self, module: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backward, planned with its forward."""
        return make_boxed_func(partial(_run_backward, *self._planned_backward(module)))

    def _planned_backward(self, module: GraphModule) -> tuple[_Entry, tuple[int, ...]]:
        """Plan the backward round the saved tensors; those that share a storage in the forward share it here."""
        # A random operator of the forward may be left over here, unused; running it again would draw again.
        module.graph.eliminate_dead_code(is_impure_node=_is_kept)
        text = str(module.graph)
        if text in self.entries:
            return self.entries[text]
        graph = lower_fx(module)
        kept = [saved for saved in self.saved if saved is not None]
        graph, outside = _with_states(graph, {place for place, item in enumerate(kept) if item.offset is None})
        inside = [saved for place, saved in enumerate(kept) if place not in outside]
        pinned = tuple(place for place, saved in enumerate(inside) if saved.offset is not None and saved.nbytes)
        below = sum(padded(_storage_of(graph, port).nbytes, ALIGNMENT) for port in graph.states)
        graph, pins = _pinned(graph, inside, below)
        made = self._planned(graph, pins)
        self.entries[text] = _Entry(made, _constants(module), outside, self), pinned
        return self.entries[text]

    def _planned(self, graph: Graph, pins: Mapping[str, int]) -> Plan:
        made = plan(graph, alignment=ALIGNMENT, pins=pins)
        self.nbytes = max(self.nbytes, needed_nbytes(made))
        return made


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Entry:
    """A plan ready to be called.

    Attributes:
        made: the plan.
        constants: what the graph returns that is no tensor, by position.
        outside: which of the tensors it is called with are read where they lie.
        planner: knows what the forward and the backward need together.
    """

    made: Plan
    constants: tuple[Any, ...]
    outside: frozenset[int]
    planner: _Planner

    def arena(self) -> Block:
        """A free arena, large enough for the forward and the backward."""
        nbytes = max(self.planner.nbytes, needed_nbytes(self.made))
        return _POOL.acquire(nbytes, self.planner.wanted_nbytes)

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The states by name, and the inputs, of what it is called with."""
        given = [tensor for place, tensor in enumerate(tensors) if place in self.outside]
        ports = self.made.graph.states
        states = {
            port.name: _laid_out(self.made.graph.tensors[port.tensor], tensor)
            for port, tensor in zip(ports, given, strict=True)
            if port.tensor is not None
        }
        return states, [tensor for place, tensor in enumerate(tensors) if place not in self.outside]


def _laid_out(tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value, copied if its strides are not those it was planned with."""
    if value.stride() == tensor.strides or value.shape != tensor.shape:
        return value
    return torch.empty_strided(tensor.shape, tensor.strides, dtype=value.dtype).copy_(value)


def _is_kept(node: torch.fx.Node) -> bool:
    """Whether a node matters even if nobody reads its result."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _use_all(joint: GraphModule) -> None:
    """Read what is random, gives several results, and is read by nothing: `default_partition` does not know such nodes.

    They stay in the graph since they draw: without them what is random later would not be eager's.
    """
    for node in list(joint.graph.nodes):
        values = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(values, (tuple, list)) and values:
            with joint.graph.inserting_after(node):
                first = joint.graph.call_function(operator.getitem, (node, 0))
            first.meta["val"] = values[0]


def _returned(module: GraphModule) -> Sequence[Any]:
    (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
    return tuple(returned)


def _constants(module: GraphModule) -> tuple[Any, ...]:
    """What the graph returns that is no tensor, by position."""
    return tuple(None if isinstance(item, torch.fx.Node) else item for item in _returned(module))


def _storage_of(graph: Graph, port: Port) -> Storage:
    if port.tensor is None:
        raise InputError(port.name, "it is no tensor")
    return graph.storages[graph.tensors[port.tensor].storage]


def _with_states(graph: Graph, chosen: set[int]) -> tuple[Graph, frozenset[int]]:
    """The graph with some of its inputs as parameters, and which of them: those with elements that it only reads."""
    storages = list(graph.storages)
    at = [None if port.tensor is None else graph.tensors[port.tensor].storage for port in graph.inputs]
    written = {graph.tensors[index].storage for operation in graph.operations for index in operation.writes}
    places = set()
    for place in sorted(chosen):
        index = at[place]
        if index is None or at.count(index) > 1 or index in written or not storages[index].nbytes:
            continue
        places.add(place)
        storages[index] = replace(storages[index], role=Role.PARAMETER)
    states = tuple(port for place, port in enumerate(graph.inputs) if place in places)
    inputs = tuple(port for place, port in enumerate(graph.inputs) if place not in places)
    return replace(graph, storages=tuple(storages), states=states, inputs=inputs), frozenset(places)


def _saved(made: Plan, tensor: int | None) -> _Saved | None:
    if tensor is None:
        return None
    view = made.graph.tensors[tensor]
    storage = made.graph.storages[view.storage]
    inside = storage.role is not Role.PARAMETER
    offset = made.placements[view.storage].offset - outside_nbytes(made) if inside else None
    return _Saved(storage.name, storage.nbytes, view, offset)


def _pinned(graph: Graph, kept: list[_Saved], below: int) -> tuple[Graph, dict[str, int]]:
    """The backward graph whose first inputs are views of storages pinned where the forward left them.

    Args:
        graph: the backward.
        kept: what its first inputs are in the forward's arena.
        below: bytes of parameters that its arena begins with, on paper.
    """
    storages = list(graph.storages)
    tensors = list(graph.tensors)
    pins: dict[str, int] = {}
    place: dict[str, int] = {}
    moved: dict[int, tuple[int, int]] = {}
    for port, saved in zip(graph.inputs, kept, strict=False):
        if port.tensor is None or saved.offset is None:
            continue
        old = graph.tensors[port.tensor].storage
        name = f"saved.{saved.name}"
        if name not in place:
            place[name] = len(storages)
            storages.append(Storage(name, saved.nbytes, Role.SAVED))
            pins[name] = saved.offset + below
        # Several saved tensors may be views of one storage here too, each at an offset of its own.
        moved.setdefault(old, (place[name], saved.view.offset - graph.tensors[port.tensor].offset))
    for index, tensor in enumerate(tensors):
        if tensor.storage in moved:
            home, shift = moved[tensor.storage]
            tensors[index] = replace(tensor, storage=home, offset=tensor.offset + shift)
    return replace(graph, storages=tuple(storages), tensors=tuple(tensors)), pins


def _copies(made: Plan, outputs: int) -> tuple[int | None, ...]:
    """For each output the storage it is copied with, if others are views of the same; ``None`` if it is on its own."""
    tensors = [port.tensor for port in made.graph.outputs[:outputs]]
    homes = [None if index is None else made.graph.tensors[index].storage for index in tensors]
    return tuple(home if homes.count(home) > 1 else None for home in homes)


def _run_forward(entry: _Entry, outputs: int, copies: tuple[int | None, ...], *arguments: Any) -> list[Any]:
    made = entry.made
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    states, inputs = entry.split(tensors)
    block = entry.arena()
    block.parameters = tuple(id(state) for state in states.values())
    run = block.run(entry, made, states)
    run.load(*inputs)
    run.execute()
    ports = made.graph.outputs
    returned = [*entry.constants[:outputs]]
    whole: dict[int, torch.Tensor] = {}
    for position, (port, home) in enumerate(zip(ports[:outputs], copies, strict=True)):
        if port.tensor is not None:
            returned[position] = _own(run, port.tensor, home, whole)
    waiting = [*entry.constants[outputs:]]
    inside: list[int] = []
    by_storage = {made.graph.tensors[port.tensor].storage: name for name, port in _named(made)}
    for position, port in enumerate(ports[outputs:]):
        if port.tensor is None:
            continue
        name = by_storage.get(made.graph.tensors[port.tensor].storage)
        if name is None:
            inside.append(position)
            waiting[position] = run.views[port.tensor]
        else:
            waiting[position] = _view_of(states[name], run.views[port.tensor])
    if not inside:
        _POOL.release(block)
        return returned + waiting
    for position, view in zip(inside, block.leased(_POOL, [waiting[position] for position in inside]), strict=True):
        waiting[position] = view
    return returned + waiting


def _named(made: Plan) -> list[tuple[str, Any]]:
    return [(port.name, port) for port in made.graph.states if port.tensor is not None]


def _view_of(state: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A parameter, or a view of it that counts its changes: autograd refuses a backward after one, as in eager."""
    if state.shape == view.shape and state.stride() == view.stride() and state.dtype == view.dtype:
        return state
    return state.detach().as_strided(view.shape, view.stride(), view.storage_offset())


def _own(run: ArenaRuntime, tensor: int, home: int | None, whole: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy of a result; results that are views of one storage are views of one copy."""
    view = run.views[tensor]
    if home is None:
        return view.clone()
    graph = run.plan.graph
    if home not in whole:
        nbytes = graph.storages[home].nbytes
        start = view.storage_offset() * view.element_size() - graph.tensors[tensor].offset
        source = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage(), start, (nbytes,), (1,))
        whole[home] = source.clone()
    offset = graph.tensors[tensor].offset // view.element_size()
    storage = whole[home].untyped_storage()
    return torch.empty(0, dtype=view.dtype).set_(storage, offset, view.shape, view.stride())


def _run_backward(entry: _Entry, pinned: tuple[int, ...], *arguments: Any) -> list[Any]:
    made = entry.made
    states, inputs = entry.split([argument for argument in arguments if isinstance(argument, torch.Tensor)])
    nbytes = needed_nbytes(made)
    held = next((inputs[place] for place in pinned if inputs[place].numel()), None)
    block = None if held is None or _keeps_graph() else _POOL.holding(held.data_ptr(), nbytes)
    borrowed = block is None
    if block is None:
        # The graph is kept for another backward, or hooks moved what was saved: work on copies in an arena of its own.
        block = entry.arena()
    run = block.run(entry, made, states)
    run.load(*inputs)
    run.execute()
    results = [
        constant if port.tensor is None else run.views[port.tensor].clone()
        for port, constant in zip(made.graph.outputs, entry.constants, strict=True)
    ]
    if borrowed:
        _POOL.release(block)
    return results


def _keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
