"""``arenaplan.check_gradients`` and ``arenaplan.update``: the optimizer's update as operations on the arena's views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from planner.graph import Argument, Operation, TensorRef
from planner.update import (
    BACKOFF,
    CHECKED,
    CONTROL_NUMEL,
    FACTOR,
    FLOORED,
    FOUND,
    GOOD_STEPS,
    GROWTH,
    IN_A_ROW,
    INTERVAL,
    MAX_NORM,
    MAX_SCALE,
    MIN_SCALE,
    NORM,
    SCALE,
    SKIPPED,
)
from runtime.errors import ArenaError
from runtime.kernels.binding import Call, Context
from runtime.optimizer import backends, codes
from runtime.optimizer.layout import Segment
from runtime.optimizer.linking import dense_strides
from runtime.optimizer.precision import Precision
from runtime.optimizer.workspace import Slot, Workspace

#: What makes the backend of a workspace: `backends.backend_for`, or one for a kernel of a caller's choice.
BackendFor = Callable[[torch.device, torch.dtype], Any]
_NOWHERE = Segment(0, 0, 0)
#: Moments by rule and name; whether they have a sign.
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False), ("momentum_buffer", True))


@dataclass(frozen=True, slots=True)
class Check:
    """The operands of ``arenaplan.check_gradients``.

    Attributes:
        spaces: the gradients of each dtype.
        control: the control block, float64.
        scale: the loss scale, one float32, or ``None``.
    """

    spaces: list[Workspace]
    control: torch.Tensor
    scale: torch.Tensor | None


def checked_check(operation: Operation, context: Context, backend_for: BackendFor) -> Check:
    """What a check works on; raises `ArenaError` unless it is a check that this version knows."""
    given, place, scale = operation.arguments
    control = context.tensor(place)
    factor = None if scale is None else context.tensor(scale)
    fits = control.dtype is torch.float64 and control.shape == (CONTROL_NUMEL,)
    if not fits or (factor is not None and (factor.dtype is not torch.float32 or factor.numel() != 1)):
        raise ArenaError(f"operation {operation.name}: it is no check that this version knows; plan again")
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for view in _views(given, context):
        if view is not None:
            by_dtype.setdefault(view.dtype, []).append(view)
    spaces = [
        _workspace(views, views, [0] * len(views), Precision("none"), (), 64, backend_for)
        for views in by_dtype.values()
    ]
    return Check(spaces, control, factor)


def bind_check(operation: Operation, context: Context) -> list[Call]:
    """Look for infinities and NaN in all gradients, form their norm, and adapt the loss scale, by the control block."""
    found = checked_check(operation, context, backends.backend_for)
    scale = None if found.scale is None else found.scale.numpy().reshape(())
    return [partial(_check, found.spaces, found.control.numpy(), scale)]


def _check(spaces: Sequence[Workspace], control: Any, scale: Any) -> None:
    found, norm, factor = False, math.nan, 1.0 if scale is None else 1.0 / float(scale)
    if control[CHECKED]:
        found = any(space.backend.overflow(space) for space in spaces)
    if not found and math.isfinite(control[MAX_NORM]):
        norm = math.sqrt(sum(space.backend.squares(space) for space in spaces)) * factor
        factor *= min(1.0, float(control[MAX_NORM]) / (norm + 1e-6))
    control[FOUND], control[FACTOR], control[NORM] = found, factor, norm
    control[SKIPPED] += found
    if scale is not None:
        _adapt(control)
        scale[...] = control[SCALE]


def _adapt(control: Any) -> None:
    """`LossScaler.update` on the control block."""
    if control[FOUND]:
        control[GOOD_STEPS] = 0.0
        control[IN_A_ROW] += 1.0
        if control[SCALE] <= control[MIN_SCALE]:
            control[FLOORED] = 1.0
        control[SCALE] = max(control[SCALE] * control[BACKOFF], control[MIN_SCALE])
        return
    control[IN_A_ROW] = 0.0
    control[GOOD_STEPS] += 1.0
    if control[GOOD_STEPS] >= control[INTERVAL]:
        control[GOOD_STEPS] = 0.0
        control[SCALE] = min(control[SCALE] * control[GROWTH], control[MAX_SCALE])


@dataclass(frozen=True, slots=True)
class UpdateOf:
    """The operands of ``arenaplan.update``.

    Attributes:
        space: parameters, gradients and states of one dtype.
        rule: as in `codes`.
        settings, control: float64, in the arena.
        seed: of random rounding.
    """

    space: Workspace
    rule: int
    settings: torch.Tensor
    control: torch.Tensor
    seed: int


def checked_update(operation: Operation, context: Context, backend_for: BackendFor) -> UpdateOf:
    """What an update works on.

    Raises:
        ArenaError: an operand is not what the update's layout asks for; the kernels go by addresses, so none may be.
    """
    given, gradients, blocks, place, table, control = operation.arguments
    options = dict(operation.keywords)
    rule, master, states = (str(options.get(name)) for name in ("rule", "master", "states"))
    names, groups, seed = _texts(options.get("blocks")), _numbers(options.get("groups")), options.get("seed")
    parameters = [view for view in _views(given, context) if view is not None]
    steps, settings, signals = (context.tensor(item) for item in (place, table, control))
    held = dict(zip(names, (view for view in _views(blocks, context) if view is not None), strict=True))
    moments = tuple(item for item in _MOMENTS if item[0] in held)
    space = _workspace(
        parameters,
        _views(gradients, context),
        groups,
        Precision(master, states),
        moments,
        codes.TILE if states == "8bit" else 64,
        backend_for,
        held,
        steps,
    )
    rows = settings.numel() // codes.SETTINGS
    wanted = {"steps": (torch.float32, len(parameters)), **_wanted(space)}
    found = {"steps": steps, **held}
    fits = (
        rule in codes.RULES
        and isinstance(seed, int)
        and len(moments) in ((2,) if rule == "adam" else (0, 1))
        and all(group in range(rows) for group in groups)
        and settings.dtype == signals.dtype == torch.float64
        and settings.numel() == rows * codes.SETTINGS
        and signals.numel() == CONTROL_NUMEL
        and wanted == {name: (view.dtype, view.numel()) for name, view in found.items()}
        and all(view.is_contiguous() for view in (*found.values(), settings, signals))
    )
    if not fits or not isinstance(seed, int):
        raise ArenaError(f"operation {operation.name}: it is no update that this version knows; plan again")
    return UpdateOf(space, codes.RULES[rule], settings, signals, seed)


def bind_update(operation: Operation, context: Context) -> list[Call]:
    """Update the parameters of one dtype, all in one launch, unless the check found an overflow."""
    found = checked_update(operation, context, backends.backend_for)
    settings = found.settings.numpy().reshape(-1, codes.SETTINGS)
    return [_Launched(found.space, found.rule, settings, found.control.numpy(), found.seed)]


def _texts(argument: Argument) -> tuple[str, ...]:
    return tuple(str(item) for item in argument) if isinstance(argument, tuple) else ()


def _numbers(argument: Argument) -> tuple[int, ...]:
    return tuple(item for item in argument if isinstance(item, int)) if isinstance(argument, tuple) else ()


def _wanted(space: Workspace) -> dict[str, tuple[torch.dtype, int]]:
    """The blocks that the update reads and writes, and how long each must be."""
    wanted: dict[str, tuple[torch.dtype, int]] = {}
    for name, signed in space.moments:
        if space.states == codes.BYTES:
            wanted[name] = (torch.int8 if signed else torch.uint8, space.length)
            wanted[f"{name}_scales"] = (torch.float32, space.length // codes.TILE)
        else:
            wanted[name] = (torch.float64 if space.dtype is torch.float64 else torch.float32, space.length)
    if space.master == codes.MASTER:
        wanted["master"] = (torch.float32, space.length)
    elif space.master == codes.SPLIT:
        wanted["remainder"] = (torch.int16, space.length)
    return wanted


class _Launched:
    """The bound update: everything it needs to know lies in the arena."""

    def __init__(self, space: Workspace, rule: int, settings: Any, control: Any, seed: int) -> None:
        self.space = space
        self.rule = rule
        self.settings = settings
        self.control = control
        self.seed = seed
        self._steps = space.steps.numpy()
        self._expected = self._steps.copy()

    def __call__(self) -> None:
        if self.control[FOUND]:
            return
        space = self.space
        if not np.array_equal(self._steps, self._expected):
            space.classify()  # states were loaded
        space.collect()
        space.backend.update(space, self.rule, self.settings, float(self.control[FACTOR]), self.seed)
        space.advance(False)
        self._expected[:] = self._steps


def _views(argument: Argument, context: Context) -> list[torch.Tensor | None]:
    items = argument if isinstance(argument, tuple) else ()
    return [context.tensor(item) if isinstance(item, TensorRef) else None for item in items]


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)


def _workspace(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    groups: Sequence[int],
    precision: Precision,
    moments: Sequence[tuple[str, bool]],
    alignment: int,
    backend_for: BackendFor,
    blocks: dict[str, torch.Tensor] | None = None,
    steps: torch.Tensor | None = None,
) -> Workspace:
    """A workspace over views of the arena, its table made."""
    slots = []
    if not parameters or {view.dtype for view in parameters} != {parameters[0].dtype}:
        raise ArenaError("an update takes parameters of one dtype; plan again")
    for number, (view, gradient, group) in enumerate(zip(parameters, gradients, groups, strict=True)):
        strides = dense_strides(view)
        if view.stride() != strides or (gradient is not None and not _alike(gradient, view)):
            raise ArenaError(f"parameter {number} of an update and its gradient are not laid out alike; plan again")
        stand_in = view.detach()
        stand_in.grad = gradient
        slots.append(Slot([stand_in], f"parameter {number}", group, _NOWHERE, strides, number=number))
    space = Workspace(
        slots,
        precision,
        moments,
        link=False,
        alignment=alignment,
        backend=backend_for(parameters[0].device, parameters[0].dtype),
        blocks=blocks if blocks is not None else {},
        steps=steps,
    )
    if not space.backend.host:
        space.separate()  # nobody looks at the counts of steps from the host
    elif steps is not None and steps.numel() == len(slots):
        space.classify()
    space.collect()
    return space
