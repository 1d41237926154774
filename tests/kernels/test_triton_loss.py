"""Cross-entropy in place on the logits, and the backward of an embedding, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import cross_entropy, embedding
from runtime.kernels.triton.launch import Setting

WIDTHS = (*LENGTHS, 4099)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_cross_entropy(width, dtype, reduction):
    slots = Slots()
    value = (numbers(1, 7, width) * 3).to(dtype)
    target = torch.randint(0, width, (7,), generator=torch.Generator().manual_seed(2))
    target[3] = -100
    logits, targets = slots.place(value), slots.place(target)
    losses, lse = slots.place(shape=(7,)), slots.place(shape=(7,))
    out, counted = slots.place(shape=(1,)), slots.place(shape=(1,))
    for launch in cross_entropy.launch(logits, targets, losses, lse, out, counted, reduction=reduction):
        launch()
    wide = value.double().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction=reduction)
    torch.testing.assert_close(out.double(), expected.detach().view(1), rtol=2e-6, atol=1e-6)
    assert counted.item() == 6
    (expected * 0.5).backward()
    grad = slots.place(torch.tensor([0.5]))
    cross_entropy.launch_backward(logits, targets, lse, grad, counted, logits, reduction=reduction)()
    if width == 1:
        assert not logits.any()
    else:
        close(logits, wide.grad, factor=4)
    assert not logits[3].any()
    slots.check()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_backward_from_log_probabilities(reduction):
    slots = Slots()
    value, target = numbers(1, 7, 43), torch.tensor([0, 1, 42, -100, 5, 5, 9])
    wide = value.double().requires_grad_()
    incoming = numbers(2, 7) if reduction == "none" else torch.tensor([0.5])
    expected = F.cross_entropy(wide, target, reduction=reduction)
    expected.backward(incoming.double().view(expected.shape))
    x = slots.place(value.log_softmax(-1))
    counted = slots.place(torch.tensor([6.0]))
    cross_entropy.launch_backward(
        x, slots.place(target), None, slots.place(incoming), counted, x, reduction=reduction
    )()
    close(x, wide.grad, factor=4)
    slots.check()


def test_logits_of_a_wider_tensor_and_rows_of_minus_infinity():
    slots = Slots()
    value = numbers(1, 3, 50)
    value[1, 10:] = float("-inf")
    logits = slots.place(value, strides=(64, 1))
    target = torch.tensor([4, 3, 49])
    losses, lse, out, counted = (slots.place(shape=(n,)) for n in (3, 3, 1, 1))
    targets = slots.place(target)
    for launch in cross_entropy.launch(logits, targets, losses, lse, out, counted):
        launch()
    close(losses, F.cross_entropy(value.double(), target, reduction="none"), factor=2)
    slots.check()


def test_all_rows_ignored_and_targets_out_of_range():
    slots = Slots()
    logits = slots.place(numbers(1, 3, 5))
    losses, lse, out, counted = (slots.place(shape=(n,)) for n in (3, 3, 1, 1))
    ignored = slots.place(torch.full((3,), -100))
    for launch in cross_entropy.launch(logits, ignored, losses, lse, out, counted):
        launch()
    assert torch.isnan(out).all()  # as PyTorch: a mean of nothing
    assert counted.item() == 0
    wrong = slots.place(torch.tensor([0, 5, -1]))
    for launch in cross_entropy.launch(logits, wrong, losses, lse, out, counted, reduction="sum"):
        launch()
    assert torch.isnan(losses).tolist() == [False, True, True]
    slots.check()


def test_no_rows_give_a_loss_all_the_same():
    x = torch.empty(0, 5)
    out, counted = torch.full((1,), 7.0), torch.full((1,), 7.0)
    (launch,) = cross_entropy.launch(
        x, torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0), out, counted, reduction="sum"
    )
    launch()
    assert (out.item(), counted.item()) == (0.0, 0.0)
    assert cross_entropy.launch_backward(x, x, x, out, counted, x) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", LENGTHS)
def test_embedding_backward(width, dtype):
    slots = Slots()
    value = numbers(1, 43, width, dtype=dtype)
    index = torch.randint(0, 9, (43,), generator=torch.Generator().manual_seed(3))
    start = numbers(4, 11, width, dtype=dtype)
    table = slots.place(start)
    embedding.launch(slots.place(value), slots.place(index), table)()
    close(table, start.double().index_add_(0, index, value.double()))
    slots.check()


def test_embedding_backward_of_more_tokens_than_are_compared_at_a_time():
    """Every token of a row is counted, once, in one order, whichever block of tokens it lies in."""
    slots = Slots()
    value = slots.place(numbers(1, 75, 3))
    index = torch.arange(75) % 30
    index[[5, 40, 72]] = 2
    results = []
    for _ in range(2):
        table = slots.place(torch.zeros(30, 3))
        launch = embedding.launch(value, slots.place(index), table)
        replace(launch, setting=Setting({"TOKENS": 16, "BLOCK": 16}, 1))()
        results.append(table)
    assert torch.equal(*results)
    close(results[0], torch.zeros(30, 3).double().index_add_(0, index, value.double()))
    slots.check()


def test_embedding_backward_leaves_out_padding_and_what_is_out_of_range():
    slots = Slots()
    value, table = slots.place(numbers(1, 5, 3)), slots.place(torch.zeros(4, 3))
    index = torch.tensor([1, 3, 1, 9, -2])
    embedding.launch(value, slots.place(index), table, padding=3)()
    expected = torch.zeros(4, 3).double()
    expected[1] = value.double()[0] + value.double()[2]
    close(table, expected)
    slots.check()
    assert embedding.launch(value[:0], index[:0], table) is None
