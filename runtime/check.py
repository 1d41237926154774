"""Run a plan beside eager PyTorch, step by step, with a poisoned arena, and compare every output and gradient."""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from planner.flash import FUSED
from planner.graph import Graph
from planner.operators import base_name
from planner.plan import Placement, Plan, padded
from planner.trace.fused import attention_as
from runtime.attention_reference import reference_attention
from runtime.executor import ArenaRuntime
from runtime.measure import allocations, now

#: Largest relative error that passes, by dtype: rounding of one step of the pass, not of its algorithm.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


@dataclass(frozen=True, slots=True)
class Check:
    """How a plan did against eager.

    Attributes:
        max_abs_error: largest absolute difference of any element.
        max_rel_error: largest ‖ours − eager‖/‖eager‖ over outputs and gradients, all steps.
        worst: name of the result with that error.
        tolerance: what ``max_rel_error`` may be.
        allocator_calls: of one step in steady state.
        step_seconds: median of a planned step, inputs copied in included.
        eager_peak_nbytes: most that eager held at once above its start during the same pass.
        eager_seconds: median of the same pass in eager.
        compared: false where eager's dropout draws other masks than the plan's, so that no result can be the same; the
            errors are 0 then.
    """

    max_abs_error: float
    max_rel_error: float
    worst: str
    tolerance: float
    allocator_calls: int
    step_seconds: float
    eager_peak_nbytes: int | None
    eager_seconds: float | None
    compared: bool = True

    @property
    def passed(self) -> bool:
        """Whether every result that was compared is within the tolerance (a NaN is not)."""
        return self.max_rel_error <= self.tolerance

    def fields(self) -> dict[str, Any]:
        """The JSON fields of ``--run``."""
        return {
            "compared": self.compared,
            "max_abs_error": self.max_abs_error if self.compared else None,
            "max_rel_error": self.max_rel_error if self.compared else None,
            "worst": self.worst,
            "tolerance": self.tolerance,
            "allocator_calls": self.allocator_calls,
            "step_seconds": self.step_seconds,
            "eager_peak_bytes": self.eager_peak_nbytes,
            "eager_seconds": self.eager_seconds,
        }


class _Errors:
    """The largest differences seen."""

    def __init__(self) -> None:
        self.absolute = 0.0
        self.relative = 0.0
        self.worst = ""
        self.tolerance = TOLERANCE[torch.float64]

    def compare(self, name: str, ours: object, reference: object, floor: float = 0.0) -> None:
        """Note the difference; relative to the reference's norm, or to ``floor`` where that is larger."""
        if not isinstance(ours, torch.Tensor) or not isinstance(reference, torch.Tensor):
            if (ours is None) != (reference is None):
                self._note(name, float("inf"), float("inf"))
            return
        self.tolerance = max(self.tolerance, TOLERANCE.get(ours.dtype, 0.0))
        if not reference.numel():
            return
        wide = torch.complex128 if reference.is_complex() else torch.float64
        one, two = ours.detach().to(wide), reference.detach().to(wide)
        finite = torch.isfinite(two)
        if not torch.equal(one[~finite].nan_to_num(), two[~finite].nan_to_num()):
            self._note(name, float("inf"), float("inf"))
            return
        difference = (one - two)[finite]
        if not difference.numel():
            return
        scale = max(two[finite].norm().item(), floor)
        distance = difference.norm().item()
        self._note(name, difference.abs().max().item(), distance / scale if scale else distance)

    def _note(self, name: str, absolute: float, relative: float) -> None:
        if absolute != absolute or relative != relative:  # NaN where eager is finite
            absolute = relative = float("inf")
        self.absolute = max(self.absolute, absolute)
        if relative > self.relative:
            self.relative, self.worst = relative, name


