"""A training step as one object: forward, loss and backward out of one arena, parameters and gradients in it too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from planner.budget import parse_nbytes
from planner.errors import BudgetError
from planner.graph import Port, Role
from planner.pipeline import plan
from planner.plan import Plan
from planner.trace import trace
from planner.update import with_own_gradients, with_update
from runtime.arena import Arena
from runtime.errors import ArenaError, InputError
from runtime.executor import ArenaRuntime, uses_triton
from runtime.guards import aliases
from runtime.loss_program import PREFIX, SCALE, LossProgram, positional
from runtime.mixed_precision import Amp, initialize, undo
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.linking import extent_nbytes
from runtime.optimizer.planned import PlannedUpdate, takes_triton
from runtime.optimizer.scaling import LossScaler

#: Batch shapes a step keeps plans for; the one unused for longest is planned again when it comes back.
MOST_SHAPES = 8
#: Losses of this many steps lie in one block of their own, so that a loss the caller keeps is never overwritten.
LOSS_BLOCK = 1024
#: Every offset is a multiple of it.
_ALIGNMENT = 256

Batch = Sequence[Any] | Mapping[str, Any] | torch.Tensor


class TrainingStep:
    """Plans a model's training step once for each batch shape, and runs it.

    Args:
        model: its parameters and buffers are moved into the arena; they stay the same objects, under their names.
        loss_fn: called with the model's output, and, if it takes two arguments, with the target: the last item of a
            batch that is a tuple, the whole batch if it is a dict. ``None`` if the model returns its own loss (a
            scalar, or an output with ``loss``).
        example_batch: a tuple of the model's positional inputs and the target, or a dict of keyword inputs.
        optimizer: if given, every step ends with its update and cleared gradients. The update of a fused optimizer
            (`runtime.optimizer`) is part of the plan, its states lie in the arena, and ``optimizer.step()`` is not
            called; any other optimizer's ``step()`` follows the plan.
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``: as `runtime.initialize`, which converts model and optimizer.
        scaler: of the loss; by default a `LossScaler` for ``"fp16"``, and none otherwise.
        device: where the arena lies.
        strategy: as `planner.plan`.
        budget: as `planner.plan`, of plan and optimizer states together.
        recompute: as `planner.plan`.
        attention: as `planner.trace`: ``"fused"`` holds no attention matrix where the model calls PyTorch's attention.
        kernels: as `ArenaRuntime`.
        cuda_graph: as `ArenaRuntime`.
        progress: called with a line of text while planning.

    After a step each parameter's ``grad`` is a view of the arena; as in PyTorch, a step adds to gradients that were
    not cleared. A batch of another shape is planned when it first comes; the arena is as large as the largest needs. So
    is the model after `train()` or `eval()` of any module, and after parameters were frozen or thawed.

    Raises:
        TraceError: the step cannot be traced, before anything runs; model and optimizer are in FP32 as before.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        example_batch: Batch,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        precision: str = "fp32",
        scaler: LossScaler | None = None,
        device: str = "cpu",
        strategy: str = "auto",
        attention: str = "math",
        budget: str | int | None = None,
        recompute: bool = True,
        kernels: str = "auto",
        cuda_graph: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._attention = attention
        self._device = torch.device(device)
        self._options: dict[str, Any] = {
            "strategy": strategy,
            "budget": budget,
            "recompute": recompute,
            "device": self._device.type,
        }
        self._binding: dict[str, Any] = {"kernels": kernels, "cuda_graph": cuda_graph}
        self._progress = progress
        self._runs: OrderedDict[tuple[Any, ...], ArenaRuntime] = OrderedDict()
        self._arena: Arena | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []
        self._parameters = dict(model.named_parameters())
        stepped = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        #: What a failure gives back: the values before a conversion, ``None`` for one that the optimizer keeps.
        self._originals: dict[torch.Tensor, torch.Tensor | None] = {
            parameter: parameter.data for parameter in (*self._parameters.values(), *stepped)
        }
        self.amp = self._initialized(precision, scaler)
        scaled = self.amp is not None and self.amp.scaler.enabled
        self._program = LossProgram(model, loss_fn, scaled=scaled)
        self._modules = list(self._program.modules())
        self._trained = self._requires_grad()
        self._update: PlannedUpdate | None = None
        self._stepped = True
        # The hook gets an attribute set by PyTorch, which a bound method cannot have.
        self._hook = model.register_state_dict_post_hook(partial(self._detach_state))  # type: ignore[no-untyped-call]
        try:
            self._update = self._planned_update()
            self._run(_as_inputs(example_batch))
        except BaseException:
            self._hook.remove()
            if self.amp is not None:
                undo(self.amp, self._originals)
            raise
        self._originals.clear()

    @property
    def plan(self) -> Plan:
        """The plan of the batch shape that ran (or was planned) last."""
        return next(reversed(self._runs.values())).plan

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Run one step and return its loss, a scalar tensor without gradient."""
        inputs = _as_inputs(batch)
        self._prepare()
        run = self._run(inputs)
        held = self._hold(run)
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        run.load(*leaves)
        run.execute()
        run.write_back(leaves)
        loss = self._keep(run)
        if self._update is not None:
            self._update.finish()
            return loss
        self._attach(run, held)
        if self.amp is not None:
            self._stepped = self.amp.step()
            self.amp.optimizer.zero_grad(set_to_none=True)
        return loss

    @property
    def stepped(self) -> bool:
        """Whether the last step changed the parameters: not if gradients overflowed and the loss scale went down.

        On a GPU, steps with a planned update wait for nothing; this does, as do ``step.scaler.get_scale()`` and the
        optimizer's ``skipped_steps`` and ``grad_norm``, once after a step.
        """
        return self._stepped if self._update is None else self._update.stepped

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale; ``None`` without an optimizer."""
        return None if self.amp is None else self.amp.scaler

    def state_dict(self) -> dict[str, Any]:
        """The model's state, in tensors of their own that hold nothing but their elements."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state into the parameters and buffers, where they lie."""
        self.model.load_state_dict(state)

    def release(self) -> None:
        """Give the model memory of its own again and free the arena."""
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.grad = None
                if self._lies_in_arena(tensor):
                    tensor.data = tensor.data.clone()
        if self._update is not None:
            self._update.moved()
        self._hook.remove()
        self._runs.clear()
        self._arena = None

    def _run(self, inputs: tuple[Any, ...] | dict[str, Any]) -> ArenaRuntime:
        """The runtime for a batch of this shape, its states linked to the model's tensors."""
        key = (*_shape_of(inputs), tuple(module.training for module in self._modules))
        run = self._runs.get(key)
        if run is None:
            run = self._planned(inputs)
            self._runs[key] = run
            while len(self._runs) > MOST_SHAPES:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        self._link(run)
        return run

    def _planned(self, inputs: tuple[Any, ...] | dict[str, Any]) -> ArenaRuntime:
        inputs = _apart(inputs)
        graph = trace(self._program, inputs, loss=_identity, mode="joint", attention=self._attention)
        if self._update is None:
            made = plan(graph, progress=self._progress, **self._options)
        else:
            graph = with_own_gradients(graph, self._update.parameters)
            made = self._with_update(partial(plan, graph, progress=self._progress, alignment=_ALIGNMENT))
        self._thin_out()
        if self._arena is None or self._arena.nbytes < made.arena_nbytes:
            self._grow(made)
        return ArenaRuntime(made, device=self._device, arena=self._arena, **self._binding)

    def _thin_out(self) -> None:
        """Once there is a plan, keep of the values before a conversion only those that nobody else has."""
        kept: Callable[[torch.Tensor], bool] = (
            self.optimizer.keeps_exactly if isinstance(self.optimizer, FusedOptimizer) else lambda _: False
        )
        self._originals = {
            parameter: None if value is None or kept(parameter) else value
            for parameter, value in self._originals.items()
            if value is None or value.dtype is not parameter.dtype
        }

    def _with_update(self, planned: Callable[..., Plan]) -> Plan:
        """The plan that ends with the update, the budget being that of both together."""
        update = self._update
        if update is None:
            return planned(**self._options)
        states_nbytes = update.description.nbytes(_ALIGNMENT)
        budget = self._options["budget"]
        if budget is None:
            return with_update(planned(**self._options), update.description, update.bindings)
        try:
            made = planned(**{**self._options, "budget": max(parse_nbytes(budget) - states_nbytes, 1)})
        except BudgetError as error:
            largest = tuple(zip(error.bottleneck, error.bottleneck_nbytes, strict=True))
            least = error.least_nbytes + states_nbytes
            raise BudgetError(
                parse_nbytes(budget), least, error.step, error.operation, error.source, largest
            ) from error
        return with_update(made, update.description, update.bindings)

    def _initialized(self, precision: str, scaler: LossScaler | None) -> Amp | None:
        """Model and optimizer in the precision asked for."""
        if self.optimizer is None:
            if precision != "fp32" or scaler is not None:
                raise InputError(
                    "optimizer", f"precision={precision!r} needs one, which keeps what 16 bits cannot hold"
                )
            return None
        if not isinstance(self.optimizer, FusedOptimizer) and positional(self.optimizer.step) > 0:
            raise InputError(
                "optimizer", f"{type(self.optimizer).__name__}.step needs a closure; use it without a step"
            )
        _, self.optimizer, amp = initialize(self.model, self.optimizer, precision, scaler=scaler)
        return amp

    def _planned_update(self) -> PlannedUpdate | None:
        """The update as part of the plan, for a fused optimizer: on a CPU, or by the Triton kernels."""
        if not isinstance(self.optimizer, FusedOptimizer) or self.amp is None:
            return None
        deferred = uses_triton(self._binding["kernels"], self._device) and takes_triton(self.optimizer, self._device)
        if self._device.type != "cpu" and not deferred:
            self.optimizer.follow()
            return None
        names = {id(parameter): PREFIX + name for name, parameter in self.model.named_parameters()}
        scaler = self.amp.scaler
        scale = (SCALE, self._program.loss_scale) if scaler.enabled else None
        return PlannedUpdate(self.optimizer, names, scaler, scale, device=self._device, deferred=deferred)

    def _prepare(self) -> None:
        """Write the loss scale and the optimizer's settings where the plan reads them."""
        trained = self._requires_grad()
        if isinstance(self.optimizer, FusedOptimizer) and self._update is not None:
            self.optimizer.renew()
        if trained != self._trained or (self._update is not None and not self._update.is_current):
            # Parameters were frozen or thawed, or the optimizer was rebuilt: by a new parameter group, or a loaded
            # state of another kind.
            if self._update is not None:
                self._update.settle()
            self._unlink()
            self._runs.clear()
            self._trained = trained
            self._update = self._planned_update()
        if self._update is None:
            if self.amp is not None and self.amp.scaler.enabled:
                self._program.loss_scale.fill_(self.amp.scaler.get_scale())
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise InputError(
                    f"{name}.grad",
                    "it holds a gradient that a step with a planned update would lose; call optimizer.zero_grad() "
                    "first, or leave the optimizer out of the step to accumulate",
                )
        self._update.prepare()

    def _requires_grad(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._parameters.values())

    def _tensors(self) -> list[torch.Tensor]:
        """Everything of the model's and the optimizer's that may lie in the arena."""
        states = [] if self._update is None else list(self._update.bindings.values())
        return [*self._program.parameters(), *self._program.buffers(), *states]

    def _grow(self, made: Plan) -> None:
        """A larger arena; the other shapes' runtimes are bound to it when they are next used."""
        self._unlink()
        self._arena = Arena(made.arena_nbytes, made.alignment, self._device)
        plans = {key: run.plan for key, run in self._runs.items()}
        for key, other in plans.items():
            self._runs[key] = ArenaRuntime(other, device=self._device, arena=self._arena, **self._binding)

    def _unlink(self) -> None:
        """Move what lies in the arena out of it, before the arena goes."""
        with torch.no_grad():
            for tensor in self._tensors():
                if self._lies_in_arena(tensor):
                    tensor.data = tensor.data.clone()
                if tensor.grad is not None and self._lies_in_arena(tensor.grad):
                    tensor.grad = tensor.grad.clone()

    def _link(self, run: ArenaRuntime) -> None:
        """Let parameters and buffers be views of the arena; values move with them."""
        states = run.linked_states()
        moved = any(live.data_ptr() != view.data_ptr() for view, live in states)
        if moved:
            self._unlink()  # another plan's places may overlap these
        with torch.no_grad():
            for view, live in states if moved else ():
                view.copy_(live)
                live.data = view
        if moved and self._update is not None:
            self._update.moved()

    def _hold(self, run: ArenaRuntime) -> dict[str, torch.Tensor]:
        """Gradients that this step has to add to, kept where it does not overwrite them."""
        held: dict[str, torch.Tensor] = {}
        for name, view in _gradients(run):
            parameter = self._parameters.get(name)
            if parameter is None or parameter.grad is None or view is None:
                continue
            if self._lies_in_arena(parameter.grad):
                if name not in self._held:
                    self._held[name] = torch.empty_like(view)
                self._held[name].copy_(parameter.grad)
                held[name] = self._held[name]
            else:
                held[name] = parameter.grad
        return held

    def _attach(self, run: ArenaRuntime, held: Mapping[str, torch.Tensor]) -> None:
        for name, view in _gradients(run):
            parameter = self._parameters.get(name)
            if parameter is None or view is None:
                continue
            if name in held:
                view.add_(held[name])
            parameter.grad = view

    def _keep(self, run: ArenaRuntime) -> torch.Tensor:
        """The loss, copied to a place that no later step writes."""
        (port,) = run.plan.graph.outputs
        value = run.views[_tensor(port)]
        if not self._losses or self._losses[-1].dtype != value.dtype:
            block = torch.empty(LOSS_BLOCK, dtype=value.dtype, device=value.device)
            self._losses = list(reversed(block.unbind()))
        loss = self._losses.pop()
        loss.copy_(value.reshape(()))
        return loss

    def _lies_in_arena(self, tensor: torch.Tensor) -> bool:
        arena = self._arena
        if arena is None:
            return False
        first = arena.bytes.data_ptr()
        return first <= tensor.data_ptr() < first + max(arena.nbytes, 1)

    def _detach_state(self, _module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: dict[str, Any]) -> None:
        """A saved view would take the whole arena along, so a state dict gets copies."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and self._lies_in_arena(value):
                state[name] = value.detach().clone()


def _identity(loss: Any) -> Any:
    return loss


def _as_inputs(batch: Batch) -> tuple[Any, ...] | dict[str, Any]:
    if isinstance(batch, torch.Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch)


def _shape_of(inputs: tuple[Any, ...] | dict[str, Any]) -> tuple[Any, ...]:
    """What a plan depends on: structure, shapes, strides and dtypes of tensors, overlaps, values of everything else."""
    leaves, spec = pytree.tree_flatten(inputs)
    kinds = [
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    return (str(spec), *kinds, _overlaps(leaves))


def _overlaps(leaves: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """``(first, second, bytes between them)`` of tensors of a batch that share a part of their memory."""
    return tuple(
        (first, second, distance)
        for first, second, distance in aliases(leaves)
        if -extent_nbytes(leaves[second]) < distance < extent_nbytes(leaves[first])
    )


def _apart(inputs: tuple[Any, ...] | dict[str, Any]) -> Any:
    """The batch, its tensors over memory of their own unless they overlap: later batches may lie otherwise."""
    leaves, spec = pytree.tree_flatten(inputs)
    shared = {position for found in aliases(leaves) for position in found[:2]}
    together = {position for found in _overlaps(leaves) for position in found[:2]}
    return pytree.tree_unflatten(
        [leaf.clone() if position in shared - together else leaf for position, leaf in enumerate(leaves)], spec
    )


def _gradients(run: ArenaRuntime) -> list[tuple[str, torch.Tensor | None]]:
    """Gradients of parameters, by their names in the model."""
    found: list[tuple[str, torch.Tensor | None]] = []
    for port in run.plan.graph.gradients:
        if port.tensor is None:
            found.append((port.name.removeprefix(PREFIX), None))
        elif run.plan.graph.storages[run.plan.graph.tensors[port.tensor].storage].role is Role.PARAMETER_GRADIENT:
            found.append((port.name.removeprefix(PREFIX), run.views[port.tensor]))
    return found


def _tensor(port: Port) -> int:
    if port.tensor is None:
        raise ArenaError(f"{port.name} is no tensor")
    return port.tensor
