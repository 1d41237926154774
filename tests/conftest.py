"""Settings that hold before anything is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Triton reads this when a kernel is defined: kernels run in its interpreter, on the CPU. Tests that compile kernels for
# a target do so in a process of their own (`triton_process.run`), with the interpreter off, as do those on a GPU
# (`TRITON_INTERPRET=0 pytest -m gpu`).
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on one thread of ATen's: sums are then formed in one order, and scratch of threads is counted once."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
