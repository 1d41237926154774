"""What the fused optimizers share: groups, workspaces, the step with its checks, and state in and out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch

from runtime.errors import OptimizerError
from runtime.optimizer import backends, codes
from runtime.optimizer.linking import narrowed, refuse_reshaped, regrouped, slots_of
from runtime.optimizer.precision import Precision
from runtime.optimizer.shown import Shown
from runtime.optimizer.state import clear_states, export_state, import_edited, import_states, worth_saving
from runtime.optimizer.stepping import Asked, update_from_host, update_on_device
from runtime.optimizer.workspace import Slot, Workspace

Loss = torch.Tensor | float | None


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers: see `FusedAdamW` and `FusedSGD`.

    Attributes:
        precision: what is kept besides 16-bit parameters.
        max_grad_norm: gradients whose common norm is larger are scaled down to it; ``None`` for no limit.
        skip_nonfinite: whether a step whose gradients hold an infinity or NaN changes nothing; ``None`` for "where
            there are float16 gradients, or a loss scale".
        grad_scale, found_inf: what a scaler sets for the next step; ``None`` or absent at any other time.
        launches: updates launched by the last step, one for each device and dtype that has gradients.
    """

    rule: ClassVar[int]
    grad_scale: Any
    found_inf: Any
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        precision: Precision,
        max_grad_norm: float | None,
        skip_nonfinite: bool | None,
        seed: int,
        link: bool,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise OptimizerError(f"max_grad_norm={max_grad_norm}: give a positive number, or None for no limit")
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise OptimizerError(f"seed={seed!r}: give an integer of 64 bits")
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.seed = seed
        self.link = link
        self._reset()
        super().__init__(params, defaults)
        self._build()

    def _reset(self) -> None:
        self.launches = 0
        self._skipped: torch.Tensor | int = 0
        self._last_found: torch.Tensor | bool = False
        self._last_norm: torch.Tensor | float | None = None
        self._pending: Callable[[], None] | None = None
        self._workspaces: tuple[Workspace, ...] = ()
        self._slots: dict[torch.Tensor, tuple[Workspace, Slot]] = {}
        self._left_out: list[torch.Tensor] = []
        self._grouped: list[list[torch.Tensor]] = []
        self._shown = Shown()
        self._ready = False

    # What the kinds of optimizer differ in.

    def moments(self) -> tuple[tuple[str, bool], ...]:
        """Names of the moments, and whether they have a sign."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepare for settings that were changed since the last step."""

    def setting(self, group: dict[str, Any]) -> list[float]:
        """A group's row of the table of groups, columns as in `codes`; refuses options it does not have."""
        raise NotImplementedError

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss.

        With ``grad_scale`` set (by `torch.amp.GradScaler` or `LossScaler`), gradients are divided by it as they are
        read; they keep their scaled values. With ``found_inf`` set, that decides whether the step is skipped.

        Raises:
            SparseGradientError: a gradient is sparse; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    def _update(self, grad_scale: Any, found_inf: Any) -> None:
        self._settle()
        self.renew()
        if not all(workspace.collect() for workspace in self._workspaces):
            self._build()
            for workspace in self._workspaces:
                workspace.collect(last=True)
        busy = [workspace for workspace in self._workspaces if workspace.active.any()]
        asked = Asked(
            self.rule,
            np.array([self.setting(group) for group in self.param_groups], dtype=np.float64),
            self.seed,
            self.checks(scaled=grad_scale is not None),
            self.max_grad_norm,
            grad_scale,
            found_inf,
        )
        on_host = all(workspace.backend.host for workspace in busy)
        outcome = (update_from_host if on_host else update_on_device)(busy, asked)
        self._last_found, self._last_norm, self.launches = outcome.found, outcome.norm, outcome.launches
        self._skipped = self._skipped + outcome.found

    def renew(self) -> None:
        """Take over what the caller changed since the last step: parameters in groups, entries of ``state``."""
        touched = self.state is not self._shown or self._shown.touched
        edited = self._shown.edited(self.state, self._parameters()) if touched else {}
        thawed = any(parameter.grad is not None for parameter in self._left_out)
        if edited or thawed or regrouped(self.param_groups, self._grouped) or self._lacks_moments():
            self._build(keep=edited)
            import_edited(self._slots, edited)
            self._publish()
        self.begin()

    def _lacks_moments(self) -> bool:
        moments = self.moments()
        return any(workspace.moments != moments for workspace in self._workspaces)

    def checks(self, *, scaled: bool = False) -> bool:
        """Whether a step looks for infinities and NaN by itself."""
        if self.skip_nonfinite is not None:
            return self.skip_nonfinite
        return scaled or any(workspace.dtype is torch.float16 for workspace in self._workspaces)

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Parameters and states by device and dtype."""
        return self._workspaces

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite."""
        self._settle()
        return int(self._skipped)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step changed nothing because a gradient was not finite."""
        self._settle()
        return bool(self._last_found)

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, unscaled, before clipping; ``None`` where it was not needed."""
        self._settle()
        norm = None if self._last_norm is None else float(self._last_norm)
        return None if norm is None or math.isnan(norm) else norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        With ``set_to_none`` each ``grad`` becomes ``None``, so that a parameter which gets no gradient takes no part
        in the next step; the next backward pass puts the view of the workspace back as it delivers each gradient.
        """
        if set_to_none:
            for parameter in self._parameters():
                parameter.grad = None
            return
        with torch.no_grad():
            homes = {key for workspace in self._workspaces for key in workspace.clear_gradients()}
            for parameter in self._parameters():
                if parameter.grad is not None and id(parameter.grad) not in homes:
                    parameter.grad.requires_grad_(False) if parameter.grad.grad_fn is None else parameter.grad.detach_()
                    parameter.grad.zero_()

    # Parameters.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters join the workspaces. A parameter named twice in it counts once."""
        given = param_group["params"] if isinstance(param_group, dict) else None
        if isinstance(given, Iterable) and not isinstance(given, (torch.Tensor, set)):
            items = list(given)
            tensors = [item[1] if isinstance(item, tuple) else item for item in items]
            firsts = {id(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
            param_group["params"] = [items[number] for number in sorted(firsts.values())]
        super().add_param_group(param_group)
        self.setting(self.param_groups[-1])
        if self._ready:
            self._build()

    def follow(self) -> None:
        """Give up the workspaces of parameters and gradients: both are used where they lie from now on.

        For whoever places them, such as a planned training step. States stay in their workspaces.
        """
        self.link = False
        self._build()

    @torch.no_grad()
    def convert(self, dtype: torch.dtype) -> None:
        """Convert FP32 parameters to a 16-bit dtype; their values move into the masters, exactly where one is kept.

        Gradients are dropped; moments stay as they are.
        """
        exact = narrowed(self._parameters(), dtype)
        self._build()
        for parameter, value in exact.items():
            if parameter in self._slots:
                self.set_master(parameter, value)

    def refresh(self) -> None:
        """Show the states where they lie now, after their blocks were moved."""
        self._publish()

    def took(self, launches: int, settle: Callable[[], None]) -> None:
        """Take note of a step that was taken elsewhere, on the same memory.

        ``settle`` is called before somebody looks at what the step did, and then calls `settled`; until then nothing
        waits for the device.
        """
        self.launches = launches
        self._pending = settle
        self._opt_called = True  # what torch's schedulers look at

    def settled(self, found: bool, norm: float, skipped: int) -> None:
        """What the steps taken elsewhere did: the last one's overflow and norm, and how many more were skipped."""
        self._pending = None
        self._last_found, self._last_norm = found, norm
        self._skipped = self._skipped + skipped

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def state_blocks(self) -> dict[str, torch.Tensor]:
        """The flat states, by device, dtype of the parameters and name, such as ``cpu.float16.exp_avg``."""
        return {
            f"{workspace.device}.{str(workspace.dtype).removeprefix('torch.')}.{name}": block
            for workspace in self._workspaces
            for name, block in workspace.blocks.items()
        }

    @torch.no_grad()
    def place_states(self, blocks: dict[str, torch.Tensor]) -> None:
        """Move flat states into memory of the caller's: same names, dtypes, devices and lengths as `state_blocks`.

        Raises:
            OptimizerError: a block is unknown or does not match.
        """
        known = self.state_blocks()
        for name, block in blocks.items():
            old = known.get(name)
            if old is None or old.shape != block.shape or old.dtype != block.dtype or old.device != block.device:
                wanted = "unknown" if old is None else f"{old.dtype} {tuple(old.shape)} on {old.device}"
                raise OptimizerError(f"state block {name}: {wanted} wanted, {block.dtype} {tuple(block.shape)} given")
        for workspace in self._workspaces:
            prefix = f"{workspace.device}.{str(workspace.dtype).removeprefix('torch.')}."
            for name in workspace.blocks:
                if prefix + name in blocks:
                    block = blocks[prefix + name].detach()
                    workspace.blocks[name] = block.copy_(workspace.blocks[name])
        self._publish()

    def keeps_exactly(self, parameter: torch.Tensor) -> bool:
        """Whether `master` gives every bit of the FP32 value that a 16-bit parameter stands for."""
        return parameter in self._slots and self._slots[parameter][0].master in (codes.MASTER, codes.SPLIT)

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter in full precision, as exactly as it is kept."""
        workspace, slot = self._slot(parameter)
        return workspace.full_precision(slot)

    @torch.no_grad()
    def set_master(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Write a parameter from a full-precision value, and keep what the parameter itself cannot hold."""
        workspace, slot = self._slot(parameter)
        workspace.set_full_precision(slot, value)

    def _slot(self, parameter: torch.Tensor) -> tuple[Workspace, Slot]:
        if parameter not in self._slots:
            raise OptimizerError("no such parameter here: it is in no group, or is frozen")
        return self._slots[parameter]

    def _parameters(self) -> Iterable[torch.Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.no_grad()
    def _build(self, keep: Iterable[torch.Tensor] = ()) -> None:
        """Lay the workspaces out for the parameters as they are now, and take over what the old ones held.

        Frozen parameters are left out, unless they have been updated before or are in ``keep``.
        """
        refuse_reshaped(slot for _, slot in self._slots.values())
        before = {id(parameter): export_state(*self._slots[parameter]) for parameter in self._slots}
        stateful = {id(parameter) for parameter in self._slots if worth_saving(before[id(parameter)], parameter)}
        for workspace in self._workspaces:
            workspace.unlink()
        alignment = codes.TILE if self.precision.states == "8bit" else 64
        self._grouped = [list(group["params"]) for group in self.param_groups]
        groups, self._left_out = slots_of(self.param_groups, stateful | {id(parameter) for parameter in keep})
        self._workspaces = tuple(
            Workspace(
                slots,
                self.precision,
                self.moments(),
                link=self.link,
                alignment=alignment,
                backend=backends.backend_for(slots[0].parameter.device, slots[0].parameter.dtype),
            )
            for slots in groups
        )
        self._slots = {
            parameter: (workspace, slot)
            for workspace in self._workspaces
            for slot in workspace.slots
            for parameter in slot.parameters
        }
        known = {parameter: before[id(parameter)] for parameter in self._slots if id(parameter) in before}
        import_states(self._slots, known)
        self._publish()
        self._ready = True

    # State.

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, in tensors that share memory with nothing: moments in FP32 whatever they are kept in.

        A 16-bit parameter's ``master`` is saved in FP32 where one is kept. torch.optim's optimizer of the same kind
        loads it. ``fused`` holds what torch has no place for.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        state: dict[int, Any] = {}
        for parameter, (workspace, slot) in self._slots.items():
            exported = export_state(workspace, slot)
            if worth_saving(exported, parameter):
                state[numbers[id(parameter)]] = exported
        groups = [
            {**group, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        saved: dict[str, Any] = {
            "state": dict(sorted(state.items())),
            "param_groups": groups,
            "fused": {"seed": self.seed, "skipped_steps": self.skipped_steps},
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the workspaces, where it lies; ours, or torch.optim's of the same kind.

        What a state lacks gets its value at the start. The source is not kept.

        Raises:
            ValueError: groups differ in number or size.
            OptimizerError: a state's shape differs, or a group asks for what the fused update does not do.
        """
        self._settle()
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        groups = copy.deepcopy(loaded["param_groups"])
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise OptimizerError(
                "the loaded state has other parameter groups: build the optimizer over the same groups"
            )
        own = list(self._parameters())
        names = list(chain.from_iterable(group["params"] for group in groups))
        for group, old in zip(groups, self.param_groups, strict=True):
            group["params"] = old["params"]
            for name, value in old.items():
                group.setdefault(name, value)
            self.setting(group)
        self.param_groups = groups
        if self._lacks_moments():
            self._build()
        fused = loaded.get("fused", {})
        self.seed = int(fused.get("seed", self.seed))
        self._skipped = int(fused.get("skipped_steps", 0))
        clear_states(self._slots)
        states = {
            parameter: loaded["state"][name]
            for name, parameter in zip(names, own, strict=True)
            if name in loaded["state"]
        }
        if any(parameter not in self._slots for parameter in states):
            self._build(keep=states)  # frozen ones among them, which were updated when the state was saved
        import_states(self._slots, {key: state for key, state in states.items() if key in self._slots})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and pickle take along; the copy gets workspaces of its own."""
        settings = ("precision", "max_grad_norm", "skip_nonfinite", "seed", "link")
        return {
            **{name: getattr(self, name) for name in settings},
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "skipped": self.skipped_steps,
            "states": [(parameter, export_state(*self._slots[parameter])) for parameter in self._slots],
        }

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build workspaces for the copied parameters and copy the states in."""
        states, skipped = state.pop("states"), state.pop("skipped")
        self._reset()
        self.state = self._shown
        super().__setstate__(state)
        self._build(keep=[parameter for parameter, _ in states])
        self._skipped = skipped
        import_states(self._slots, {parameter: held for parameter, held in states if parameter in self._slots})

    def _publish(self) -> None:
        """Show the states under the names that torch.optim gives them."""
        shown = {}
        for parameter, (workspace, slot) in self._slots.items():
            entry = {"step": workspace.steps[slot.number]}
            for name, block in workspace.blocks.items():
                if not name.endswith("_scales"):
                    entry[name] = slot.view(block)
            shown[parameter] = entry
        self._shown.show(shown)
        self.state = self._shown
