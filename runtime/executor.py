"""Run a plan: bind every operation once to its views of one arena, then call them in order."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree

from planner.graph import Graph, Port, Tensor
from planner.plan import Plan, padded
from planner.verify import verify
from runtime.arena import Arena
from runtime.errors import ArenaError, InputError
from runtime.kernels import Call, Context, attention_eager, bind  # noqa: F401
from runtime.kernels.triton import available
from runtime.lanes import Section


class ArenaRuntime:
    """Executes a plan out of one arena, allocated here and never again.

    Args:
        plan: verified once more before anything runs.
        device: where the arena lies.
        state: parameters and buffers by name, for a plan that has some and was loaded from a file; a plan made in
            this process knows the module's own, those it had when it was traced. Parameters put in their place later
            (``load_state_dict(assign=True)``) are not seen: pass them here, or trace again.
        arena: memory to run in, at least as large as the plan's arena and as strictly aligned; by default its own.
        kernels: ``"triton"`` binds operations that have a Triton kernel to it, ``"aten"`` none, ``"auto"`` does so on a
            GPU where Triton is installed.
        cuda_graph: on a CUDA device, capture the program at its second execution, when its kernels are compiled, and
            replay it as one CUDA graph from then on. What a plan does between executions is not captured: inputs are
            loaded as ever.
        outside: read parameters and buffers where they lie, instead of a copy at the bottom of the arena, which then
            begins above them. The program must not change them.

    What a call returns are views of the arena, valid until the next call.
    """

    def __init__(
        self,
        plan: Plan,
        device: str | torch.device = "cpu",
        state: Mapping[str, torch.Tensor] | None = None,
        *,
        arena: Arena | None = None,
        kernels: str = "auto",
        cuda_graph: bool = False,
        outside: bool = False,
    ) -> None:
        verify(plan)
        self.plan = plan
        graph = plan.graph
        below = outside_nbytes(plan) if outside else 0
        self.arena = Arena(plan.arena_nbytes - below, plan.alignment, device) if arena is None else arena
        places = _outside(plan, state or {}, below) if outside else {}
        self.views = [
            _seen(graph, tensor, *places[tensor.storage])
            if tensor.storage in places
            else self.arena.view(tensor, plan.placements[tensor.storage].offset - below)
            for tensor in graph.tensors
        ]
        self.inputs = tuple(self._view(port) for port in graph.inputs)
        self._states = tuple(
            (port, self._view(port), self._state(port, state)) for port in graph.states if port.tensor is not None
        )
        self._constants = tuple((self._view(port), self._constant(port)) for port in graph.constants)
        self._input_at = {port.tensor: position for position, port in enumerate(graph.inputs)}
        self._state_at = {port.tensor: position for position, (port, _, _) in enumerate(self._states)}
        self._triton = uses_triton(kernels, self.arena.device)
        self._program = _program(graph, self.views, triton=self._triton)
        self._aliases = self._overlapping_inputs()
        if cuda_graph and self.arena.device.type != "cuda":
            raise ArenaError(f"cuda_graph=True: the arena lies on {self.arena.device}; use device='cuda'")
        self._graph = _Replay(self) if cuda_graph else None

    def __call__(self, *inputs: Any, copy: bool = False, poison: bool = False) -> Any:
        """Load ``inputs`` into the arena, run every step, and return the results.

        Args:
            inputs: tensors as the plan's inputs, nested as they were traced; numbers among them are ignored.
            copy: return copies that outlive the next call.
            poison: overwrite the whole arena first, for tests.

        Returns:
            Mode ``"forward"``: the outputs; ``"backward"``: the gradients by name; ``"joint"``: both.

        Raises:
            InputError: wrong number, shape or dtype of inputs.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if poison:
            self.arena.poison()
        self.load(*leaves)
        self.execute()
        self.write_back(leaves)
        return self.results(copy=copy)

    def load(self, *inputs: torch.Tensor) -> None:
        """Copy inputs, states and constants to their places; what already lies there is left alone."""
        self._check(inputs)
        with torch.no_grad():
            for view, value in zip(self.inputs, inputs, strict=True):
                _place(view, value)
            for port, view, live in self._states:
                if live is None:
                    raise InputError(port.name, "the plan was made or loaded without its value; pass it in `state`")
                _place(view, live)
            for view, value in self._constants:
                _place(view, value, wait=False)

    def execute(self, *, threads: int | None = None) -> None:
        """Run every step on what the arena holds; donated inputs are consumed, so `load` them before each execution.

        Nothing is allocated, unless the plan lists operators as unplanned.

        Lanes of a section run side by side on up to ``threads`` threads (default ``torch.get_num_threads()``, with
        Triton's kernels 1, as launches do not wait); on a GPU everything is put on the current stream in order, which a
        CUDA graph can capture.
        """
        workers = torch.get_num_threads() if threads is None and not self._triton else threads or 1
        on_device: AbstractContextManager[object] = nullcontext()
        if self.arena.device.type == "cuda":
            workers, on_device = 1, torch.cuda.device(self.arena.device)
        with torch.no_grad(), on_device:
            if self._graph is not None:
                self._graph()
            else:
                self.run_program(workers)

    def run_program(self, workers: int = 1) -> None:
        """Call every step in order; `execute` does so on the right device."""
        for item in self._program:
            if isinstance(item, Section):
                item.run(workers)
            else:
                item()

    def results(self, *, copy: bool = False) -> Any:
        """Results of the last execution, as `__call__` returns them."""
        graph = self.plan.graph
        gradients = {port.name: self._result(port, copy) for port in graph.gradients}
        if graph.mode == "backward":
            return gradients
        flat = [self._result(port, copy) for port in graph.outputs]
        outputs: Any = tuple(flat) if len(flat) != 1 else flat[0]
        if graph.rebuild is not None:
            outputs = graph.rebuild(list(flat))
        return outputs if graph.mode == "forward" else (outputs, gradients)

    def linked_states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each state's place in the arena, and the live tensor behind it.

        Raises:
            InputError: the live tensor has another dtype or shape by now.
        """
        linked = []
        for port, view, live in self._states:
            if live is None:
                continue
            if live.dtype is not view.dtype or live.shape != view.shape:
                raise InputError(
                    port.name,
                    f"it is {live.dtype} {tuple(live.shape)} now, the plan was made for {view.dtype} "
                    f"{tuple(view.shape)}: convert it back, or release() what runs the plan and build it anew",
                )
            linked.append((view, live))
        return linked

    def _view(self, port: Port) -> torch.Tensor:
        if port.tensor is None:
            raise ArenaError(f"port {port.name} has no tensor")
        return self.views[port.tensor]

    def _result(self, port: Port, copy: bool) -> torch.Tensor | None:
        if port.tensor is None:
            return None
        view = self.views[port.tensor]
        return view.clone() if copy else view

    def _state(self, port: Port, state: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
        live = (state or {}).get(port.name, self.plan.graph.bindings.get(port.name))
        if live is None:
            return None
        if not isinstance(live, torch.Tensor):
            raise InputError(port.name, f"its value is a {type(live).__name__}, not a tensor")
        _same_kind(port.name, self._view(port), live)
        return live

    def _constant(self, port: Port) -> torch.Tensor:
        view = self._view(port)
        raw = self.plan.graph.values.get(port.name, b"")
        if len(raw) != view.numel() * view.element_size():
            raise ArenaError(
                f"constant {port.name} has {len(raw)} bytes, {view.numel() * view.element_size()} expected"
            )
        if not raw:
            return torch.empty(view.shape, dtype=view.dtype)
        value = torch.frombuffer(bytearray(raw), dtype=view.dtype).view(view.shape)
        return value.pin_memory() if view.device.type == "cuda" else value

    def _overlapping_inputs(self) -> frozenset[tuple[int, int]]:
        """Pairs of inputs that share a storage in the plan."""
        graph = self.plan.graph
        storages = [graph.tensors[port.tensor].storage for port in graph.inputs if port.tensor is not None]
        return frozenset((i, j) for j in range(len(storages)) for i in range(j) if storages[i] == storages[j])

    def _check(self, inputs: tuple[torch.Tensor, ...]) -> None:
        ports = self.plan.graph.inputs
        if len(inputs) != len(ports):
            names = ", ".join(port.name for port in ports)
            raise InputError("inputs", f"{len(inputs)} tensors given, the plan takes {len(ports)}: {names}")
        for port, view, value in zip(ports, self.inputs, inputs, strict=True):
            _same_kind(port.name, view, value)
        for i, j in self._aliases:
            ours = self.inputs[j].data_ptr() - self.inputs[i].data_ptr()
            if inputs[i].numel() and inputs[j].numel() and inputs[j].data_ptr() - inputs[i].data_ptr() != ours:
                raise InputError(
                    ports[j].name, f"it shared memory with {ports[i].name} when traced and does not now; trace again"
                )

    def write_back(self, inputs: list[torch.Tensor]) -> None:
        """Give the caller what the program changed in place."""
        with torch.no_grad():
            for port in self.plan.graph.mutated:
                if port.tensor is None:
                    continue
                target = None
                if port.tensor in self._input_at:
                    target = inputs[self._input_at[port.tensor]].detach()
                elif port.tensor in self._state_at:
                    target = self._states[self._state_at[port.tensor]][2]
                if target is not None:
                    _place(target, self.views[port.tensor])


class _Replay:
    """A program on a CUDA device: run once, then captured, then replayed.

    The first run compiles kernels and loads libraries, which may not happen during a capture. A capture runs nothing.
    """

    def __init__(self, run: ArenaRuntime) -> None:
        self._run = weakref.proxy(run)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._warm:
            self._run.run_program()
            self._warm = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run.run_program()
            self._graph = graph
        self._graph.replay()


def outside_nbytes(plan: Plan) -> int:
    """Bytes at the bottom of a plan's arena where its parameters and buffers lie."""
    storages = {plan.graph.tensors[port.tensor].storage for port in plan.graph.states if port.tensor is not None}
    return sum(padded(plan.graph.storages[index].nbytes, plan.alignment) for index in storages)


