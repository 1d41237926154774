"""An optimizer whose update is part of plans: what the planner is told, and what passes between the two at each step.

The operations work on views of the arena alone (`runtime.kernels.update`). The optimizer's states are views of the same
memory, so that its ``state_dict``, ``load_state_dict``, ``master`` and schedulers work as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from planner.update import CHECKED, CONTROL_NUMEL, FOUND, MAX_NORM, NORM, Block, Launch, Update
from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.compiled import CompiledBackend
from runtime.optimizer.scaling import LossScaler
from runtime.optimizer.workspace import Workspace

_PREFIX = "optimizer."


class PlannedUpdate:
    """An optimizer whose update is part of plans: its description, and what passes between the two at each step.

    Args:
        optimizer: stops placing parameters and gradients itself.
        names: of its parameters, as the graph's states.
        scaler: of the loss.
        scale: name of the graph's state that holds the loss scale, or ``None``.

    Raises:
        OptimizerError: a parameter is not among ``names``, or shares its memory with another.
    """

    def __init__(
        self, optimizer: FusedOptimizer, names: Mapping[int, str], scaler: LossScaler, scale: str | None
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        optimizer.follow()
        self._seen: dict[str, torch.Tensor] = {}
        self.description, self.bindings = self._describe(names, scale)
        self.parameters = frozenset(name for launch in self.description.launches for name in launch.parameters)

    def _describe(self, names: Mapping[int, str], scale: str | None) -> tuple[Update, dict[str, torch.Tensor]]:
        optimizer, launches, live = self.optimizer, [], {}
        for space in optimizer.workspaces:
            label = str(space.dtype).removeprefix("torch.")
            order = []
            for slot in space.slots:
                if len(slot.parameters) > 1:
                    raise OptimizerError(
                        f"{slot.name} is two Parameters over the same memory: let both modules hold one and the same"
                    )
                if id(slot.parameter) not in names:
                    raise OptimizerError(
                        f"{slot.name} is no parameter of the model: leave it out of the step's optimizer"
                    )
                order.append(names[id(slot.parameter)])
            held = {f"{_PREFIX}{label}.{name}": block for name, block in space.blocks.items()}
            steps = f"{_PREFIX}{label}.steps"
            groups = tuple(slot.group for slot in space.slots)
            blocks = tuple(_block(name, block) for name, block in held.items())
            launches.append(Launch(label, tuple(order), groups, blocks, _block(steps, space.steps)))
            live.update(held)
            live[steps] = space.steps
        shared = {
            f"{_PREFIX}settings": torch.zeros(len(optimizer.param_groups) * codes.SETTINGS, dtype=torch.float64),
            f"{_PREFIX}control": torch.zeros(CONTROL_NUMEL, dtype=torch.float64),
        }
        settings, control = (_block(name, block) for name, block in shared.items())
        self._settings, self._control = shared.values()
        rule = next(name for name, code in codes.RULES.items() if code == optimizer.rule)
        master, states = optimizer.precision.master, optimizer.precision.states
        scratch = max((_scratch_nbytes(space) for space in optimizer.workspaces), default=0)
        made = Update(rule, master, states, optimizer.seed, tuple(launches), settings, control, scale, scratch)
        self._kept = {name: id(block) for name, block in live.items()}
        return made, {**live, **shared}

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still keeps its states where they were described; it may have been rebuilt."""
        found = [id(block) for space in self.optimizer.workspaces for block in (*space.blocks.values(), space.steps)]
        return found == list(self._kept.values()) and len(self.optimizer.param_groups) == self._rows

    @property
    def _rows(self) -> int:
        return self._settings.numel() // codes.SETTINGS

    def moved(self) -> None:
        """Take note that the states lie elsewhere now."""
        self.optimizer.refresh()

    def prepare(self) -> None:
        """Write what the next update needs to know: learning rates, limits, whether to look for overflow."""
        optimizer = self.optimizer
        rows = self._settings.numpy().reshape(-1, codes.SETTINGS)
        for number, group in enumerate(optimizer.param_groups):
            rows[number] = optimizer.setting(group)
        control = self._control.numpy()
        control[CHECKED] = optimizer.checks(scaled=self.scaler.enabled)
        control[MAX_NORM] = math.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm

    def finish(self) -> bool:
        """Tell optimizer and scaler what the update did, and adapt the scale; false if it changed nothing."""
        control = self._control.numpy()
        found, norm = bool(control[FOUND]), float(control[NORM])
        self.optimizer.record(found, None if math.isnan(norm) else norm, len(self.description.launches))
        if self.scaler.enabled:
            self.scaler.note(not found)
            self.scaler.update()
        return not found


def _block(name: str, block: torch.Tensor) -> Block:
    return Block(name, str(block.dtype).removeprefix("torch."), block.numel())


def _scratch_nbytes(space: Workspace) -> int:
    """Bytes that ATen's form of the update holds at most: of one chunk, whatever the model's size, as measured."""
    if isinstance(space.backend, CompiledBackend):
        return 0
    each = 64 if space.states == codes.BYTES else 36
    return each * min(codes.CPU_CHUNK, space.length)
