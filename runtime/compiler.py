"""``torch.compile(model, backend="arenaplan")``: AOTAutograd's forward and backward, planned into one arena.

The backward is planned round what its forward left: saved tensors are pinned where they lie, and their space is free
once they are dead. What the caller gets are tensors of their own; what waits for the backward stays in the arena, which
goes back to the pool when the last saved tensor dies.
"""

from __future__ import annotations

import copy
import weakref
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
from torch.fx import GraphModule

from planner.graph import Graph, Role, Storage, Tensor
from planner.pipeline import plan
from planner.plan import Plan
from planner.trace import ATTENTIONS, lower_fx
from planner.trace.fused import attention_as
from runtime.arena import Arena
from runtime.errors import InputError
from runtime.executor import ArenaRuntime

#: Input shapes a compiled graph keeps plans for; the one unused for longest is planned again when it comes back.
MOST_SHAPES = 16
ALIGNMENT = 256


def backend(
    module: GraphModule, _example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that ``torch.compile`` finds under the name ``arenaplan``.

    Args:
        module: Dynamo's graph.
        options: ``{"attention": "fused"}`` holds no attention matrix where PyTorch's attention is called.

    Every set of concrete input shapes is planned when it first comes, so that dynamic dimensions need no symbolic plan.
    """
    given = dict(options or {})
    attention = given.pop("attention", "math")
    if given or attention not in ATTENTIONS:
        unknown = ", ".join(given) or f"attention={attention!r}"
        raise InputError("options", f'{unknown} is unknown; use {{"attention": "math"}} or {{"attention": "fused"}}')
    return _Compiled(module, attention)


class _Compiled:
    """A Dynamo graph with a planned version for each set of input shapes."""

    def __init__(self, module: GraphModule, attention: str) -> None:
        self.module = module
        self.attention = attention
        self._read = _read_as_numbers(module)
        self._versions: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *arguments: Any) -> Any:
        numbers = {position: arguments[position].item() for position in self._read}
        key = (torch.is_grad_enabled(), *numbers.values(), *(_kind(argument) for argument in arguments))
        version = self._versions.get(key)
        if version is None:
            with attention_as() if self.attention == "fused" else nullcontext():
                version = _Planner().compile(_with_numbers(self.module, numbers), arguments)
            self._versions[key] = version
            while len(self._versions) > MOST_SHAPES:
                self._versions.popitem(last=False)
        self._versions.move_to_end(key)
        return version(*arguments)


def _read_as_numbers(module: GraphModule) -> tuple[int, ...]:
    """Positions of the arguments that the graph reads a number out of: floats that Dynamo holds as 0-d tensors."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(position for position, node in enumerate(placeholders) if any(_is_item(user) for user in node.users))


def _is_item(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _with_numbers(module: GraphModule, numbers: Mapping[int, float]) -> GraphModule:
    """The graph with those numbers in the places where it reads them."""
    if not numbers:
        return module
    made = copy.deepcopy(module)
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    for position, number in numbers.items():
        for user in [user for user in placeholders[position].users if _is_item(user)]:
            for reader in list(user.users):
                put = partial(_number_for, user, number)
                reader.args, reader.kwargs = torch.fx.map_arg(reader.args, put), torch.fx.map_arg(reader.kwargs, put)
            made.graph.erase_node(user)
    made.recompile()
    return made


def _number_for(node: torch.fx.Node, number: float, argument: torch.fx.Node) -> torch.fx.Node | float:
    return number if argument is node else argument


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.stride(), argument.dtype, argument.requires_grad)
    return argument


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that a forward leaves for its backward: its storage in the forward's plan, and the view of it."""

    name: str
    nbytes: int
    offset: int
    view: Tensor


class _Planner:
    """Plans the forward and the backward of one graph for one set of shapes."""

    def __init__(self) -> None:
        self.outputs = 0
        self.saved: list[_Saved | None] = []

    def compile(self, module: GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The graph as a function of its arguments, differentiable through autograd."""
        options: dict[str, Any] = {
            "fw_compiler": self.forward,
            "bw_compiler": self.backward,
            "inference_compiler": self.inference,
            "partition_fn": self._partition,
        }
        return aot_module_simplified(module, list(arguments), **options)

    def _partition(self, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
        self.outputs = num_fwd_outputs
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def inference(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A forward that nothing waits for."""
        self.outputs = len(_returned(module))
        return self.forward(module, inputs)

    def forward(self, module: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan the forward; results after the first ``outputs`` stay in the arena for the backward."""
        graph = lower_fx(module)
        made = plan(graph, alignment=ALIGNMENT)
        self.saved = [_saved(made, port.tensor) for port in made.graph.outputs[self.outputs :]]
        return make_boxed_func(partial(_run_forward, made, _constants(module), self.outputs))

    def backward(self, module: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plan the backward round the saved tensors; those that share a storage in the forward share it here."""
        # A random operator of the forward may be left over here, unused; running it again would draw again.
        module.graph.eliminate_dead_code(is_impure_node=_is_kept)
        graph = lower_fx(module)
        kept = [saved for saved in self.saved if saved is not None]
        graph, pins = _pinned(graph, kept)
        made = plan(graph, alignment=ALIGNMENT, pins=pins)
        return make_boxed_func(partial(_run_backward, made, _constants(module), len(kept)))


def _is_kept(node: torch.fx.Node) -> bool:
    """Whether a node matters even if nobody reads its result."""
    if node.op in ("placeholder", "output"):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _returned(module: GraphModule) -> Sequence[Any]:
    (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
    return tuple(returned)


def _constants(module: GraphModule) -> tuple[Any, ...]:
    """What the graph returns that is no tensor, by position."""
    return tuple(None if isinstance(item, torch.fx.Node) else item for item in _returned(module))


def _saved(made: Plan, tensor: int | None) -> _Saved | None:
    if tensor is None:
        return None
    view = made.graph.tensors[tensor]
    storage = made.graph.storages[view.storage]
    return _Saved(storage.name, storage.nbytes, made.placements[view.storage].offset, view)


def _pinned(graph: Graph, kept: list[_Saved]) -> tuple[Graph, dict[str, int]]:
    """The backward graph whose first inputs are views of storages pinned where the forward left them."""
    storages = list(graph.storages)
    tensors = list(graph.tensors)
    pins: dict[str, int] = {}
    place: dict[str, int] = {}
    moved: dict[int, tuple[int, int]] = {}
    for port, saved in zip(graph.inputs, kept, strict=False):
        if port.tensor is None:
            continue
        old = graph.tensors[port.tensor].storage
        name = f"saved.{saved.name}"
        if name not in place:
            place[name] = len(storages)
            storages.append(Storage(name, saved.nbytes, Role.SAVED))
            pins[name] = saved.offset
        # Several saved tensors may be views of one storage here too, each at an offset of its own.
        moved.setdefault(old, (place[name], saved.view.offset - graph.tensors[port.tensor].offset))
    for index, tensor in enumerate(tensors):
        if tensor.storage in moved:
            home, shift = moved[tensor.storage]
            tensors[index] = replace(tensor, storage=home, offset=tensor.offset + shift)
    return replace(graph, storages=tuple(storages), tensors=tuple(tensors)), pins


class _Pool:
    """Arenas that are free, and those that a forward filled for a backward still to come."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._blocks: weakref.WeakSet[_Block] = weakref.WeakSet()

    def acquire(self, nbytes: int) -> _Block:
        """A free arena of at least ``nbytes``, the smallest that is large enough, or a new one."""
        enough = [block for block in self._free if block.arena.nbytes >= nbytes]
        if enough:
            block = min(enough, key=lambda item: item.arena.nbytes)
            self._free.remove(block)
            return block
        self._free.clear()  # smaller ones would only add up
        block = _Block(nbytes)
        self._blocks.add(block)
        return block

    def release(self, block: _Block) -> None:
        """Take an arena back."""
        self._free.append(block)

    def holding(self, pointer: int, nbytes: int) -> _Block | None:
        """The arena that an address lies in, if it is large enough."""
        for block in self._blocks:
            first = block.arena.bytes.data_ptr()
            if first <= pointer < first + block.arena.nbytes:
                return block if block.arena.nbytes >= nbytes else None
        return None


class _Block:
    """One arena and the runtimes bound to it."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(nbytes, ALIGNMENT)
        self._runs: OrderedDict[int, tuple[Plan, ArenaRuntime]] = OrderedDict()

    def run(self, made: Plan) -> ArenaRuntime:
        """The plan bound to this arena."""
        found = self._runs.get(id(made))
        if found is None:
            found = (made, ArenaRuntime(made, arena=self.arena))
            self._runs[id(made)] = found
            while len(self._runs) > 2 * MOST_SHAPES:
                self._runs.popitem(last=False)
        self._runs.move_to_end(id(made))
        return found[1]


_POOL = _Pool()


def _run_forward(made: Plan, constants: tuple[Any, ...], outputs: int, *arguments: Any) -> list[Any]:
    block = _POOL.acquire(made.arena_nbytes)
    run = block.run(made)
    run.load(*(argument for argument in arguments if isinstance(argument, torch.Tensor)))
    run.execute()
    results = [
        constant if port.tensor is None else run.views[port.tensor]
        for port, constant in zip(made.graph.outputs, constants, strict=True)
    ]
    returned = [item.clone() if isinstance(item, torch.Tensor) else item for item in results[:outputs]]
    waiting = results[outputs:]
    if any(isinstance(item, torch.Tensor) for item in waiting):
        return returned + _leased(block, waiting)
    _POOL.release(block)
    return returned + waiting


def _leased(block: _Block, items: list[Any]) -> list[Any]:
    """The views once more, over a storage of their own on the same bytes: when it dies, the arena is free again."""
    bytes_array = block.arena.bytes.numpy()[:]
    storage = torch.frombuffer(bytes_array, dtype=torch.uint8).untyped_storage()
    weakref.finalize(bytes_array, _POOL.release, block).atexit = False
    first = block.arena.bytes.data_ptr()
    leased = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            leased.append(item)
            continue
        offset = (item.data_ptr() - first) // item.element_size()
        leased.append(torch.empty(0, dtype=item.dtype).set_(storage, offset, item.shape, item.stride()))
    return leased


def _run_backward(made: Plan, constants: tuple[Any, ...], saved: int, *arguments: Any) -> list[Any]:
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    held = next((t for t in tensors[:saved] if t.numel()), None)
    block = None if held is None or _keeps_graph() else _POOL.holding(held.data_ptr(), made.arena_nbytes)
    borrowed = block is None
    if block is None:
        # The graph is kept for another backward, or hooks moved what was saved: work on copies in an arena of its own.
        block = _POOL.acquire(made.arena_nbytes)
    run = block.run(made)
    run.load(*tensors)
    run.execute()
    results = [
        constant if port.tensor is None else run.views[port.tensor].clone()
        for port, constant in zip(made.graph.outputs, constants, strict=True)
    ]
    if borrowed:
        _POOL.release(block)
    return results


def _keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
