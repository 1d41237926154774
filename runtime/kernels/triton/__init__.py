"""Triton kernels, one operator a file. Importing this package imports no Triton; its modules do.

A kernel reads and writes arena views only. Offsets are 64 bits wide wherever rows, batches or strides enter them. Sums
are formed in float32 whatever the operands are; products and sums are never contracted into one rounding
(``enable_fp_fusion=False``), so a kernel gives the same bits on every launch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    """Whether Triton is installed (``pip install arenaplan[triton]``)."""
    return find_spec("triton") is not None
