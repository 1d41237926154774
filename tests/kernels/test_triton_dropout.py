"""Dropout by counter: its numbers, its statistics, and that nothing of the mask is stored."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import dropout
from runtime.kernels.triton.philox import counters_per_row, reference_keep

SEED = -0x123456789ABCDEF


def keep(offset: int, shape: tuple[int, ...], p: float, seed: int = SEED) -> torch.Tensor:
    rows = math.prod(shape[:-1])
    return torch.from_numpy(reference_keep(seed, offset, rows, shape[-1], p)).view(shape)


def test_the_generator_is_philox():
    """Known answers of the generator's authors: Random123, ``kat_vectors``, philox4x32 with 10 rounds."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for word, expected in zip(range(4), words, strict=True):
        least = (expected >> 1) / 2**31
        assert reference_keep(0, 0, 1, 4, least)[0, word]
        assert not reference_keep(0, 0, 1, 4, least + 2**-31)[0, word]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", LENGTHS)
def test_forward_and_backward_share_a_mask(dtype, width):
    slots = Slots()
    x = slots.place(numbers(1, 3, 7, width, dtype=dtype))
    seed = slots.place(torch.tensor([SEED]))
    out, gradient = slots.place(shape=x.shape, dtype=dtype), slots.place(numbers(2, 3, 7, width, dtype=dtype))
    value = gradient.clone()
    dropout.launch(x, out, seed, 0.25, offset=11)()
    dropout.launch(gradient, gradient, seed, 0.25, offset=11)()  # in place
    kept = keep(11, (3, 7, width), 0.25)
    close(out, torch.where(kept, x.double() / 0.75, 0.0))
    close(gradient, torch.where(kept, value.double() / 0.75, 0.0))
    assert torch.equal(out != 0, kept & (x != 0))
    slots.check()


@pytest.mark.parametrize("offset", [2**31 + 3, 2**32 - 2, 2**40 + 1])
def test_counters_past_32_bits(offset):
    slots = Slots()
    x = slots.place(torch.ones(5, 65))
    out = slots.place(shape=x.shape)
    dropout.launch(x, out, slots.place(torch.tensor([SEED])), 0.5, offset=offset)()
    assert torch.equal(out != 0, keep(offset, (5, 65), 0.5))
    assert not torch.equal(out != 0, keep(offset % 2**31, (5, 65), 0.5))


def test_a_mask_can_be_made_in_parts():
    """A slice of rows gets the whole tensor's mask if its offset counts the rows before it."""
    slots = Slots()
    seed = slots.place(torch.tensor([SEED]))
    whole, part = slots.place(torch.ones(9, 43)), slots.place(torch.ones(4, 43))
    dropout.launch(whole, whole, seed, 0.4)()
    dropout.launch(part, part, seed, 0.4, offset=3 * counters_per_row(43))()
    assert torch.equal(whole[3:7], part)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements(p):
    """A binomial count within five standard deviations, over rows, columns and the four words of a counter alike."""
    kept = keep(0, (512, 1024), p, seed=42)
    for part in (kept, kept[:, ::4], kept[:, 1::4], kept[:, 2::4], kept[:, 3::4], kept[::2], kept[:1], kept[:, :1]):
        deviation = math.sqrt(p * (1 - p) / part.numel())
        assert abs(part.double().mean().item() - (1 - p)) <= 5 * deviation


def test_neighbours_and_seeds_are_independent():
    """Correlations of ±1 variables, each within five standard deviations of zero."""
    kept = keep(0, (512, 1024), 0.5, seed=42)
    sign = kept.double() * 2 - 1
    other = keep(0, (512, 1024), 0.5, seed=43).double() * 2 - 1
    pairs = [
        sign[:, 1:] * sign[:, :-1],
        sign[:, 4:] * sign[:, :-4],
        sign[1:] * sign[:-1],
        sign * other,
        sign[:, 1:] * other[:, :-1],
    ]
    for pair in pairs:
        assert abs(pair.mean().item()) <= 5 / math.sqrt(pair.numel())
    runs = (sign[:, 1:] != sign[:, :-1]).double().mean().item()
    assert abs(runs - 0.5) <= 5 * 0.5 / math.sqrt(sign.numel())


def test_nothing_is_dropped_at_zero():
    x = numbers(1, 3, 43)
    out = torch.empty_like(x)
    dropout.launch(x, out, torch.tensor([1]), 0.0)()
    assert torch.equal(out, x)


def test_what_is_dropped_is_zero_whatever_it_was():
    slots = Slots()
    kept = keep(0, (5, 43), 0.5)
    x = slots.place(torch.where(kept, 1.0, float("nan")))
    dropout.launch(x, x, slots.place(torch.tensor([SEED])), 0.5)()
    assert torch.equal(x, torch.where(kept, 2.0, 0.0))


def test_empty_tensors_launch_nothing():
    x = torch.empty(0, 5)
    assert dropout.launch(x, x, torch.tensor([1]), 0.5) is None
