"""Which form of the update a device and dtype get."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels import triton as triton_kernels
from runtime.optimizer import compiled
from runtime.optimizer.aten import AtenBackend
from runtime.optimizer.compiled import CompiledBackend
from runtime.optimizer.precision import KINDS


def backend_for(device: torch.device, dtype: torch.dtype) -> Any:
    """The fastest form there is.

    A backend has ``chunk``, the most elements of a row of the table, and ``host``: whether it hands numbers to the
    host (``overflow``, ``squares``, ``update`` with a number) or leaves them on the device (``scan``, ``update`` with
    a tensor).
    """
    if device.type == "cpu" and dtype in KINDS and compiled.available():
        return CompiledBackend()
    if device.type == "cuda" and dtype in KINDS and triton_kernels.available():
        from runtime.optimizer.triton_backend import TritonBackend

        return TritonBackend()
    return AtenBackend()
