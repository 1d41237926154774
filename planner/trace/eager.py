"""What eager PyTorch holds during a step: the program runs on fake tensors, and every storage is watched.

Nothing large is computed, but Python's references and autograd's saved tensors are the real ones. A storage is born
when an operator returns it and dies with its last reference, which is where eager allocates and frees. Integers
(tokens, positions, masks) keep their values, as models look at them to choose how they attend. What a kernel allocates
and frees inside one call is invisible here, except for convolutions, whose blocked operands are large.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import TraceError
from planner.trace.capture import _as_fake, _flatten_inputs, _functional, _refusals, _states

#: Channels in a block of oneDNN's layouts on a CPU with 512-bit vectors (16 float32 values).
BLOCK_CHANNELS = 16
#: Up to this many input channels oneDNN reads an image as it lies.
PLAIN_CHANNELS = 3
#: Scratch of oneDNN's strided backward to the image: 36 to 84 KiB were measured, by shape and alignment.
STRIDED_SCRATCH_NBYTES = 14 * 4096
#: Integer tensors of more elements have no values.
MOST_VALUES = 2**24


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that is alive at the peak.

    Attributes:
        operator: the ATen operator that returned it.
        shape, dtype: of the first tensor over it.
        nbytes: size of the storage.
        kind: ``"gradient"`` (of a parameter), ``"saved"`` (made by the forward), ``"transient"`` (made by the backward)
            or ``"workspace"`` (inside the operator that runs).
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str


@dataclass(frozen=True, slots=True)
class EagerMemory:
    """What an eager pass holds above its parameters, buffers and inputs.

    Attributes:
        parameter_elements: of all parameters, tied ones once.
        parameter_nbytes, buffer_nbytes, input_nbytes: each storage once, there before the pass starts.
        trainable_nbytes: parameters that require a gradient.
        trainable_elements, trainable_tensors: how many elements they have, and how many they are.
        largest_parameter_nbytes: the largest of those.
        peak_nbytes: most bytes alive at once.
        peak_phase: ``"forward"`` or ``"backward"``.
        gradient_nbytes: gradients of parameters at the end.
        held: what is alive at the peak, largest first.
    """

    parameter_elements: int
    parameter_nbytes: int
    buffer_nbytes: int
    input_nbytes: int
    trainable_nbytes: int
    trainable_elements: int
    trainable_tensors: int
    largest_parameter_nbytes: int
    peak_nbytes: int
    peak_phase: str
    gradient_nbytes: int
    held: tuple[Held, ...]

    def held_nbytes(self, kind: str) -> int:
        """Bytes of one kind alive at the peak."""
        return sum(item.nbytes for item in self.held if item.kind == kind)


def eager_memory(
    module: Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Any] | None = None,
    mode: str = "joint",
) -> EagerMemory:
    """Run ``module`` forward, and in mode ``"joint"`` backward, on fake tensors and report what is alive when.

    Arguments as `planner.trace.trace`; without ``loss`` the backward starts from gradients of ones.

    Raises:
        TraceError: the program depends on data, or it raises.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    parameters, buffers = _states(module)
    states = {name: _twin(fake, value, name in parameters) for name, value in {**parameters, **buffers}.items()}
    leaves, spec, _ = _flatten_inputs(example_inputs)
    inputs = [_twin(fake, leaf, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    watch = _Watch()
    watch.ignore([*states.values(), *tensors])

    def forward() -> list[torch.Tensor]:
        arguments, keywords = pytree.tree_unflatten(inputs, spec)
        if isinstance(module, torch.nn.Module):
            result = _functional(module, states, tuple(arguments), keywords)
        else:
            result = module(*arguments, **keywords)
        flat = pytree.tree_leaves(result if loss is None else loss(result))
        return [item for item in flat if isinstance(item, torch.Tensor)]

    targets = [item for item in [*states.values(), *tensors] if item.requires_grad]
    gradients: list[torch.Tensor | None] = []
    with fake, _refusals(), watch, torch.set_grad_enabled(mode != "forward"):
        outputs = forward()
        if mode != "forward":
            differentiable = [item for item in outputs if item.requires_grad]
            if not differentiable or not targets:
                raise TraceError("the module", "nothing it returns depends on a parameter", "use mode='forward'")
            incoming = None if loss is not None else [torch.ones_like(item) for item in differentiable]
            watch.phase = "backward"
            gradients = list(torch.autograd.grad(differentiable, targets, incoming, allow_unused=True))
    owned = {id(states[name]) for name in parameters}
    found = [
        gradient
        for target, gradient in zip(targets, gradients, strict=False)
        if gradient is not None and id(target) in owned
    ]
    trainable = [states[name] for name in parameters if states[name].requires_grad]
    return EagerMemory(
        parameter_elements=sum(item.numel() for item in parameters.values()),
        parameter_nbytes=_distinct([states[name] for name in parameters]),
        buffer_nbytes=_distinct([states[name] for name in buffers if name not in parameters]),
        input_nbytes=_distinct(tensors),
        trainable_nbytes=_distinct(trainable),
        trainable_elements=sum(item.numel() for item in trainable),
        trainable_tensors=len(trainable),
        largest_parameter_nbytes=max((item.untyped_storage().nbytes() for item in trainable), default=0),
        peak_nbytes=watch.peak,
        peak_phase=watch.peak_phase,
        gradient_nbytes=_distinct(found),
        held=watch.held_at_peak(found),
    )


def _twin(fake: FakeTensorMode, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """What stands for a tensor: a copy of integers that have values, else a fake."""
    if _is_real(tensor) and tensor.device.type == "cpu" and tensor.numel() <= MOST_VALUES:
        return tensor.detach().clone()
    return _as_fake(fake, tensor, requires_grad)


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of integers or booleans and has values."""
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return whole and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _has_values(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether an operator makes integers from integers that have values, or from numbers alone."""
    if torch.Tag.nondeterministic_seeded in func.tags or not str(func).startswith("aten."):
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
    dtype, device = keywords.get("dtype"), keywords.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
        return False
    if not tensors:
        return _makes_integers(str(func), args, dtype)
    if any(not _is_real(tensor) for tensor in tensors):
        return False
    try:
        shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    except ValueError:  # not an operator that broadcasts
        shape = max((tuple(tensor.shape) for tensor in tensors), key=prod)
    return prod(shape) <= MOST_VALUES


def _makes_integers(operator: str, args: tuple[Any, ...], dtype: torch.dtype | None) -> bool:
    """Whether a creation operator makes a not too large tensor of integers."""
    if operator.startswith("aten.arange."):
        numbers = [item for item in args if not isinstance(item, torch.dtype)]
        whole = all(isinstance(item, int) for item in numbers)
        return (whole or dtype is not None) and all(abs(item) <= MOST_VALUES for item in numbers)
    shape = args[0] if args else ()
    return dtype is not None and isinstance(shape, (list, tuple)) and prod(shape) <= MOST_VALUES


def _distinct(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


@dataclass(slots=True)
class _Record:
    """A storage from its birth to its death, in events."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    phase: str
    birth: int
    death: int | None = None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that operators return, until its last reference goes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.live = 0
        self.peak = 0
        self.peak_phase = "forward"
        self._peak_event = 0
        self._workspace: tuple[str, int] = ("", 0)
        self._event = 0
        self._records: list[_Record] = []
        self._known: dict[int, _Record | None] = {}

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """What is there before the pass starts."""
        self._known.update({tensor.untyped_storage()._cdata: None for tensor in tensors})

    def held_at_peak(self, gradients: Sequence[torch.Tensor]) -> tuple[Held, ...]:
        """The storages alive at the peak, largest first."""
        final = {id(self._known.get(item.untyped_storage()._cdata)) for item in gradients}
        kinds = {"forward": "saved", "backward": "transient"}
        at = self._peak_event
        found = [
            Held(
                record.operator,
                record.shape,
                record.dtype,
                record.nbytes,
                "gradient" if id(record) in final else kinds[record.phase],
            )
            for record in self._records
            if record.birth <= at and (record.death is None or record.death > at)
        ]
        operator, nbytes = self._workspace
        if nbytes:
            found.append(Held(operator, (), "uint8", nbytes, "workspace"))
        return tuple(sorted(found, key=lambda item: -item.nbytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if _has_values(func, args, keywords):
            with unset_fake_temporarily():
                result = func(*args, **keywords)
        else:
            result = func(*args, **keywords)
        during, after = _workspaces(func, args, result)
        if during:
            self._note_peak(str(func), during)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._see(leaf, str(func))
        if after:
            self._note_peak(str(func), after)
        return result

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._event += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = _Record(operator, tuple(tensor.shape), dtype, storage.nbytes(), self.phase, self._event)
        self._known[key] = record
        self._records.append(record)
        self.live += record.nbytes
        self._note_peak("", 0)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _note_peak(self, operator: str, workspace: int) -> None:
        if self.live + workspace > self.peak:
            self.peak, self.peak_phase = self.live + workspace, self.phase
            self._peak_event, self._workspace = self._event, (operator, workspace)

    def _gone(self, key: int) -> None:
        record = self._known.pop(key, None)
        if record is not None:
            self._event += 1
            record.death = self._event
            self.live -= record.nbytes


def _workspaces(func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """Bytes a convolution holds besides: before its results are there, and beside them."""
    name = str(func)
    if name == "aten.convolution.default":
        image, weight = args[0], args[1]
        blocked = _blocked(result, (1,))
        return blocked + _blocked(weight, (0, 1)), blocked
    if name == "aten.convolution_backward.default":
        incoming, image, weight, steps, to_image, to_weight = *args[:3], args[4], args[-1][0], args[-1][1]
        gradient, picture, weights = _blocked(incoming, (1,)), _blocked(image, (1,)), _blocked(weight, (0, 1))
        during = after = 0
        if to_image:
            strided = any(step > 1 for step in steps)
            during = gradient + picture + weights
            after = picture - _plain(weight) if to_weight else picture
            if strided:
                during = _plain(incoming) + _plain(image) + weights + STRIDED_SCRATCH_NBYTES
        if to_weight:
            during = max(during, (_plain(image) if to_image else 0) + gradient + picture + weights)
            after = max(after, weights)
        return during, after
    return 0, 0


def _plain(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(tensor: torch.Tensor, axes: tuple[int, ...]) -> int:
    """Bytes of a tensor in blocks of channels along ``axes``; few input channels stay as they are."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return 0
    sizes = [
        -(-size // BLOCK_CHANNELS) * BLOCK_CHANNELS
        if axis in axes and not (axis == 1 and size <= PLAIN_CHANNELS)
        else size
        for axis, size in enumerate(tensor.shape)
    ]
    return prod(sizes) * tensor.element_size()