def check_against_eager(
    module: Callable[..., Any],
    inputs: tuple[Any, ...] | dict[str, Any],
    graph: Graph,
    plan: Plan,
    *,
    loss: Callable[[Any], Any] | None = None,
    steps: int = 5,
    device: str = "cpu",
    fresh_inputs: bool = False,
    seed: int = 0,
) -> Check:
    """Run ``steps`` steps of the plan and of eager from the same seeds and compare everything.

    Where the graph has fused attentions, they are compared with the definition in float64 and the same dropout mask
    (`runtime.attention_reference`), everything round them with eager as ever. Nothing is compared where the plan draws
    dropout's masks on a GPU: eager's kernel there draws others from the same seed.

    Args:
        module, inputs, loss: what was traced, with real data.
        graph, plan: its trace and its plan.
        steps: at least 2, as some mistakes only show from the second step on.
        fresh_inputs: draw new floating-point inputs for every step; those that share memory keep their values.
    """
    eager = copy.deepcopy(module) if isinstance(module, torch.nn.Module) else module
    run = ArenaRuntime(plan, device=device)
    errors = _Errors()
    compared = torch.device(device).type == "cpu" or not draws_masks(graph)
    fused = any(operation.operator in FUSED for operation in graph.operations)
    ours_seconds: list[float] = []
    eager_seconds: list[float] = []
    for step in range(max(steps, 2)):
        torch.manual_seed(seed + step)
        values = _copied(inputs, fresh_inputs)
        with attention_as(reference_attention) if fused else nullcontext():
            reference, reference_inputs, grad_outputs, seconds = _eager_step(eager, values, graph, loss, seed + step)
        if fused:
            seconds = _eager_step(copy.deepcopy(eager), values, graph, loss, seed + step)[3]
        eager_seconds.append(seconds)
        torch.manual_seed(seed + step)
        ours, ours_inputs, seconds = _planned_step(run, values, graph, grad_outputs)
        ours_seconds.append(seconds)
        if not compared:
            continue
        floor = _noise_floor(reference)
        for name, tensor in reference.items():
            errors.compare(name, ours.get(name), tensor, floor)
        for position, (one, two) in enumerate(zip(ours_inputs, reference_inputs, strict=True)):
            errors.compare(f"input.{position} after the step", one, two)
    if compared and isinstance(module, torch.nn.Module) and isinstance(eager, torch.nn.Module):
        for (name, one), (_, two) in zip(module.named_buffers(), eager.named_buffers(), strict=True):
            errors.compare(f"{name} after the steps", one, two)
    run.load(*_arguments(values, graph, grad_outputs))  # the last step overwrote what it was given
    steady = allocations(lambda: run.execute(threads=1))
    return Check(
        max_abs_error=errors.absolute,
        max_rel_error=errors.relative,
        worst=errors.worst,
        tolerance=errors.tolerance,
        allocator_calls=steady.calls,
        step_seconds=statistics.median(ours_seconds),
        eager_peak_nbytes=_eager_peak(eager, inputs, graph, loss),
        eager_seconds=statistics.median(eager_seconds),
        compared=compared,
    )


def draws_masks(graph: Graph) -> bool:
    """Whether masks of dropout are drawn in the graph, not handed in as to a backward of its own."""
    return any(base_name(operation.operator) == "bernoulli" for operation in graph.operations)


def spread(plan: Plan) -> Plan:
    """The same program with a place of its own for every storage: nothing is shared, so nothing can be clobbered."""
    placements = []
    offset = 0
    for storage in plan.graph.storages:
        placements.append(Placement(offset, 0, plan.steps))
        offset += padded(storage.nbytes, plan.alignment)
    return replace(
        plan,
        placements=tuple(placements),
        arena_nbytes=offset,
        lower_bound_nbytes=offset,
        strategy="spread",
        proved_optimal=True,
    )


def _noise_floor(reference: dict[str, Any]) -> float:
    """A part of the largest gradient's norm: a gradient that is zero but for rounding is held to that.

    A hundredth, or the dtype's rounding where that is larger: terms as large as those of other gradients cancel in it.
    """
    gradients = [
        item.detach()
        for name, item in reference.items()
        if isinstance(item, torch.Tensor) and not name.startswith("output.") and item.is_floating_point()
    ]
    norms = [max(1e-2, torch.finfo(item.dtype).eps) * item.double().norm().item() for item in gradients]
    return max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def _copied(values: Any, fresh: bool = False) -> Any:
    """The values with tensors of their own; tensors that share memory do so in the copy as well.

    Args:
        fresh: floating-point tensors that share no memory are drawn anew.
    """
    memory = Counter(leaf.untyped_storage().data_ptr() for leaf in _leaves(values))
    copies: dict[int, torch.UntypedStorage] = {}

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = leaf.untyped_storage().data_ptr()
        with torch.no_grad():
            if place and memory[place] > 1 and not leaf.is_conj() and not leaf.is_neg():
                if place not in copies:
                    copies[place] = leaf.untyped_storage().clone()  # type: ignore[no-untyped-call]
                value = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
                value.set_(copies[place], leaf.storage_offset(), leaf.shape, leaf.stride())
            else:
                value = torch.randn_like(leaf) if fresh and leaf.is_floating_point() else leaf.detach().clone()
        return value.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy_of, values)


