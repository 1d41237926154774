"""Numbers from the host to a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """An array as a tensor on a device; on the current stream, and the caller may overwrite the array at once."""
    return _staged(values, device).to(device, non_blocking=True, copy=device.type == "cpu")


def send(values: Any, target: torch.Tensor) -> None:
    """Copy an array into a tensor of as many elements, where it lies; as `to_device` otherwise."""
    target.copy_(_staged(values, target.device).view(target.shape), non_blocking=True)


def _staged(values: Any, device: torch.device) -> torch.Tensor:
    """For CUDA in page-locked memory of its own, which PyTorch's host allocator keeps until the copy has read it."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if device.type == "cuda" else host
