"""From parameter groups to slots: which parameters get a place, which share one, which cannot have one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from runtime.errors import OptimizerError
from runtime.optimizer.layout import Segment
from runtime.optimizer.precision import KINDS
from runtime.optimizer.workspace import Slot

_NOWHERE = Segment(0, 0, 0)


def slots_of(groups: Sequence[dict[str, Any]]) -> tuple[list[list[Slot]], list[torch.Tensor]]:
    """Slots by device and dtype, and the parameters that are frozen.

    Parameters over exactly the same memory (tied weights that are several objects) share a slot: one gradient, their
    sum, and one update.

    Raises:
        OptimizerError: a parameter's dtype has no update, or two parameters share a part of their memory.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    taken: dict[tuple[Any, ...], Slot] = {}
    frozen: list[torch.Tensor] = []
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            if not parameter.requires_grad and parameter.grad is None:
                frozen.append(parameter)
                continue
            name = names[place] if names else f"parameter {place} of group {number}, shape {tuple(parameter.shape)},"
            if parameter.dtype not in KINDS and parameter.dtype is not torch.float64:
                raise OptimizerError(
                    f"{name} has dtype {parameter.dtype}: the fused update takes float16, bfloat16, float32 and "
                    "float64; give it an optimizer of its own"
                )
            strides = dense_strides(parameter)
            key = (parameter.device, parameter.dtype, parameter.data_ptr(), parameter.shape, parameter.stride())
            if parameter.numel() and key in taken:
                taken[key].parameters.append(parameter)
                continue
            slot = Slot([parameter], str(name), number, _NOWHERE, strides)
            taken[key] = slot
            kinds.setdefault((parameter.device, parameter.dtype), []).append(slot)
    slots = list(kinds.values())
    for alike in slots:
        _refuse_overlaps(alike)
        for number, slot in enumerate(alike):
            slot.number = number
    return slots, frozen


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if its elements fill their memory, else the nearest that do."""
    if parameter.numel() == 0 or parameter.is_contiguous():
        return tuple(parameter.stride())
    return tuple(torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride())


def _refuse_overlaps(slots: Sequence[Slot]) -> None:
    """Parameters that share a part of their memory cannot both become views of a workspace."""
    spans = sorted(
        (
            (slot.parameter.data_ptr(), slot.parameter.data_ptr() + extent_nbytes(slot.parameter), slot)
            for slot in slots
            if slot.parameter.numel()
        ),
        key=lambda span: span[:2],
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise OptimizerError(
                f"{first.name} and {second.name} share a part of their memory: make them one Parameter, or clone one"
            )


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to past its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
