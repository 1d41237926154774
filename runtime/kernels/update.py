"""``arenaplan.check_gradients`` and ``arenaplan.update``: the optimizer's update as operations on the arena's views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from planner.graph import Argument, Operation, TensorRef
from planner.update import CHECKED, FACTOR, FOUND, MAX_NORM, NORM
from runtime.errors import ArenaError
from runtime.kernels.binding import Call, Context
from runtime.optimizer import codes, compiled
from runtime.optimizer.aten import AtenBackend
from runtime.optimizer.compiled import CompiledBackend
from runtime.optimizer.layout import Segment
from runtime.optimizer.linking import dense_strides
from runtime.optimizer.precision import KINDS, Precision
from runtime.optimizer.workspace import Slot, Workspace

_NOWHERE = Segment(0, 0, 0)
#: Moments by rule and name; whether they have a sign.
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False), ("momentum_buffer", True))


def backend_of(dtype: torch.dtype) -> Any:
    """What runs the update of a dtype on a CPU."""
    return CompiledBackend() if dtype in KINDS and compiled.available() else AtenBackend()


def bind_check(operation: Operation, context: Context) -> list[Call]:
    """Look for infinities and NaN in all gradients, and form their norm, as the control block says."""
    given, control, scale = operation.arguments
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for view in _views(given, context):
        if view is not None:
            by_dtype.setdefault(view.dtype, []).append(view)
    spaces = [_workspace(views, views, [0] * len(views), Precision("none"), (), 64) for views in by_dtype.values()]
    place = None if scale is None else context.tensor(scale).numpy().reshape(())
    return [partial(_check, spaces, context.tensor(control).numpy(), place)]


def _check(spaces: Sequence[Workspace], control: Any, scale: Any) -> None:
    found, norm, factor = False, math.nan, 1.0 if scale is None else 1.0 / float(scale)
    if control[CHECKED]:
        found = any(backend_of(space.dtype).overflow(space) for space in spaces)
    if not found and math.isfinite(control[MAX_NORM]):
        norm = math.sqrt(sum(backend_of(space.dtype).squares(space) for space in spaces)) * factor
        factor *= min(1.0, float(control[MAX_NORM]) / (norm + 1e-6))
    control[FOUND], control[FACTOR], control[NORM] = found, factor, norm


def bind_update(operation: Operation, context: Context) -> list[Call]:
    """Update the parameters of one dtype, all in one launch, unless the check found an overflow."""
    parameters, gradients, blocks, steps, settings, control = operation.arguments
    options = dict(operation.keywords)
    rule, master, states = (str(options[name]) for name in ("rule", "master", "states"))
    names, groups, seed = options["blocks"], options["groups"], options["seed"]
    if (
        rule not in codes.RULES
        or not isinstance(names, tuple)
        or not isinstance(groups, tuple)
        or not isinstance(seed, int)
    ):
        raise ArenaError(f"operation {operation.name}: it is no update that this version knows; plan again")
    held = dict(zip(map(str, names), (view for view in _views(blocks, context) if view is not None), strict=True))
    views = [view for view in _views(parameters, context) if view is not None]
    moments = tuple(item for item in _MOMENTS if item[0] in held)
    precision = Precision(master, states)
    alignment = codes.TILE if states == "8bit" else 64
    numbers = [int(group) for group in groups if isinstance(group, int)]
    space = _workspace(
        views, _views(gradients, context), numbers, precision, moments, alignment, held, context.tensor(steps)
    )
    rows = context.tensor(settings).numpy().reshape(-1, codes.SETTINGS)
    return [_Launched(space, codes.RULES[rule], rows, context.tensor(control).numpy(), seed)]


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
        backend_of(space.dtype).update(space, self.rule, self.settings, float(self.control[FACTOR]), self.seed)
        space.advance(False)
        self._expected[:] = self._steps


def _views(argument: Argument, context: Context) -> list[torch.Tensor | None]:
    items = argument if isinstance(argument, tuple) else ()
    return [context.tensor(item) if isinstance(item, TensorRef) else None for item in items]


def _workspace(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    groups: Sequence[int],
    precision: Precision,
    moments: Sequence[tuple[str, bool]],
    alignment: int,
    blocks: dict[str, torch.Tensor] | None = None,
    steps: torch.Tensor | None = None,
) -> Workspace:
    """A workspace over views of the arena, its table made."""
    slots = []
    for number, (view, gradient, group) in enumerate(zip(parameters, gradients, groups, strict=True)):
        stand_in = view.detach()
        stand_in.grad = gradient
        slots.append(Slot([stand_in], f"parameter {number}", group, _NOWHERE, dense_strides(view), number=number))
    space = Workspace(
        slots,
        precision,
        moments,
        link=False,
        alignment=alignment,
        chunk=codes.CPU_CHUNK,
        blocks=blocks if blocks is not None else {},
        steps=steps,
    )
    if steps is not None:
        space.classify()
    space.collect()
    return space
