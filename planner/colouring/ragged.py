"""First fit in the given order for large components with ragged groups, block by block rather than as boxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from planner.colouring.instance import FREE, Instance

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.int64]]

LOOK_EVERY = 256
"""Items placed between two looks at the clock."""


def ragged_first_fit(instance: Instance, deadline: float, tick: Callable[[], None]) -> list[int] | None:
    """Return what ``first_fit`` returns for the items in order, or ``None`` if the deadline (monotonic) came first.

    Each item meets all that is placed at once, as arrays: a square of the items, but a small share of a microsecond
    for each pair. Totals must fit in 64 bits.
    """
    import numpy as np

    pinned = [item for item, pin in enumerate(instance.pin) if pin != FREE]
    free = [item for item, pin in enumerate(instance.pin) if pin == FREE]
    count = sum(map(len, instance.blocks))
    low, high, start, end = (np.zeros(count, dtype=np.int64) for _ in range(4))
    offsets = list(instance.pin)
    placed = 0
    for position, item in enumerate(pinned + free):
        if not position % LOOK_EVERY:
            tick()
            if time.monotonic() > deadline:
                return None
        if offsets[item] == FREE:
            taken = (low[:placed], high[:placed], start[:placed], end[:placed])
            offsets[item] = _lowest(instance, item, taken)
        for block in instance.blocks[item]:
            low[placed] = offsets[item] + block.rise
            high[placed] = low[placed] + block.size
            start[placed], end[placed] = block.start, block.end
            placed += 1
    return offsets


def _lowest(instance: Instance, item: int, taken: tuple[Array, Array, Array, Array]) -> int:
    """Return the lowest aligned offset at which every block of an item fits."""
    import numpy as np

    low, high, start, end = taken
    below, above = [], []
    for block in instance.blocks[item]:  # offsets strictly between a `below` and its `above` collide
        together = np.flatnonzero((start < block.end) & (end > block.start))
        below.append(low[together] - (block.rise + block.size))
        above.append(high[together] - block.rise)
    if not below:
        return 0
    lows = np.concatenate(below)
    order = np.argsort(lows, kind="stable")
    lows = lows[order]
    # Past the first i of them, in order, the item can lie no lower than the highest end among these.
    tops = np.maximum.accumulate(np.concatenate((np.zeros(1, dtype=np.int64), np.concatenate(above)[order])))
    tops += -tops % instance.alignment[item]
    fits = np.flatnonzero(tops[:-1] <= lows)
    return int(tops[fits[0]] if len(fits) else tops[-1])
