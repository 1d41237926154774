"""Tensors in one poisoned arena with canaries between them, as a plan lays them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Bytes between two tensors, and what they hold. Every tensor starts at a multiple of 256, as in a plan.
CANARY_NBYTES = 256
CANARY = 0xA5
POISON = 0xFF

#: Largest relative error ‖ours − reference‖/‖reference‖ of one operator, by dtype: a few roundings of its result.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
LENGTHS = (1, 3, 43, 65, 441)
DTYPES = (torch.float16, torch.float32, torch.bfloat16)


class Slots:
    """An arena of ``nbytes``; `place` hands out views and remembers what must not change."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.block = torch.full((nbytes,), CANARY, dtype=torch.uint8)
        self._base = -self.block.data_ptr() % 256
        self._next = CANARY_NBYTES
        self._mine = torch.zeros(nbytes, dtype=torch.bool)

    def place(
        self,
        value: torch.Tensor | None = None,
        *,
        shape: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor with this value, or poisoned, dense unless ``strides`` (in elements) say otherwise."""
        if value is not None:
            shape, dtype = tuple(value.shape), dtype or value.dtype
        dtype = dtype or torch.float32
        dense = torch.empty(tuple(shape), device="meta").stride() if strides is None else tuple(strides)
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, dense, strict=True))
        nbytes = extent * dtype.itemsize
        first = self._base + self._next
        if first + nbytes + CANARY_NBYTES > len(self.block):
            raise ValueError("the arena of this test is too small")
        self._next += -(-nbytes // 256) * 256 + CANARY_NBYTES
        flat = self.block[first : first + nbytes].view(dtype)
        view = flat.as_strided(tuple(shape), dense)
        mine = self._mine[first : first + nbytes].view(-1, dtype.itemsize)
        mine.as_strided((*shape, dtype.itemsize), (*(s * dtype.itemsize for s in dense), 1)).fill_(True)
        self.block[first : first + nbytes][self._mine[first : first + nbytes]] = POISON
        if value is not None:
            view.copy_(value)
        return view

    def check(self) -> None:
        """Raise `AssertionError` unless every byte outside the tensors is a canary still."""
        outside = self.block[~self._mine]
        if not bool((outside == CANARY).all()):
            raise AssertionError("a kernel wrote outside its tensors")


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    """Raise `AssertionError` unless the error is within the dtype's tolerance (times ``factor``); NaN never is."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return
    limit = factor * TOLERANCE[actual.dtype]
    difference = (actual.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    if not difference <= limit * max(size, 1e-6):
        raise AssertionError(f"relative error {difference / max(size, 1e-6):.3g}, at most {limit:.3g} expected")
