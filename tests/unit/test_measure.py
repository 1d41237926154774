"""What the allocator is seen to do."""

from __future__ import annotations

import pytest
import torch

from runtime.measure import allocations, now

MIB = 1 << 20


def test_calls_bytes_and_peak() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second, third = torch.empty(2 * MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
        del third
        return second

    found = allocations(call)
    assert (found.calls, found.nbytes, found.peak_nbytes, found.held_nbytes) == (3, 4 * MIB, 3 * MIB, 2 * MIB)


def test_what_is_freed_of_before_counts_against_the_peak() -> None:
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        kept.clear()
        return torch.empty(2 * MIB, dtype=torch.uint8)

    found = allocations(call, before=lambda: kept.append(torch.empty(3 * MIB, dtype=torch.uint8)))
    assert (found.calls, found.nbytes, found.peak_nbytes, found.held_nbytes) == (1, 2 * MIB, 0, -MIB)


def test_before_itself_is_not_counted() -> None:
    found = allocations(lambda: None, before=lambda: torch.empty(MIB))
    assert (found.calls, found.peak_nbytes, found.held_nbytes) == (0, 0, 0)


def test_the_clock_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    first, second = now("cpu"), now("cuda")
    assert second >= first
    assert waited == ["cuda"]
