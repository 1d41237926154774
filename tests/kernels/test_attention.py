"""The fused attention's kernels on a CPU against its definition in float64, in poisoned memory between guards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.harness import perform

from planner.flash import ATTENTION, ATTENTION_BACKWARD, ATTENTION_DELTA
from runtime.attention_reference import kept_weights, reference_attention
from runtime.kernels import attention_eager

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LENGTHS = (1, 3, 43, 65, 441)


@dataclass(frozen=True)
class Example:
    """One attention: shapes, dtype and settings."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    rows: int = 43
    columns: int = 43
    depth: int = 16
    width: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: str = ""
    dropout: float = 0.0
    seed: int = 0

    def draw(self) -> tuple[list[Any], torch.Tensor]:
        """``(q, k, v, mask, seed, dropout, scale, causal)`` and the incoming gradient."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        q = normal(self.batch, self.heads, self.rows, self.depth)
        k = normal(self.batch, self.key_heads, self.columns, self.depth)
        v = normal(self.batch, self.key_heads, self.columns, self.width)
        mask = None
        if self.mask == "bool":
            mask = torch.rand(self.batch, 1, self.rows, self.columns, generator=generator) > 0.4
            mask[..., 0] = True
        elif self.mask == "added":
            mask = normal(1, self.heads, self.rows, self.columns)
        elif self.mask == "keys":
            mask = torch.rand(self.batch, 1, 1, self.columns, generator=generator) > 0.4
            mask[..., 0] = True
        if mask is not None:
            mask = mask.expand(self.batch, self.heads, self.rows, self.columns)
        seed = torch.tensor([0x1234567890ABCDE + self.seed]) if self.dropout else None
        settings = [mask, seed, self.dropout, 1 / math.sqrt(self.depth), self.causal]
        return [q, k, v, *settings], normal(self.batch, self.heads, self.rows, self.width)


def definition(values: list[Any], incoming: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients in float64."""
    wide = [tensor.double().requires_grad_() for tensor in values[:3]]
    out = reference_attention(*wide, *values[3:])
    return [out.detach(), *torch.autograd.grad(out, wide, incoming.double())]


