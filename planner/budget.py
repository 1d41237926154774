"""Sizes as people write them."""

from __future__ import annotations

import math
import re

from planner.errors import ShapeError

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(size: str | int) -> int:
    """Bytes of ``"8GiB"``, ``"512 MiB"``, ``"1.5GB"`` or a plain number; raise `ShapeError` for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ShapeError("budget", size, "it must be positive")
        return size
    match = _SIZE.fullmatch(str(size))
    if match is None or match[2].upper() not in _UNITS or not 0 < float(match[1]) < math.inf:
        raise ShapeError("budget", size, "write a positive number of bytes, KiB, MiB or GiB, such as 8GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
