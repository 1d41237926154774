"""Batched products on heads where they lie, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import matmul


def heads(slots: Slots, seed: int, b: int, n: int, l: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, N, L, d) as a view of (B, L, N·d), as a projection leaves it."""
    return slots.place(numbers(seed, b, l, n * d, dtype=dtype)).view(b, l, n, d).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_and_context_without_a_head_split(dtype, length):
    slots = Slots(1 << 21)
    b, n, d = (1, 2, 16) if length > 100 else (2, 3, 8)
    q, k, v = (heads(slots, seed, b, n, length, d, dtype) for seed in (1, 2, 3))
    scores = slots.place(shape=(b, n, length, length), dtype=dtype)
    matmul.launch(q, k.transpose(-1, -2), scores)()
    close(scores, q.double() @ k.double().transpose(-1, -2))
    merged = slots.place(shape=(b, length, n * d), dtype=dtype)
    matmul.launch(scores, v, merged.view(b, length, n, d).transpose(1, 2))()
    expected = (scores.double() @ v.double()).transpose(1, 2).reshape(b, length, n * d)
    close(merged, expected)
    slots.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh"])
def test_bias_and_gelu_in_the_epilogue(dtype, activation):
    slots = Slots()
    x, weight, bias = (
        slots.place(numbers(s, *shape, dtype=dtype)) for s, shape in ((1, (43, 30)), (2, (65, 30)), (3, (65,)))
    )
    out, before = (slots.place(shape=(43, 65), dtype=dtype) for _ in range(2))
    if activation == "none":
        matmul.launch(x, weight.t(), out, bias=bias)()
        close(out, F.linear(x.double(), weight.double(), bias.double()))
    else:
        matmul.launch(x, weight.t(), out, bias=bias, activation=activation, before=before)()
        close(before, F.linear(x.double(), weight.double(), bias.double()))
        close(out, F.gelu(before.double(), approximate="tanh" if activation == "gelu_tanh" else "none"))
    slots.check()


def test_large_tiles_and_their_ragged_edges():
    slots = Slots()
    a, b = slots.place(numbers(1, 130, 40).half()), slots.place(numbers(2, 40, 150).half())
    out = slots.place(shape=(130, 150), dtype=torch.float16)
    bound = matmul.launch(a, b, out)
    assert bound.setting.constants["ROWS"] == 128
    bound()
    close(out, a.double() @ b.double())
    slots.check()


def test_what_lies_beyond_a_matrix_is_not_read():
    """NaN between the rows, the columns and the matrices reaches no result."""
    slots = Slots()
    a = slots.place(numbers(1, 2, 3, 5), strides=(64, 16, 2))
    b = slots.place(numbers(2, 2, 5, 4), strides=(128, 1, 24))
    out = slots.place(shape=(2, 3, 4), strides=(50, 11, 2))
    matmul.launch(a, b, out)()
    close(out, a.double() @ b.double())
    slots.check()


def test_a_broadcast_batch_and_a_full_bias():
    slots = Slots()
    a, b = slots.place(numbers(1, 2, 1, 3, 5)), slots.place(numbers(2, 5, 7))
    bias, out = slots.place(numbers(3, 3, 1)), slots.place(shape=(2, 4, 3, 7))
    matmul.launch(a.expand(2, 4, 3, 5), b, out, bias=bias)()
    close(out, (a.double() @ b.double() + bias.double()).expand(2, 4, 3, 7))
    slots.check()


def test_a_depth_of_zero_gives_zeros():
    out = torch.full((3, 4), float("nan"))
    matmul.launch(torch.empty(3, 0), torch.empty(0, 4), out)()
    assert torch.equal(out, torch.zeros(3, 4))


def test_what_it_does_not_take():
    x = torch.empty(2, 2, 2, 3, 3)
    assert matmul.launch(x, x, x) is None
    assert matmul.launch(x[0, 0, 0].double(), x[0, 0, 0].double(), x[0, 0, 0].double()) is None
    assert matmul.launch(torch.empty(0, 3), torch.empty(3, 3), torch.empty(0, 3)) is None
    with pytest.raises(ValueError, match="activation"):
        matmul.launch(x[0, 0, 0], x[0, 0, 0], x[0, 0, 0], activation="gelu")