def ours(
    values: list[Any], incoming: torch.Tensor, *, strided: bool = False, count: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Result and gradients by the planned kernels, and the log-sum-exp; nothing may be allocated."""
    q, k, v = values[:3]
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    forward = perform(ATTENTION, values, {}, [out, lse], strided=strided, count=count)
    result, statistics = forward.results
    summed = perform(ATTENTION_DELTA, [incoming, result], {}, [lse], strided=strided, count=count)
    given = [incoming, q, k, v, statistics, summed.results[0], *values[3:]]
    backward = perform(ATTENTION_BACKWARD, given, {}, [q, k, v], strided=strided, count=count)
    if count:
        assert [forward.allocated_nbytes, summed.allocated_nbytes, backward.allocated_nbytes] == [0, 0, 0]
    return [result, *backward.results], statistics


def close(results: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype, factor: float = 1) -> None:
    """Every result within the dtype's tolerance: ∇P − delta may cancel, so of a tenth of the largest norm at least."""
    floor = 0.1 * max(tensor.norm().item() for tensor in expected)
    for name, one, two in zip(("out", "grad_q", "grad_k", "grad_v"), results, expected, strict=True):
        error = (one.double() - two).norm().item() / max(two.norm().item(), floor, 1e-30)
        assert error <= factor * TOLERANCE[dtype], f"{name}: {error:.2e}"


def check(example: Example, factor: float = 1, **options: bool) -> None:
    values, incoming = example.draw()
    close(ours(values, incoming, **options)[0], definition(values, incoming), example.dtype, factor)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_n04_equals_float64_at_odd_lengths(length: int, causal: bool, dtype: torch.dtype) -> None:
    """facebookresearch/xformers#813; flagos-ai/FlagGems#898."""
    check(Example(rows=length, columns=length, dtype=dtype, causal=causal, heads=2, key_heads=2))


@pytest.mark.parametrize(
    "example",
    [
        Example(rows=300, columns=65, mask="bool", dtype=torch.float16),
        Example(rows=65, columns=300, mask="added"),
        Example(rows=65, columns=300, mask="added", dtype=torch.bfloat16),
        Example(rows=300, columns=43, mask="keys"),
        Example(key_heads=2, rows=65, columns=65, causal=True),
        Example(key_heads=1, rows=280, columns=270, mask="bool", dtype=torch.float16),
        Example(depth=20, width=12, rows=65, columns=43, causal=True),
        Example(depth=1, width=1, rows=7, columns=5),
        Example(batch=1, heads=1, key_heads=1, rows=1, columns=1, depth=1, width=1),
        Example(dropout=0.3, rows=270, columns=441, heads=2, key_heads=1, causal=True),
        Example(dropout=0.1, rows=300, columns=65, mask="bool", dtype=torch.bfloat16),
        Example(dropout=0.9, rows=65, columns=65, dtype=torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("strided", [False, True])
def test_masks_groups_dropout_and_strides(example: Example, strided: bool) -> None:
    check(example, strided=strided)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("mask", ["", "bool", "added"])
def test_nothing_is_allocated(dtype: torch.dtype, mask: str) -> None:
    check(Example(rows=300, columns=280, heads=2, key_heads=1, dtype=dtype, mask=mask, dropout=0.1), count=True)
    check(Example(rows=300, columns=280, dtype=dtype, causal=True), count=True)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    depth=st.integers(1, 20),
    width=st.integers(1, 20),
    causal=st.booleans(),
    mask=st.sampled_from(["", "", "bool", "added", "keys"]),
    dropout=st.sampled_from([0.0, 0.0, 0.2]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_float64(groups: int, key_heads: int, causal: bool, mask: str, **sizes: Any) -> None:
    example = Example(key_heads=key_heads, heads=groups * key_heads, causal=causal and not mask, mask=mask, **sizes)
    check(example, factor=4)  # in a matrix of a few elements roundings do not average out


def test_n01_rows_without_a_key_give_zeros_and_finite_gradients() -> None:
    """pytorch/pytorch#41508, #103963, #160064."""
    values, incoming = Example(mask="bool", dropout=0.2).draw()
    mask = values[3].clone()
    mask[:, :, 5] = False
    mask[1] = False
    values[3] = mask
    results, lse = ours(values, incoming)
    assert not results[0][:, :, 5].any()
    assert not results[0][1].any()
    assert torch.isposinf(lse[:, :, 5]).all()
    assert not results[1][1].any()
    close(results, definition(values, incoming), torch.float32)


@pytest.mark.parametrize("kind", ["bool", "added", "causal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_n02_what_lies_at_masked_keys_does_not_leak(kind: str, value: float, dtype: torch.dtype) -> None:
    """pytorch/pytorch#101967: a row's result does not depend on keys and values that are masked for it."""
    values, incoming = Example(rows=300, columns=300, dtype=dtype, heads=2, key_heads=2).draw()
    hidden = slice(290, 300)  # in one tile with keys that are seen
    if kind == "causal":
        values[7] = True
        rows = slice(0, 290)
    else:
        rows = slice(0, 300)
        seen = torch.ones(300, dtype=torch.bool)
        seen[hidden] = False
        added = torch.zeros(300).masked_fill(~seen, -math.inf).to(dtype)
        values[3] = (seen if kind == "bool" else added).expand(2, 2, 300, 300)
    expected = definition(values, incoming)
    clean, _ = ours(values, incoming)
    for tensor in values[1:3]:
        tensor[:, :, hidden] = value
    results, _ = ours(values, incoming)
    for one, two, wide in zip(results[:2], clean[:2], expected[:2], strict=True):
        torch.testing.assert_close(one[:, :, rows], two[:, :, rows], rtol=0, atol=0)
        assert (one[:, :, rows].double() - wide[:, :, rows]).norm() <= TOLERANCE[dtype] * wide[:, :, rows].norm()
    if kind != "causal":
        assert not results[2][:, :, hidden].any()
        assert not results[3][:, :, hidden].any()
        close(results, expected, dtype)
    else:
        assert not torch.isfinite(results[0][:, :, 299]).all(), "rows that see them are as in eager"


def test_nan_in_seen_values_reaches_the_rows_that_see_it() -> None:
    values, incoming = Example(rows=65, columns=65, causal=True).draw()
    values[2][0, 0, 40, 3] = float("nan")
    values[2][1, 2, 50, 1] = float("inf")
    results, _ = ours(values, incoming)
    expected = F.scaled_dot_product_attention(*values[:3], is_causal=True)
    for b, h, row, column in ((0, 0, 40, 3), (1, 2, 50, 1)):
        seen = results[0][b, h, row:, column]
        assert not torch.isfinite(seen).any()
        torch.testing.assert_close(seen, expected[b, h, row:, column], equal_nan=True)
        assert torch.isfinite(results[0][b, h, :row]).all()
    rest = torch.isfinite(expected)
    assert torch.isfinite(results[0][rest]).all()


def test_scores_beyond_float16_are_exact() -> None:
    """Scores are formed in float32: products of 16-bit operands past 65504 neither overflow nor saturate."""
    values, incoming = Example(dtype=torch.float16, rows=65, columns=65).draw()
    values[0] = values[0] * 100
    values[1] = values[1] * 100
    check_values = definition(values, incoming)
    results, _ = ours(values, incoming)
    close(results[:1] * 4, check_values[:1] * 4, torch.float16)


def test_dropout_drops_the_stated_share_and_never_twice_the_same() -> None:
    masks = [kept_weights(torch.tensor([seed]), 0.25, (2, 2, 64, 64)) for seed in (1, 2)]
    for mask in masks:
        assert mask.double().mean().item() == pytest.approx(0.75, abs=0.02)
    assert (masks[0] != masks[1]).double().mean().item() == pytest.approx(2 * 0.25 * 0.75, abs=0.03)
    heads = masks[0].view(4, -1)
    assert len({tuple(row.tolist()) for row in heads}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_i02_strides_past_two_to_the_31(dtype: torch.dtype) -> None:
    """thu-ml/SageAttention#386; pytorch/pytorch#190857: rows of a fused projection far apart, few elements."""
    example = Example(batch=1, heads=1, key_heads=1, rows=3, columns=3, dtype=dtype)
    values, incoming = example.draw()
    expected, _ = ours(values, incoming)
    row = (1 << 30) + 8  # 2 · row passes 2³¹ elements
    block = torch.empty(2 * row + 64, dtype=dtype)  # only the pages written are ever real
    far = [block.as_strided((1, 1, 3, 16), (0, 0, row, 1), 16 * place) for place in range(3)]
    for view, value in zip(far, values[:3], strict=True):
        view.copy_(value)
    out, lse = attention_eager.attention(*far, *values[3:])
    torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
    grads = attention_eager.attention_backward(incoming, *far, out, lse, *values[3:])
    for one, two in zip(grads, expected[1:], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_lanes_give_the_same_bits(causal: bool) -> None:
    """Every sum has a fixed order, whatever the number of threads."""
    example = Example(batch=3, rows=300, columns=300, causal=causal, dropout=0.1)
    values, incoming = example.draw()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out, lse = attention_eager.attention(*values)
            found.append([out, *attention_eager.attention_backward(incoming, *values[:3], out, lse, *values[3:])])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_empty_operands() -> None:
    example = replace(Example(), columns=0)
    values, _ = example.draw()
    out, lse = attention_eager.attention(*values)
    assert not out.any()
    assert torch.isposinf(lse).all()
