"""Huge pages: advice that changes no value, and nothing outside the tensor's own memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from runtime import pages
from runtime.arena import Arena

_CPU = torch.device("cpu")
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _huge_nbytes() -> int:
    """Bytes of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("numel", [0, 1, 1000, 5_000_000])
def test_zeros_are_zeros(numel: int, dtype: torch.dtype) -> None:
    made = pages.zeros(numel, dtype, _CPU)
    assert (made.dtype, made.shape) == (dtype, (numel,))
    assert not bool(made.count_nonzero())


def test_values_survive_the_advice() -> None:
    block = torch.arange(3 * pages.HUGE_PAGE, dtype=torch.int32)
    before = block.clone()
    pages.advise_huge_pages(block)
    assert torch.equal(block, before)


def test_only_whole_huge_pages_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def record(first: int, length: int, _: int) -> int:
        asked.append((first, length))
        return 0

    monkeypatch.setattr(pages, "_madvise", lambda: record)
    block = torch.empty(5 * pages.HUGE_PAGE + 77, dtype=torch.uint8)
    assert pages.advise_huge_pages(block)
    ((first, length),) = asked
    assert first % pages.HUGE_PAGE == length % pages.HUGE_PAGE == 0
    assert length >= 4 * pages.HUGE_PAGE
    assert block.data_ptr() <= first < first + length <= block.data_ptr() + block.nbytes
    assert not pages.advise_huge_pages(torch.empty(pages.HUGE_PAGE - 1, dtype=torch.uint8))
    assert not pages.advise_huge_pages(torch.empty(9 * pages.HUGE_PAGE, dtype=torch.uint8, device="meta"))
    assert len(asked) == 1


def test_refused_advice_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *_: -1)
    assert not pages.advise_huge_pages(torch.empty(5 * pages.HUGE_PAGE, dtype=torch.uint8))
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert not pages.advise_huge_pages(torch.empty(5 * pages.HUGE_PAGE, dtype=torch.uint8))


@pytest.mark.skipif(
    sys.platform != "linux" or not _SYSTEM.is_file() or "[never]" in _SYSTEM.read_text(encoding="ascii"),
    reason="the system gives no huge pages",
)
def test_an_arena_lies_in_huge_pages() -> None:
    before = _huge_nbytes()
    arena = Arena(64 * 2**20)
    gained = _huge_nbytes() - before
    if gained == 0:
        pytest.skip("the system had no huge page free")
    assert 0 < gained <= arena.nbytes + pages.HUGE_PAGE
