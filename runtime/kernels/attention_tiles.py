"""What one tile of an attention is computed with: a lane's scratch, and the parts of the operands it works on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from planner.flash import Tiling
from runtime.kernels.compiled import array


class Lane:
    """The scratch of one lane; views of it are made once for each shape of a tile."""

    def __init__(self, flat: torch.Tensor, tiles: Tiling) -> None:
        self._flat = flat
        self._places = tiles.offsets()
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._arrays: dict[tuple[str, tuple[int, ...]], Any] = {}
        (size,) = self._places["words"][1]
        words = self.view("words", size).view(torch.int32)[:size]
        self.words = array(words).view(np.uint32)

    def view(self, name: str, *shape: int) -> torch.Tensor:
        """A dense tensor at the start of a piece."""
        key = (name, shape)
        found = self._views.get(key)
        if found is None:
            start = self._places[name][0]
            found = self._views[key] = self._flat[start : start + math.prod(shape)].view(shape)
        return found

    def has(self, name: str) -> bool:
        """Whether the scratch has such a piece."""
        return name in self._places

    def array(self, name: str, *shape: int) -> Any:
        """The same as a numpy array."""
        key = (name, shape)
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = array(self.view(name, *shape))
        return found

    def widened(self, name: str, source: torch.Tensor, *, as_it_lies: bool) -> torch.Tensor:
        """The source itself, or a dense copy of it in the accumulation dtype."""
        return source if as_it_lies else self.view(name, *source.shape).copy_(source)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which weights are dropped: those whose random word is below ``threshold``; the others are scaled.

    Attributes:
        threshold: p · 2³¹, 0 if nothing is dropped.
        factor: 1 / (1 − p).
        seed: one int64, drawn anew for every forward.
    """

    threshold: int
    factor: float
    seed: torch.Tensor | None

    @staticmethod
    def of(probability: float, seed: torch.Tensor | None) -> Dropout:
        """Dropout of a probability at least 0 and below 1."""
        if seed is None or probability <= 0:
            return Dropout(0, 1.0, None)
        return Dropout(min(round(probability * 2**31), 2**31 - 1), 1 / (1 - probability), seed)

    def halves(self) -> tuple[int, int]:
        """The seed's low and high 32 bits."""
        if self.seed is None:
            return 0, 0
        value = int(self.seed.view(-1)[0].item()) & (2**64 - 1)
        return value & 0xFFFFFFFF, value >> 32


def add_product(
    lane: Lane, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, *, masked: bool, alpha: float = 1.0
) -> None:
    """``total += alpha · weights · values``, where a weight of zero contributes nothing even to NaN or infinity.

    ``masked`` says that weights of zero may come from a mask.
    """
    if masked:
        torch.sum(values, -1, out=lane.view("sums", *values.shape[:2]))
        (one,) = lane.view("sum", 1)
        torch.sum(lane.view("sums", *values.shape[:2]), (0, 1), out=one)
        if not math.isfinite(one.item()):
            from runtime.kernels import attention_loops

            clean = lane.view("clean", *values.shape)
            attention_loops.take_nonfinite(array(total), array(weights), array(values), array(clean), alpha)
            values = clean
    torch.baddbmm(total, weights, values, alpha=alpha, out=total)
