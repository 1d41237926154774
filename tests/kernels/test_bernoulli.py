"""Dropout masks drawn by our own loop: ATen's draws, and its generator left where ATen leaves it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph import Operation, TensorRef
from runtime.kernels import bernoulli
from runtime.kernels.binding import Context


def draw(output: torch.Tensor, keep: float) -> None:
    operation = Operation("draw", "aten.bernoulli_.float", (TensorRef(0), keep), (), (0,))
    for call in bernoulli.bind_bernoulli(operation, Context([output])):
        call()


@pytest.fixture(autouse=True)
def generator_kept() -> object:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def test_engine_is_found_and_the_search_leaves_the_generator_alone() -> None:
    bernoulli.engine.cache_clear()
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    found = bernoulli.engine()
    assert torch.equal(torch.rand(4), expected)
    assert found is not None, "this build's generator is not where it was looked for: masks are drawn by ATen"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    ahead=st.integers(0, 1300),
    numel=st.integers(0, 2000),
    keep=st.floats(0.0, 1.0),
    dtype=st.sampled_from([torch.bool, torch.uint8, torch.float32]),
)
def test_draws_are_those_of_aten(seed: int, ahead: int, numel: int, keep: float, dtype: torch.dtype) -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(seed)
        torch.empty(ahead, dtype=torch.int32).random_()  # one word each: also odd positions
        mask = torch.empty(numel, dtype=dtype)
        for _ in range(2):
            draw(mask, keep) if ours else mask.bernoulli_(keep)
        results.append((mask.clone(), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("change", ["missing", "differs", "no numba"])
def test_aten_draws_where_the_engine_is_not_ours(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    if change == "missing":
        monkeypatch.setattr(bernoulli, "_SEARCHED_NBYTES", 8)
    elif change == "differs":
        monkeypatch.setattr(bernoulli, "_draw", lambda _found, output, _keep: output.zero_)
    else:
        monkeypatch.setattr(bernoulli, "_compiled", lambda: None)
    bernoulli.engine.cache_clear()
    try:
        assert bernoulli.engine() is None
        torch.manual_seed(3)
        mask = torch.empty(100, dtype=torch.bool)
        draw(mask, 0.5)
        torch.manual_seed(3)
        assert torch.equal(mask, torch.empty(100, dtype=torch.bool).bernoulli_(0.5))
    finally:
        monkeypatch.undo()
        bernoulli.engine.cache_clear()


def test_strided_masks_are_drawn_by_aten() -> None:
    torch.manual_seed(5)
    mask = torch.zeros(6, 4, dtype=torch.bool)
    draw(mask[:, ::2], 0.5)
    torch.manual_seed(5)
    expected = torch.zeros(6, 4, dtype=torch.bool)
    expected[:, ::2].bernoulli_(0.5)
    assert torch.equal(mask, expected)
