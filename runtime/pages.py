"""Memory in pages of 2 MiB, where the operating system has them: fewer misses of the processor's address cache."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

#: Linux's advice to back memory with huge pages (madvise(2)), and their size on x86-64 and arm64.
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
HUGE_PAGE = 2**21


@cache
def _madvise() -> Any:
    """The C library's function; ``None`` where there is no such advice."""
    if ADVICE is None or not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def advise_huge_pages(block: torch.Tensor) -> bool:
    """Ask for huge pages under a tensor on a CPU that nothing was written to yet; whether the system took the advice.

    The whole huge pages within its storage are meant, so what lies beside it is left alone. Advice only: the values
    do not change, and where it is refused nothing else does.
    """
    function = _madvise()
    if function is None or block.device.type != "cpu":
        return False
    storage = block.untyped_storage()
    first = -(-storage.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (storage.data_ptr() + storage.nbytes()) // HUGE_PAGE * HUGE_PAGE - first
    return length > 0 and function(first, length, ADVICE) == 0


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, on a CPU in huge pages where they can be had."""
    block = torch.empty(numel, dtype=dtype, device=device)
    advise_huge_pages(block)
    return block.zero_()
