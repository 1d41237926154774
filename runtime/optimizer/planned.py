"""An optimizer whose update is part of plans: what the planner is told, and what passes between the two at each step.

The operations work on views of the arena alone (`runtime.kernels.update`). The optimizer's states are views of the same
memory, so that its ``state_dict``, ``load_state_dict``, ``master`` and schedulers work as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from planner.update import (
    CHECKED,
    CONTROL_NUMEL,
    FLOORED,
    FOUND,
    GOOD_STEPS,
    IN_A_ROW,
    MAX_SCALE,
    NORM,
    SCALE,
    SKIPPED,
    Block,
    Launch,
    Update,
)
from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.compiled import CompiledBackend
from runtime.optimizer.messages import send
from runtime.optimizer.precision import KINDS
from runtime.optimizer.scaling import LossScaler, ScalerState
from runtime.optimizer.workspace import Workspace

_PREFIX = "optimizer."


def takes_triton(optimizer: FusedOptimizer, device: torch.device) -> bool:
    """Whether the Triton kernels do a planned update: all parameters lie on the device, in dtypes of theirs."""
    return all(space.dtype in KINDS and space.device.type == device.type for space in optimizer.workspaces)


class PlannedUpdate:
    """An optimizer whose update is part of plans: its description, and what passes between the two at each step.

    The numbers that decide lie in the arena, where the update's kernels read and write them: settings of the groups,
    the control block, the loss scale. What the host changed is sent before a step, in order with it and without
    waiting; what a step did is read back when somebody asks, or at once where ``deferred`` is false.

    Args:
        optimizer: stops placing parameters and gradients itself.
        names: of its parameters, as the graph's states.
        scaler: of the loss.
        scale: name and tensor of the graph's state that holds the loss scale, or ``None``.
        device: where the arena lies.
        deferred: whether the Triton kernels run the update, and nothing may wait for them.

    Raises:
        OptimizerError: a parameter is not among ``names``, or shares its memory with another.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        names: Mapping[int, str],
        scaler: LossScaler,
        scale: tuple[str, torch.Tensor] | None,
        *,
        device: torch.device,
        deferred: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._deferred = deferred
        self._scale = None if scale is None else scale[1]
        optimizer.follow()
        self._sent: dict[str, Any] = {}
        self._unread = False
        self._skipped = 0
        self._settings = torch.zeros(len(optimizer.param_groups) * codes.SETTINGS, dtype=torch.float64, device=device)
        self._control = torch.zeros(CONTROL_NUMEL, dtype=torch.float64, device=device)
        self.description, self.bindings = self._describe(names, None if scale is None else scale[0])
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
        shared = {f"{_PREFIX}settings": self._settings, f"{_PREFIX}control": self._control}
        settings, control = (_block(name, block) for name, block in shared.items())
        rule = next(name for name, code in codes.RULES.items() if code == optimizer.rule)
        master, states = optimizer.precision.master, optimizer.precision.states
        scratch = self._scratch_nbytes()
        made = Update(rule, master, states, optimizer.seed, tuple(launches), settings, control, scale, scratch)
        self._kept = {name: id(block) for name, block in live.items()}
        self._seed = optimizer.seed
        return made, {**live, **shared}

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still keeps its states, and seed, as they were described; it may have been rebuilt."""
        found = [id(block) for space in self.optimizer.workspaces for block in (*space.blocks.values(), space.steps)]
        same = found == list(self._kept.values()) and self.optimizer.seed == self._seed
        return same and len(self.optimizer.param_groups) * codes.SETTINGS == self._settings.numel()

    def moved(self) -> None:
        """Take note that the states lie elsewhere now."""
        self.optimizer.refresh()

    def prepare(self) -> None:
        """Send what the next update needs to know and does not yet: learning rates, limits, the loss scale."""
        optimizer, scaler = self.optimizer, self.scaler
        self._send("settings", [optimizer.setting(group) for group in optimizer.param_groups], self._settings)
        told = (
            float(optimizer.checks(scaled=scaler.enabled)),
            math.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm,
            *(scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval, scaler.min_scale, scaler.max_scale),
        )
        self._send("told", told, self._control[CHECKED : MAX_SCALE + 1])
        if self._scale is not None and not scaler.awaits(self.settle):
            state = scaler.state
            if self._sent.get("scale") != state:
                self._sent["scale"] = state
                changing = (state.scale, state.good_steps, state.skipped_in_a_row, 0)
                send(np.array(changing, dtype=np.float64), self._control[SCALE : FLOORED + 1])
                self._scale.fill_(state.scale)

    def _send(self, name: str, values: Any, target: torch.Tensor) -> None:
        """Unless the same was sent last."""
        if self._sent.get(name) != values:
            self._sent[name] = values
            send(np.array(values, dtype=np.float64), target)

    def finish(self) -> None:
        """Tell optimizer and scaler that a step was taken."""
        self._unread = True
        self.optimizer.took(len(self.description.launches), self.settle)
        if self.scaler.enabled:
            self.scaler.took(self.settle)
        if not self._deferred:
            self.settle()

    @property
    def stepped(self) -> bool:
        """Whether the last step changed the parameters."""
        return not self.optimizer.last_step_skipped

    def settle(self) -> None:
        """Read what the last step did, waiting for it, and tell optimizer and scaler; nothing if that is done."""
        if not self._unread:
            return  # a state that was loaded since is theirs to keep
        self._unread = False
        values = self._control.cpu().numpy()
        skipped = int(values[SKIPPED]) - self._skipped
        self._skipped += skipped
        self.optimizer.settled(bool(values[FOUND]), float(values[NORM]), skipped)
        if self._scale is not None:
            state = ScalerState(float(values[SCALE]), int(values[GOOD_STEPS]), int(values[IN_A_ROW]))
            self._sent["scale"] = state
            self.scaler.settled(state, skipped, floored=bool(values[FLOORED]))

    def _scratch_nbytes(self) -> int:
        """Bytes held outside the arena: tables and partial results on a device, ATen's scratch at one time on a CPU."""
        spaces = self.optimizer.workspaces
        if not self._deferred:
            return max((_chunk_nbytes(space) for space in spaces), default=0)
        from runtime.kernels.triton.update import scratch_nbytes

        return scratch_nbytes([[slot.segment.length for slot in space.slots] for space in spaces])


def _block(name: str, block: torch.Tensor) -> Block:
    return Block(name, str(block.dtype).removeprefix("torch."), block.numel())


def _chunk_nbytes(space: Workspace) -> int:
    """Bytes that ATen's form of the update holds at most: of one chunk, whatever the model's size, as measured."""
    if isinstance(space.backend, CompiledBackend):
        return 0
    each = 64 if space.states == codes.BYTES else 36
    return each * min(codes.CPU_CHUNK, space.length)
