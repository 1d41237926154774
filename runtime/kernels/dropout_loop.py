"""The compiled loop of `dropout`: which elements of some rows are dropped."""

from __future__ import annotations

from typing import Any

from planner.loops import compiled_loop
from runtime.kernels.attention_loops import random_words


@compiled_loop(nogil=True)
def drop_rows(flags: Any, words: Any, low: Any, high: Any, first: int, least: int) -> None:
    """``flags[i, j] = 1`` where the word of row ``first + i`` and column ``j`` is below ``least``."""
    rows, width = flags.shape
    groups = (width + 3) // 4
    for i in range(rows):
        random_words(words, low, high, (first + i) * groups, groups)
        for j in range(width):
            flags[i, j] = words[j] < least
