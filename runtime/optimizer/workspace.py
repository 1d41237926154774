"""Parameters, gradients and states of one dtype in contiguous memory: the parameters become views of it ("links").

A linked parameter is the same object, with its shape and strides, over other memory; no step copies anything. Each view
is a storage of its own over the shared memory, so that saving a parameter saves its own bytes and nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from runtime.errors import OptimizerError, SparseGradientError
from runtime.optimizer import codes, convert
from runtime.optimizer.layout import Segment, chunk_table, lay_out
from runtime.optimizer.precision import Precision
from runtime.pages import zeros


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """One parameter's place.

    Attributes:
        parameters: the parameter; several where tied parameters are several objects over the same memory.
        name: for messages.
        group: number of its parameter group.
        segment: its elements in the workspace.
        shape: of the parameter, when the workspace was laid out.
        strides: of the parameter, and of every view here.
        gradient: the view of the workspace of gradients, ``None`` where gradients stay where they are.
        seen: the gradient that was checked last, not kept alive.
        number: its place in the list of slots.
    """

    parameters: list[torch.Tensor]
    name: str
    group: int
    segment: Segment
    strides: tuple[int, ...]
    gradient: torch.Tensor | None = None
    seen: weakref.ref[torch.Tensor] | None = None
    number: int = -1
    shape: tuple[int, ...] = ()
    hooks: list[Any] = field(default_factory=list)

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter, the first of those tied."""
        return self.parameters[0]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of a flat tensor, in its shape and strides."""
        return flat.as_strided(self.parameter.shape, self.strides, flat.storage_offset() + self.segment.offset)

    def share(self, parameter: torch.Tensor) -> None:
        """Before a tied parameter's gradient is accumulated: give all of them the same one, their sum, to add it to."""
        given = [other.grad for other in self.parameters if other.grad is not None]
        apart = list({id(gradient): gradient for gradient in given}.values())
        if apart:
            self._give(parameter, apart[0] if len(apart) == 1 else sum(apart[1:], apart[0]))

    def attach(self, parameter: torch.Tensor) -> None:
        """Move a gradient that was just accumulated into the workspace; tied parameters get the same one."""
        given, home = parameter.grad, self.gradient
        if given is None or home is None or given is home or given.is_sparse:
            return
        # That of a backward with create_graph=True may be differentiated itself, and is read where it lies.
        self._give(parameter, given if given.requires_grad else home.copy_(given))

    def _give(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """To the parameter, and to those tied to it that have one."""
        for other in self.parameters:
            if other is parameter or other.grad is not None:
                other.grad = gradient


class Workspace:
    """The parameters of one device and dtype, their gradients and states.

    Attributes:
        parameters, gradients: flat; ``None`` where parameters and gradients stay where they are.
        blocks: flat states by name: moments, their scales, masters or remainders.
        steps: FP32 count of each parameter's updates.
        backend: which form of the update runs here: `backends.backend_for`.
        table: what the last `collect` found to update.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        precision: Precision,
        moments: Sequence[tuple[str, bool]],
        *,
        link: bool,
        alignment: int,
        backend: Any,
        blocks: dict[str, torch.Tensor] | None = None,
        steps: torch.Tensor | None = None,
    ) -> None:
        sample = slots[0].parameter
        self.device, self.dtype = sample.device, sample.dtype
        self.slots = list(slots)
        self.master = precision.master_of(self.dtype)
        self.states = precision.states_of(self.dtype)
        self.moments = tuple(moments)
        self.backend = backend
        self.parameters: torch.Tensor | None = None
        self.gradients: torch.Tensor | None = None
        segments = lay_out([slot.parameter.numel() for slot in slots], alignment)
        for slot, segment in zip(self.slots, segments, strict=True):
            slot.segment = segment
            slot.shape = tuple(slot.parameter.shape)
            if not link and slot.parameter.numel() and slot.parameter.stride() != slot.strides:
                raise OptimizerError(
                    f"{slot.name} has gaps in its memory, strides {slot.parameter.stride()}: with link=False it is "
                    "updated where it lies, so make it contiguous first"
                )
        self.length = segments[-1].offset + segments[-1].room
        if steps is None:
            steps = torch.zeros(len(slots), dtype=torch.float32, device=self.device)
        self.steps = steps
        self.blocks = self._blocks() if blocks is None else blocks
        self._classes: Any = np.zeros(len(slots), dtype=np.int64)
        self._addresses: tuple[list[int], list[int]] | None = None
        self._groups = [slot.group for slot in slots]
        self._tensors = [slot.parameter for slot in slots]
        self.table: Any = np.zeros((0, codes.COLUMNS), dtype=np.int64)
        self.active: Any = np.zeros(len(slots), dtype=bool)
        if link:
            self._link()

    def _blocks(self) -> dict[str, torch.Tensor]:
        blocks = {}
        for name, signed in self.moments:
            if self.states == codes.FULL:
                kind = torch.float64 if self.dtype is torch.float64 else torch.float32
                blocks[name] = zeros(self.length, kind, self.device)
            else:
                kind = torch.int8 if signed else torch.uint8
                blocks[name] = zeros(self.length, kind, self.device)
                blocks[f"{name}_scales"] = zeros(self.length // codes.TILE, torch.float32, self.device)
        if self.master == codes.MASTER:
            blocks["master"] = zeros(self.length, torch.float32, self.device)
            for slot in self.slots:
                slot.view(blocks["master"]).copy_(slot.parameter.detach())
        elif self.master == codes.SPLIT:
            blocks["remainder"] = zeros(self.length, torch.int16, self.device)
        return blocks

    def _link(self) -> None:
        """Move parameters, and gradients that there are, into workspaces."""
        self.parameters = zeros(self.length, self.dtype, self.device)
        self.gradients = zeros(self.length, self.dtype, self.device)
        for slot in self.slots:
            if slot.segment.length == 0:
                continue
            view = slot.view(self.parameters)
            view.copy_(slot.parameter.detach())
            slot.gradient = own_storage(slot.view(self.gradients))
            grads = [parameter.grad for parameter in slot.parameters if parameter.grad is not None]
            dense = [grad for grad in grads if not grad.is_sparse]
            for number, grad in enumerate(dense):
                slot.gradient.add_(grad) if number else slot.gradient.copy_(grad)
            home = own_storage(view)
            for parameter in slot.parameters:
                parameter.data = home
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = slot.gradient
                if parameter.requires_grad:
                    slot.hooks.append(_register(parameter, _attaching(slot)))
                    if len(slot.parameters) > 1:
                        register: Any = parameter.register_hook
                        slot.hooks.append(register(_sharing(slot, parameter)))

    def unlink(self) -> None:
        """Leave the parameters as they are and take no more part in their backward passes."""
        for slot in self.slots:
            for hook in slot.hooks:
                hook.remove()
            slot.hooks.clear()

    def fits(self) -> bool:
        """Whether every parameter still has the dtype, device and layout it was linked with."""
        return all(
            parameter.dtype is self.dtype
            and parameter.device == self.device
            and parameter.stride() == slot.strides
            and parameter.numel() == slot.segment.length
            for slot in self.slots
            for parameter in slot.parameters
        )

    def collect(self, *, last: bool = False) -> bool:
        """Find which parameters have gradients, and where both lie now; false if a parameter changed its kind.

        Raises:
            SparseGradientError, OptimizerError: a gradient that cannot be read; ``last``: so is a parameter.
        """
        where: list[int] = []
        gradients: list[int] = []
        known = True
        for slot, parameter in zip(self.slots, self._tensors, strict=True):
            given = parameter.grad
            if given is None and len(slot.parameters) > 1:
                given = self._tied_gradient(slot)
            if given is None:
                gradients.append(0)
            elif slot.seen is None or given is not slot.seen():
                known = False
                gradients.append(-1)
            else:
                gradients.append(given.data_ptr() or -1)
            where.append(parameter.data_ptr())
        if self._addresses is None or self._addresses[0] != where:
            if not self.fits():
                if last:
                    raise OptimizerError("a parameter has gaps in its memory after it was replaced: make it contiguous")
                return False
        elif known and self._addresses[1] == gradients:
            return True
        # Elsewhere than at the last step: its ``data`` may have been replaced, by one of other strides.
        for number, slot in enumerate(self.slots):
            given = self._tied_gradient(slot)
            if given is not None:
                gradients[number] = self._checked(slot, given).data_ptr() or -1
        if self._addresses == (where, gradients):
            return True
        self._addresses = (where, gradients)
        home = None
        if self.parameters is not None and self.gradients is not None:
            home = (self.parameters.data_ptr(), self.gradients.data_ptr())
        self.table = chunk_table(
            [slot.segment for slot in self.slots],
            where,
            gradients,
            self._groups,
            self._classes,
            home,
            self.dtype.itemsize,
            self.backend.chunk,
        )
        self.active = np.array(gradients, dtype=np.int64) != 0
        return True

    def _gradients(self) -> torch.Tensor:
        if self.gradients is None:
            raise OptimizerError("the gradients of these parameters lie in no workspace")
        return self.gradients

    def _is_home(self, slot: Slot) -> bool:
        """Whether the slot's gradient is the view of the workspace that it was made as."""
        view = slot.gradient
        if view is None or self.gradients is None:
            return False
        here = self.gradients.data_ptr() + self.gradients.element_size() * slot.segment.offset
        return view.data_ptr() == here and view.stride() == slot.strides and view.dtype is self.dtype

    def clear_gradients(self) -> set[int]:
        """Set the workspace of gradients to zero; ids of the gradients that lie there."""
        if self.gradients is None:
            return set()
        self.gradients.zero_()
        return {id(slot.gradient) for slot in self.slots if self._is_home(slot)}

    def _tied_gradient(self, slot: Slot) -> torch.Tensor | None:
        return next((other.grad for other in slot.parameters if other.grad is not None), None)

    def _checked(self, slot: Slot, given: torch.Tensor) -> torch.Tensor:
        """A gradient that can be read where it lies, else its copy in the workspace."""
        if given.is_sparse:
            raise SparseGradientError(slot.name)
        if tuple(given.shape) != slot.shape:
            raise OptimizerError(
                f"the gradient of {slot.name} has shape {tuple(given.shape)}, the parameter {slot.shape}"
            )
        if slot.gradient is not None and not self._is_home(slot):
            slot.gradient = own_storage(slot.view(self._gradients()))  # its ``data`` was replaced
        home = slot.gradient
        others = [other for other in slot.parameters if other.grad is not None and other.grad is not given]
        plain = given.dtype is self.dtype and not given.is_neg() and not given._is_zerotensor()
        if given is not home and (others or given.stride() != slot.strides or not plain):
            target = (
                home
                if home is not None
                else torch.empty_strided(given.shape, slot.strides, dtype=self.dtype, device=given.device)
            )
            total = given
            for other in others:
                if other.grad is not home and other.grad is not None:
                    total = total + other.grad
            target.copy_(total)
            for parameter in slot.parameters:
                if parameter.grad is not None:
                    parameter.grad = target
            given = target
        slot.seen = weakref.ref(given)
        return given

    def advance(self, found: torch.Tensor | bool) -> None:
        """Count the step for the parameters that took part, unless an overflow was found."""
        if self.device.type == "cpu":
            if not found:
                self.steps.numpy()[self.active] += 1.0
        else:
            done: Any = 1.0 - found if isinstance(found, torch.Tensor) else float(not found)
            if self.active.all():
                self.steps.add_(done)
            else:
                taken = torch.from_numpy(self.active.astype(np.float32)).to(self.device, non_blocking=True)
                self.steps.add_(taken * done)
        if not self.active.all():
            pairs = self._classes * 2 + self.active
            refined = np.unique(pairs, return_inverse=True)[1].reshape(-1)
            if refined.max() != self._classes.max():
                self._addresses = None
            self._classes = refined

    def classify(self) -> None:
        """Find out anew which parameters have taken the same steps, after they were loaded."""
        self._classes = np.unique(self.steps.cpu().numpy(), return_inverse=True)[1].reshape(-1)
        self._addresses = None

    def separate(self) -> None:
        """Let no row of the table span two parameters, whatever steps they have taken."""
        self._classes = np.arange(len(self.slots))
        self._addresses = None

    def moment(self, slot: Slot, name: str, signed: bool) -> torch.Tensor:
        """A copy of a parameter's moment, decoded, in its shape."""
        flat = self._part(self.blocks[name], slot)
        if self.states == codes.BYTES:
            first = slot.segment.offset // codes.TILE
            scales = self.blocks[f"{name}_scales"][first : first + slot.segment.room // codes.TILE]
            flat = convert.decode(flat, scales, signed)
        else:
            flat = flat.clone()
        return flat.as_strided(slot.parameter.shape, slot.strides)

    def set_moment(self, slot: Slot, name: str, signed: bool, value: torch.Tensor) -> None:
        """Copy a moment in, encoding it.

        Raises:
            OptimizerError: its shape is not the parameter's.
        """
        if value.shape != slot.parameter.shape:
            raise OptimizerError(
                f"{name} of {slot.name} has shape {tuple(value.shape)}, the parameter {tuple(slot.parameter.shape)}: "
                "load the state of the same model"
            )
        if self.states == codes.FULL:
            slot.view(self.blocks[name]).copy_(value)
            return
        strided = torch.empty_strided(slot.parameter.shape, slot.strides, dtype=torch.float32, device=self.device)
        strided.copy_(value)
        code, scales = convert.encode(strided.as_strided((slot.segment.length,), (1,)), signed)
        self._part(self.blocks[name], slot).copy_(code)
        first = slot.segment.offset // codes.TILE
        self.blocks[f"{name}_scales"][first : first + scales.numel()].copy_(scales)

    def full_precision(self, slot: Slot) -> torch.Tensor:
        """A copy of a parameter in FP32 (FP64), as exactly as it is kept."""
        parameter = slot.parameter.detach()
        if parameter.dtype is not self.dtype:
            return parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        if self.master == codes.MASTER:
            master = slot.view(self.blocks["master"])
            return torch.where(master.to(self.dtype) == parameter, master, parameter.float())
        if self.master == codes.SPLIT:
            return convert.joined(parameter, slot.view(self.blocks["remainder"]))
        return parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)

    def set_full_precision(self, slot: Slot, value: torch.Tensor) -> None:
        """Write a parameter from an FP32 value, and what is kept beyond it."""
        parameter = slot.parameter.detach()
        if value.shape != parameter.shape:
            raise OptimizerError(
                f"master of {slot.name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            )
        wanted = value.detach().to(device=self.device)
        if self.master == codes.MASTER:
            exact = convert.to_grid(wanted.float(), self.dtype)
            slot.view(self.blocks["master"]).copy_(exact)
            parameter.copy_(exact)
        elif self.master == codes.SPLIT:
            top, rest = convert.split(wanted.float(), self.dtype)
            parameter.copy_(top)
            slot.view(self.blocks["remainder"]).copy_(rest)
        else:
            parameter.copy_(wanted)

    def _part(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        return flat[slot.segment.offset : slot.segment.offset + slot.segment.length]


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is the view's own; it keeps the memory it lies in alive."""
    flat = view.as_strided((view.numel(),), (1,), view.storage_offset())
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(flat)
    return own.as_strided(view.shape, view.stride())


def _attaching(slot: Slot) -> Any:
    """A hook that holds the slot weakly: the parameter outlives the optimizer."""
    held = weakref.ref(slot)

    def attach(parameter: torch.Tensor) -> None:
        linked = held()
        if linked is not None:
            linked.attach(parameter)

    return attach


def _sharing(slot: Slot, parameter: torch.Tensor) -> Any:
    """The same for the hook that comes before, which is not told the parameter."""
    held, owner = weakref.ref(slot), weakref.ref(parameter)

    def share(_gradient: torch.Tensor) -> None:
        linked, tensor = held(), owner()
        if linked is not None and tensor is not None:
            linked.share(tensor)

    return share


def _register(parameter: torch.Tensor, hook: Any) -> Any:
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(hook)
