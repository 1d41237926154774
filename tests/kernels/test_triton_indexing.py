"""Offsets past 2³¹ elements (cases I01 and I02), and no access outside a tensor, on a memory that is not there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from reference.softmax import softmax as reference_softmax
from reference.softmax import softmax_backward as reference_softmax_backward
from slots import close, numbers
from sparse_memory import SparseMemory

from runtime.kernels.triton import cross_entropy, dropout, embedding, gelu, matmul, norm, softmax, swiglu
from runtime.kernels.triton.philox import counters_per_row, reference_keep

#: Just past what 32 bits hold, in elements; and a place past it, in bytes.
FAR = 2**31 + 16
HIGH = 2**45
WIDTH = 5


class Memory(SparseMemory):
    """Every tensor at a high address of its own, rows FAR elements apart."""

    def far(self, value: torch.Tensor) -> torch.Tensor:
        strides = [1] * value.dim()
        for axis in range(value.dim() - 2, -1, -1):
            strides[axis] = FAR if axis == value.dim() - 2 else strides[axis + 1] * value.shape[axis + 1]
        return self.place(value, HIGH * (1 + len(self.bases)), strides)

    def dense(self, value: torch.Tensor) -> torch.Tensor:
        return self.place(value, HIGH * (1 + len(self.bases)), value.stride())


def test_the_memory_notices_a_wrapped_offset():
    """The check itself: with the row's place computed in 32 bits, the row does not exist."""
    memory = Memory()
    x = memory.far(numbers(1, 3, WIDTH))
    launch = swiglu.launch(x, x, x)
    wrapped = [FAR - 2**32 if item is not x and item == FAR else item for item in launch.arguments]
    with pytest.raises(Exception, match="KeyError"):
        memory.run(mock.Mock(kernel=launch.kernel, grid=launch.grid, arguments=wrapped, setting=launch.setting))


def test_softmax():
    memory = Memory()
    value, grad = numbers(1, 3, WIDTH), numbers(2, 3, WIDTH)
    x, out, g = memory.far(value), memory.far(torch.zeros(3, WIDTH)), memory.far(grad)
    memory.run(softmax.launch(x, out))
    close(memory.read(out), reference_softmax(value))
    probs = memory.read(out)
    memory.run(softmax.launch_backward(g, out, g))
    close(memory.read(g), reference_softmax_backward(grad, probs), factor=4)


def test_softmax_mask():
    memory = Memory()
    value, excluded = numbers(1, 2, 1, 3, WIDTH), numbers(2, 2, 1, 3, WIDTH) > 0
    x, out, mask = memory.far(value), memory.far(torch.zeros(value.shape)), memory.far(excluded)
    memory.run(softmax.launch(x, out, mask=mask))
    close(memory.read(out), reference_softmax(value, 1.0, excluded))


def test_dropout():
    memory = Memory()
    x, seed = memory.far(torch.ones(3, WIDTH)), memory.dense(torch.tensor([7]))
    memory.run(dropout.launch(x, x, seed, 0.5, offset=2**33))
    assert torch.equal(memory.read(x) != 0, torch.from_numpy(reference_keep(7, 2**33, 3, WIDTH, 0.5)))
    assert counters_per_row(WIDTH) == 2


def test_swiglu():
    memory = Memory()
    a, b = numbers(1, 3, WIDTH), numbers(2, 3, WIDTH)
    left, right = memory.far(a), memory.far(b)
    memory.run(swiglu.launch_backward(left, left, right, left, right))
    sigmoid = torch.sigmoid(a.double())
    close(memory.read(right), a.double() * a.double() * sigmoid)


def test_gelu():
    memory = Memory()
    value = numbers(1, 6, WIDTH)
    x, out, bias = memory.far(value), memory.far(torch.zeros(6, WIDTH)), memory.dense(numbers(2, WIDTH))
    memory.run(gelu.launch(x, bias, out))
    close(memory.read(out), F.gelu(value.double() + numbers(2, WIDTH).double()))
    sums, parts = memory.dense(torch.zeros(WIDTH)), memory.dense(torch.zeros(2, WIDTH))
    memory.run(*gelu.launch_backward(x, x, bias, out, grad_bias=sums, parts=parts))
    close(memory.read(sums), memory.read(out).double().sum(0), factor=4)


def test_norms():
    memory = Memory()
    value = numbers(1, 3, WIDTH)
    x, out = memory.far(value), memory.far(torch.zeros(3, WIDTH))
    weight, bias = memory.dense(numbers(2, WIDTH)), memory.dense(numbers(3, WIDTH))
    mean, rstd = memory.dense(torch.zeros(3)), memory.dense(torch.zeros(3))
    memory.run(norm.launch(x, weight, bias, out, mean, rstd, 1e-5))
    expected = F.layer_norm(value.double(), (WIDTH,), numbers(2, WIDTH).double(), numbers(3, WIDTH).double())
    close(memory.read(out), expected, factor=2)
    to_weight, parts = memory.dense(torch.zeros(WIDTH)), memory.dense(torch.zeros(2, 2, WIDTH))
    memory.run(*norm.launch_backward(x, x, weight, mean, rstd, out, grad_weight=to_weight, parts=parts))
    normal = (value.double() - value.double().mean(-1, keepdim=True)) * memory.read(rstd).double()[:, None]
    close(memory.read(to_weight), (value.double() * normal).sum(0), factor=8)


def test_cross_entropy():
    memory = Memory()
    value, target = numbers(1, 3, WIDTH), torch.tensor([4, 0, 2])
    x, targets = memory.far(value), memory.dense(target)
    losses, lse = memory.dense(torch.zeros(3)), memory.dense(torch.zeros(3))
    out, counted = memory.dense(torch.zeros(1)), memory.dense(torch.zeros(1))
    memory.run(*cross_entropy.launch(x, targets, losses, lse, out, counted))
    close(memory.read(out), F.cross_entropy(value.double(), target).view(1), factor=4)
    one = memory.dense(torch.ones(1))
    memory.run(cross_entropy.launch_backward(x, targets, lse, one, counted, x))
    expected = (value.double().softmax(-1) - F.one_hot(target, WIDTH)) / 3
    close(memory.read(x), expected, factor=4)


def test_embedding():
    memory = Memory()
    source, table = memory.far(numbers(1, 4, WIDTH)), memory.far(torch.zeros(3, WIDTH))
    indices = torch.tensor([2, 0, 2, 1])
    memory.run(embedding.launch(source, memory.dense(indices), table))
    close(memory.read(table), torch.zeros(3, WIDTH).double().index_add_(0, indices, numbers(1, 4, WIDTH).double()))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_matmul_with_any_stride_past_32_bits(axis):
    """A fused, sequence-major projection: one dimension's steps add up past 2³¹ although the tensor is small (I02)."""
    memory = Memory()
    a, b = numbers(1, 2, 2, 3, 4), numbers(2, 2, 2, 4, 3)
    strides = [48, 16, 4, 1]
    strides[axis] = FAR
    left, right = (memory.place(item, HIGH * (1 + n), strides) for n, item in enumerate((a, b)))
    out = memory.place(torch.zeros(2, 2, 3, 3), HIGH * 4, strides)
    memory.run(matmul.launch(left, right, out))
    close(memory.read(out), a.double() @ b.double())