def _leaves(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _call(module: Callable[..., Any], values: Any) -> Any:
    return module(**values) if isinstance(values, dict) else module(*values)


def _eager_step(
    module: Callable[..., Any], values: Any, graph: Graph, loss: Callable[[Any], Any] | None, seed: int
) -> tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor], float]:
    """Results by name, the inputs afterwards, the incoming gradients drawn, and seconds of the planned part."""
    copies = _copied(values)
    device = next((leaf.device for leaf in _leaves(copies)), torch.device("cpu"))
    torch.manual_seed(seed)
    started = now(device)
    outputs = _call(module, copies)
    if loss is not None:
        outputs = loss(outputs)
    flat = pytree.tree_leaves(outputs)
    forward_seconds = now(device) - started
    results = {f"output.{index}": item for index, item in enumerate(flat)} if graph.mode != "backward" else {}
    if graph.mode == "forward":
        return results, _leaves(copies), [], forward_seconds
    state = torch.random.get_rng_state()
    differentiable = [item for item in flat if isinstance(item, torch.Tensor) and item.requires_grad]
    grad_outputs = [] if loss is not None else [torch.randn_like(item) for item in differentiable]
    torch.random.set_rng_state(state)
    targets = _targets(module, copies, graph)
    started = now(device)
    gradients = torch.autograd.grad(
        differentiable, list(targets.values()), grad_outputs if loss is None else None, allow_unused=True
    )
    seconds = now(device) - started
    results |= dict(zip(targets, gradients, strict=True))
    total = seconds if graph.mode == "backward" else seconds + forward_seconds
    return results, _leaves(copies), grad_outputs, total


def _targets(module: Callable[..., Any], values: Any, graph: Graph) -> dict[str, torch.Tensor]:
    """The tensors the graph's gradients belong to, by name."""
    known: dict[str, torch.Tensor] = {}
    if isinstance(module, torch.nn.Module):
        known |= dict(module.named_parameters())
    with_paths, _ = pytree.tree_flatten_with_path(values)
    for path, leaf in with_paths:
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        if isinstance(leaf, torch.Tensor):
            known["input." + ".".join(keys)] = leaf
    return {port.name: known[port.name] for port in graph.gradients}


def _arguments(values: Any, graph: Graph, grad_outputs: list[torch.Tensor]) -> list[Any]:
    """What the plan's run takes: the module's inputs, or what its forward saves, then the incoming gradients."""
    if graph.mode != "backward":
        return [*_leaves(values), *grad_outputs]
    if graph.forward is None:
        raise ValueError("the graph was not traced in this process")
    _, saved = graph.forward(*_leaves(values))
    return [*saved, *grad_outputs]


def _planned_step(
    run: ArenaRuntime, values: Any, graph: Graph, grad_outputs: list[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor], float]:
    copies = _copied(values)
    arguments = _arguments(copies, graph, grad_outputs)
    run.arena.poison()
    started = now(run.arena.device)
    result = run(*arguments)
    seconds = now(run.arena.device) - started
    named: dict[str, Any] = {}
    if graph.mode == "backward":
        named = dict(result)
    else:
        outputs = result if graph.mode == "forward" else result[0]
        named = {f"output.{index}": item for index, item in enumerate(pytree.tree_leaves(outputs))}
        if graph.mode == "joint":
            named |= result[1]
    return named, _leaves(copies), seconds


def _eager_peak(module: Callable[..., Any], values: Any, graph: Graph, loss: Callable[[Any], Any] | None) -> int:
    """Most bytes eager holds at once above the start of the pass, results included."""
    copies = _copied(values)

    def forward() -> list[torch.Tensor]:
        outputs = _call(module, copies)
        flat = pytree.tree_leaves(outputs if loss is None else loss(outputs))
        return [item for item in flat if isinstance(item, torch.Tensor)]

    if graph.mode == "forward":
        with torch.no_grad():
            return allocations(forward).peak_nbytes
    targets = list(_targets(module, copies, graph).values())

    def gradients(outputs: list[torch.Tensor], incoming: list[torch.Tensor] | None) -> object:
        differentiable = [item for item in outputs if item.requires_grad]
        return torch.autograd.grad(differentiable, targets, incoming, allow_unused=True)

    outputs = forward()
    incoming = None if loss is not None else [torch.ones_like(item) for item in outputs if item.requires_grad]
    del outputs
    if graph.mode == "backward":
        kept: list[list[torch.Tensor]] = []
        run = allocations(lambda: gradients(kept.pop(), incoming), before=lambda: kept.append(forward()))
        return run.peak_nbytes
    return allocations(lambda: gradients(forward(), incoming)).peak_nbytes
