"""The largest batch, or the longest sequence, that fits a device."""

from __future__ import annotations

from collections.abc import Callable

from planner.budget import parse_nbytes
from planner.errors import ShapeError
from planner.estimate.architecture import LARGEST
from planner.estimate.terms import Estimate


def memory_nbytes(size: str | int) -> int:
    """Bytes of ``"80GiB"`` and the like; raise `ShapeError` naming the device's memory."""
    try:
        return parse_nbytes(size)
    except ShapeError:
        shown = str(size)[:40]
        raise ShapeError(
            "device_memory", shown, "write a positive number of bytes, KiB, MiB, GiB or GB, such as 80GiB"
        ) from None


def largest(estimate: Callable[[int], Estimate], memory: str | int, *, most: int = 2**24) -> int:
    """The largest number for which an estimate fits, 0 if not even 1 does.

    Args:
        estimate: of a batch (or a length); its total does not fall as the number grows.
        memory: of the device, bytes or ``"80GiB"``.
        most: no larger number is tried (a model's longest sequence, say).
    """
    capacity = memory_nbytes(memory)
    low, high = 0, min(most, LARGEST)

    def fits(number: int) -> bool:
        return estimate(number).total_nbytes <= capacity

    step = 1
    while step <= high and fits(step):
        low, step = step, 2 * step
    high = min(high, step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