def _outside(plan: Plan, state: Mapping[str, torch.Tensor], below: int) -> dict[int, tuple[Tensor, torch.Tensor]]:
    """For the storage of each state: the tensor it is in the plan, and the one that is read for it."""
    graph = plan.graph
    found: dict[int, tuple[Tensor, torch.Tensor]] = {}
    for port in graph.states:
        if port.tensor is None:
            continue
        tensor = graph.tensors[port.tensor]
        live = state.get(port.name)
        if live is None or live.stride() != tensor.strides:
            raise InputError(port.name, "it is to be read where it lies, and is missing or has other strides")
        if plan.placements[tensor.storage].offset + graph.storages[tensor.storage].nbytes > below:
            raise ArenaError(f"{port.name} does not lie at the bottom of the arena, so it cannot be left out")
        found[tensor.storage] = tensor, live
    return found


def _seen(graph: Graph, tensor: Tensor, state: Tensor, live: torch.Tensor) -> torch.Tensor:
    """A view of a state's storage, over the memory of the live tensor."""
    first = live.storage_offset() * live.element_size() + tensor.offset - state.offset
    if first < 0 or first % tensor.itemsize:
        raise ArenaError(f"{tensor.name} cannot be read where {graph.storages[tensor.storage].name} lies")
    empty = torch.empty(0, dtype=getattr(torch, tensor.dtype), device=live.device)
    return empty.set_(live.untyped_storage(), first // tensor.itemsize, tensor.shape, tensor.strides)


def _program(graph: Graph, views: list[torch.Tensor], *, triton: bool) -> list[Call | Section]:
    """Bound calls in order, those of a section gathered by lane; every lane has scratch of its own."""
    program: list[Call | Section] = []
    lanes: dict[int, list[Call]] = {}
    contexts: dict[int | None, Context] = {}
    fused, dropped = _fused(graph, views) if triton else ({}, frozenset())
    for position, operation in enumerate(graph.operations):
        if operation.lane is None and lanes:
            program.append(Section(list(lanes.values())))
            lanes = {}
        try:
            calls = bind(operation, contexts.setdefault(operation.lane, Context(views, triton=triton)))
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            cause = f"operation {operation.name} ({operation.operator}) cannot be bound to its tensors: {error}"
            raise ArenaError(cause) from error
        if position in fused:
            calls = [fused[position]]
        elif position in dropped:
            calls = []
        if operation.lane is None:
            program += calls
        else:
            lanes.setdefault(operation.lane, []).extend(calls)
    if lanes:
        program.append(Section(list(lanes.values())))
    return _tuned(program, views) if triton else program


def _tuned(program: list[Call | Section], views: list[torch.Tensor]) -> list[Call | Section]:
    """The program with its launches timed on the device and set to the fastest, where that was asked for."""
    from runtime.kernels.triton import tune

    if not tune.enabled() or not views or views[0].device.type != "cuda":
        return program
    with torch.no_grad(), torch.cuda.device(views[0].device):
        return tune.tune(program)


def _fused(graph: Graph, views: list[torch.Tensor]) -> tuple[dict[int, Call], frozenset[int]]:
    """Launches that stand for whole chains, by position, and the operations they leave out."""
    from runtime.kernels.triton.fusion import fusions

    found = fusions(graph, views)
    launches: dict[int, Call] = {fusion.position: fusion.launch for fusion in found}
    return launches, frozenset(position for fusion in found for position in fusion.dropped)


def uses_triton(kernels: str, device: torch.device) -> bool:
    """Whether to bind Triton's kernels: where asked for, or on a GPU where it is installed."""
    if kernels not in ("auto", "triton", "aten"):
        raise ArenaError(f"kernels {kernels!r} are unknown; use auto, triton or aten")
    if kernels == "triton" and not available():
        raise ArenaError("Triton is not installed; pip install 'arenaplan[triton]', or use kernels='aten'")
    return kernels == "triton" or (kernels == "auto" and device.type == "cuda" and available())


def _place(view: torch.Tensor, value: torch.Tensor, *, wait: bool = True) -> None:
    """Copy a value to its place; without waiting only one that nobody changes later."""
    if view.data_ptr() == value.data_ptr() and view.stride() == value.stride():
        return
    if 0 in view.stride():  # expanded: every element once
        for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            if size > 1 and stride == 0:
                view, value = view.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    view.copy_(value, non_blocking=not wait)


def _same_kind(name: str, view: torch.Tensor, value: torch.Tensor) -> None:
    if tuple(value.shape) != tuple(view.shape) or value.dtype != view.dtype:
        raise InputError(
            name,
            f"it is {value.dtype} {tuple(value.shape)}, the plan was made for {view.dtype} {tuple(view.shape)}; "
            "trace and plan again for other shapes",
        )
