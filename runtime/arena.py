"""One allocation, and typed, strided views into it."""

from __future__ import annotations

import torch

from planner.graph import Tensor
from runtime.errors import ArenaError, ArenaMemoryError
from runtime.pages import advise_huge_pages

#: Fills poisoned memory: NaN in every floating dtype, -1 in signed integers.
POISON = 0xFF


class Arena:
    """``nbytes`` bytes on ``device``, aligned to ``alignment``; everything a plan runs on is a view of it."""

    def __init__(self, nbytes: int, alignment: int = 256, device: str | torch.device = "cpu") -> None:
        self.nbytes = nbytes
        self.device = torch.device(device)
        try:
            block = torch.empty(nbytes + alignment, dtype=torch.uint8, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ArenaMemoryError(f"cannot allocate an arena of {nbytes} bytes on {self.device}: {error}") from error
        advise_huge_pages(block)
        self._base = -block.data_ptr() % alignment
        self._storage = block.untyped_storage()
        self.bytes = block[self._base : self._base + nbytes]
        # Touched once here, so that no step pays for the operating system's first mapping of a page.
        self.bytes.zero_()

    def view(self, tensor: Tensor, offset: int) -> torch.Tensor:
        """The plan's ``tensor``, its storage lying ``offset`` bytes into the arena."""
        dtype = getattr(torch, tensor.dtype)
        first = self._base + offset + tensor.offset
        if offset < 0 or offset + tensor.end > self.nbytes or first % tensor.itemsize:
            raise ArenaError(f"tensor {tensor.name} does not lie within the arena of {self.nbytes} bytes")
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._storage, first // tensor.itemsize, tensor.shape, tensor.strides)

    def poison(self) -> None:
        """Overwrite every byte, so that reading what was never written shows."""
        self.bytes.fill_(POISON)
