"""Softmax and its fused backward, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from reference.softmax import softmax as reference
from reference.softmax import softmax_backward as reference_backward
from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import softmax
from runtime.kernels.triton.philox import reference_keep

#: The last is longer than the widest tile, so that it is read in chunks.
WIDTHS = (*LENGTHS, 4099)
INFINITE = float("-inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_equals_float64(dtype, width):
    slots = Slots()
    x = slots.place(numbers(1, 3, 2, width, dtype=dtype) * 3)
    out = slots.place(shape=x.shape, dtype=dtype)
    softmax.launch(x, out, scale=0.7, safe=False)()
    close(out, reference(x, 0.7))
    slots.check()


@pytest.mark.parametrize("width", WIDTHS)
def test_forward_onto_its_operand(width):
    slots = Slots()
    value = numbers(1, 5, width)
    x = slots.place(value)
    softmax.launch(x, x)()
    close(x, reference(value))
    slots.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_causal_rows_never_read_later_columns(dtype, length):
    slots = Slots(1 << 22)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    value = numbers(1, length, length)
    x = slots.place(torch.where(future, float("nan"), value), dtype=dtype)
    out = slots.place(shape=x.shape, dtype=dtype)
    softmax.launch(x, out, causal=True)()
    close(out, reference(value.to(dtype), 1.0, future))
    slots.check()


MASKS = {
    "full": lambda b, n, l: numbers(4, b, n, l, l) > 0,
    "by key": lambda b, n, l: numbers(4, b, 1, 1, l) > 0,
    "by pair": lambda b, n, l: numbers(4, 1, 1, l, l) > 0,
    "by batch and pair": lambda b, n, l: numbers(4, b, 1, l, l) > 0,
    "no leading dimensions": lambda b, n, l: numbers(4, l, l) > 0,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("length", [1, 3, 43])
def test_masked_columns_are_never_read_and_empty_rows_are_zero(kind, length):
    slots = Slots()
    excluded = MASKS[kind](2, 3, length)
    excluded[..., -1, :] = True  # a row (or everything, by key) fully masked
    if kind == "by key":
        excluded[0, ..., 0] = False
    full = excluded.expand(2, 3, length, length)
    value = numbers(1, 2, 3, length, length)
    x = slots.place(torch.where(full, float("nan"), value))
    mask = slots.place(excluded)
    out = slots.place(shape=x.shape)
    softmax.launch(x, out, mask=mask, scale=0.5)()
    close(out, reference(value, 0.5, full))
    assert not out[full].any()
    slots.check()


@pytest.mark.parametrize("width", [3, 65, 4099])
def test_rows_of_minus_infinity(width):
    slots = Slots()
    value = numbers(1, 4, width)
    value[2] = INFINITE
    value[3, 1:] = INFINITE
    x, out = slots.place(value), slots.place(shape=value.shape)
    softmax.launch(x, out, safe=True)()
    close(out, reference(value))
    softmax.launch(x, out, safe=False)()
    assert torch.isnan(out[2]).all()
    close(out[[0, 1, 3]], reference(value)[[0, 1, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("drop", ["none", "counter", "stored"])
def test_backward_equals_float64(dtype, width, drop):
    slots = Slots()
    p = 0.3
    probs = slots.place(numbers(1, 3, 2, width).softmax(-1), dtype=dtype)
    grad_value = numbers(2, 3, 2, width, dtype=dtype)
    grad = slots.place(grad_value)
    seed = slots.place(torch.tensor([0x1234567890ABCDE]))
    kept = torch.from_numpy(reference_keep(0x1234567890ABCDE, 5, 6, width, p)).view(3, 2, width)
    options = {"counter": {"p": p, "seed": seed, "offset": 5}, "stored": {"p": p, "dropped": slots.place(~kept)}}
    launch = softmax.launch_backward(grad, probs, grad, scale=0.125, **options.get(drop, {}))  # in place
    launch()
    expected = reference_backward(grad_value, probs, None if drop == "none" else kept, p, 0.125)
    # The dot product may cancel, so the error is held against the terms of the difference.
    close(grad + 0, expected, factor=4 * (1 + grad_value.double().abs().max().item()) if width == 1 else 4)
    slots.check()


def test_backward_ignores_what_lies_at_masked_columns():
    slots = Slots()
    excluded = torch.ones(43, 43, dtype=torch.bool).triu(1)
    excluded[7] = True
    probs = slots.place(reference(numbers(1, 43, 43), 1.0, excluded).float())
    value = torch.where(excluded, float("nan"), numbers(2, 43, 43))
    grad = slots.place(value)
    softmax.launch_backward(grad, probs, grad)()
    close(grad, reference_backward(value, probs), factor=2)
    assert not grad[7].any()
    slots.check()


def test_backward_as_eager_gives_it():
    slots = Slots()
    probs, grad = numbers(1, 7, 65).softmax(-1), numbers(2, 7, 65)
    grad[3, 4] = float("nan")
    probs[3, 4] = 0.0
    ours = slots.place(grad)
    softmax.launch_backward(ours, slots.place(probs), ours, safe=False)()
    expected = torch._softmax_backward_data(grad, probs, -1, torch.float32)
    torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (2, 0, 5)])
def test_empty_tensors_launch_nothing(shape):
    x = torch.empty(shape)
    assert softmax.launch(x, x) is None
    assert softmax.launch_backward(x, x, x) is None


def test_strides_that_are_no_rows_are_refused():
    x = torch.empty(8, 8)
    assert softmax.launch(x.t(), x) is None
    assert softmax.launch(x.view(2, 4, 8)[:, :3], x[:6].view(2, 3, 8)) is None
    assert softmax.launch(x, x, mask=torch.zeros(8, 8, dtype=torch.bool).t()) is None


def test_rows_of_a_wider_tensor():
    slots = Slots()
    value = numbers(1, 5, 43)
    x = slots.place(value, strides=(50, 1))
    out = slots.place(shape=(5, 43), strides=(64, 1))
    softmax.launch(x, out)()
    close(out, reference(value))
    slots.check()
