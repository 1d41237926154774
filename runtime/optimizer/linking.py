"""From parameter groups to slots: which parameters get a place, which share one, which cannot have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from runtime.errors import OptimizerError
from runtime.optimizer.layout import Segment
from runtime.optimizer.precision import KINDS
from runtime.optimizer.workspace import Slot

_NOWHERE = Segment(0, 0, 0)
#: Elements up to which two parameters with interleaved memory are compared one by one; larger ones are refused.
_MOST_COMPARED = 2**24


def slots_of(
    groups: Sequence[dict[str, Any]], keep: AbstractSet[int] = frozenset()
) -> tuple[list[list[Slot]], list[torch.Tensor]]:
    """Slots by device and dtype, and the parameters that are left out: frozen ones, and lazy ones without a shape yet.

    Parameters over exactly the same memory (tied weights that are several objects) share a slot: one gradient, their
    sum, and one update; frozen ones among them move along.

    Args:
        groups: of parameters.
        keep: ids of parameters that get a slot even if they are frozen.

    Raises:
        OptimizerError: a parameter's dtype has no update, it has no memory, or two share a part of their memory.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    taken: dict[tuple[Any, ...], Slot] = {}
    frozen: list[torch.Tensor] = []
    lazy: list[torch.Tensor] = []
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            if is_lazy(parameter):
                lazy.append(parameter)
                continue
            if not parameter.requires_grad and parameter.grad is None and id(parameter) not in keep:
                frozen.append(parameter)
                continue
            name = names[place] if names else f"parameter {place} of group {number}, shape {tuple(parameter.shape)},"
            if parameter.dtype not in KINDS and parameter.dtype is not torch.float64:
                raise OptimizerError(
                    f"{name} has dtype {parameter.dtype}: the fused update takes float16, bfloat16, float32 and "
                    "float64; give it an optimizer of its own"
                )
            if parameter.device.type == "meta":
                raise OptimizerError(
                    f"{name} has no memory (device meta): move the model to a device with to_empty, then build the "
                    "optimizer"
                )
            strides = dense_strides(parameter)
            key = _memory(parameter)
            if parameter.numel() and key in taken:
                taken[key].parameters.append(parameter)
                continue
            slot = Slot([parameter], str(name), number, _NOWHERE, strides)
            taken[key] = slot
            kinds.setdefault((parameter.device, parameter.dtype), []).append(slot)
    left_out = list(lazy)
    for parameter in frozen:
        tied = taken.get(_memory(parameter)) if parameter.numel() else None
        left_out.append(parameter) if tied is None else tied.parameters.append(parameter)
    slots = list(kinds.values())
    _refuse_overlaps([slot for alike in slots for slot in alike], [p for p in left_out if not is_lazy(p)])
    for alike in slots:
        for number, slot in enumerate(alike):
            slot.number = number
    return slots, left_out


def regrouped(groups: Sequence[dict[str, Any]], known: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether the groups hold other parameters than those listed, or hold them elsewhere."""
    if [len(group["params"]) for group in groups] != [len(parameters) for parameters in known]:
        return True
    given = chain.from_iterable(group["params"] for group in groups)
    return not all(map(is_, given, chain.from_iterable(known)))


def refuse_reshaped(slots: Iterable[Slot]) -> None:
    """A parameter whose ``data`` was replaced by one of another shape has no states any more."""
    for slot in slots:
        if tuple(slot.parameter.shape) != slot.shape:
            raise OptimizerError(
                f"{slot.name} has shape {tuple(slot.parameter.shape)}, its states {slot.shape}: "
                "put a new Parameter into the group instead"
            )


def narrowed(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> dict[torch.Tensor, torch.Tensor]:
    """Give FP32 parameters this dtype, drop their gradients, and return their values; tied ones stay tied."""
    exact = {parameter: parameter.detach().clone() for parameter in parameters if parameter.dtype is torch.float32}
    made: dict[Any, torch.Tensor] = {}
    for parameter, value in exact.items():
        place = (parameter.data_ptr(), parameter.shape, parameter.stride())
        parameter.grad = None
        parameter.data = made.setdefault(place if parameter.numel() else id(parameter), value.to(dtype))
    return exact


def is_lazy(parameter: torch.Tensor) -> bool:
    """Whether a lazy module has yet to give the parameter its shape."""
    lazy: bool = torch.nn.parameter.is_lazy(parameter)
    return lazy


def _memory(parameter: torch.Tensor) -> tuple[Any, ...]:
    return (parameter.device, parameter.dtype, parameter.data_ptr(), parameter.shape, parameter.stride())


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if its elements fill their memory, else the nearest that do."""
    if parameter.numel() == 0 or parameter.is_contiguous():
        return tuple(parameter.stride())
    return tuple(torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride())


def _refuse_overlaps(slots: Sequence[Slot], others: Sequence[torch.Tensor]) -> None:
    """Parameters that share a part of their memory cannot both become views of a workspace, nor one of them alone."""
    named = [(slot.parameter, slot.name, True) for slot in slots]
    named += [(other, f"a frozen parameter, shape {tuple(other.shape)},", False) for other in others]
    spans = sorted(
        (
            (parameter.data_ptr(), parameter.data_ptr() + extent_nbytes(parameter), parameter, name, moved)
            for parameter, name, moved in named
            if parameter.numel() and parameter.device.type != "meta"
        ),
        key=lambda span: span[:2],
    )
    open_spans: list[tuple[int, int, torch.Tensor, str, bool]] = []
    for span in spans:
        open_spans = [before for before in open_spans if before[1] > span[0] and before[2].device == span[2].device]
        for before in open_spans:
            if (before[4] or span[4]) and _share_elements(before[2], span[2]):
                raise OptimizerError(
                    f"{before[3]} and {span[3]} share a part of their memory: make them one Parameter, or clone one"
                )
        open_spans.append(span)


def _share_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors whose extents overlap have a byte in common; columns of one matrix do not."""
    if one.is_contiguous() or two.is_contiguous() or max(one.numel(), two.numel()) > _MOST_COMPARED:
        return True
    return bool(np.intersect1d(_bytes_of(one), _bytes_of(two)).size)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The address of every byte."""
    found = np.arange(tensor.element_size(), dtype=np.int64) + tensor.data_ptr()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = np.unique(found[:, None] + np.arange(size, dtype=np.int64) * (stride * tensor.element_size()))
    return found


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to past its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
