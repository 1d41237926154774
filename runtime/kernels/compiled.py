"""The loops of `row_kernel`, compiled by numba where it is installed; elsewhere the kernels are calls of ATen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from planner.loops import compiled_loop
from runtime.kernels import row_kernel

#: Sums may be reordered into vector lanes and products fused with sums; NaN and infinities stay what they are.
REORDERED = frozenset({"reassoc", "contract", "nsz", "arcp"})


@cache
def compiled(name: str) -> Callable[..., Any] | None:
    """A function of `row_kernel`, compiled at its first call and then kept on disk, or ``None`` without numba."""
    reordered = set(REORDERED) if name.startswith("normalise") else False
    try:
        function: Callable[..., Any] = compiled_loop(nogil=True, fastmath=reordered)(getattr(row_kernel, name))
    except ImportError:
        return None
    return function


def array(tensor: torch.Tensor) -> Any:
    """The same memory as a numpy array."""
    return tensor.detach().numpy()


def compilable(*tensors: torch.Tensor | None) -> bool:
    """Whether numba's loops can work on these tensors: on the CPU, in one dtype of 32 or 64 bits."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        all(tensor.device.type == "cpu" for tensor in given)
        and len({tensor.dtype for tensor in given}) == 1
        and given[0].dtype in (torch.float32, torch.float64)
    )


@cache
def converts_half() -> bool:
    """Whether the processor converts float16 by itself, as all of the last ten years do."""
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith(("x86", "i386", "i686")):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c", False))
