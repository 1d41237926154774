"""Bias and GELU, and SwiGLU, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import gelu, swiglu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", LENGTHS)
def test_bias_gelu(width, dtype, approximate):
    slots = Slots()
    value, added, grad = (
        numbers(s, *shape, dtype=dtype) for s, shape in ((1, (9, width)), (2, (width,)), (3, (9, width)))
    )
    x, bias, out = slots.place(value * 3), slots.place(added), slots.place(shape=(9, width), dtype=dtype)
    gelu.launch(x, bias, out, approximate)()
    wide, wide_bias = x.double().requires_grad_(), bias.double().requires_grad_()
    expected = F.gelu(wide + wide_bias, approximate=approximate)
    close(out, expected.detach(), factor=2)
    expected.backward(grad.double())
    g, to_bias, parts = slots.place(grad), slots.place(shape=(width,), dtype=dtype), slots.place(shape=(2, width))
    for launch in gelu.launch_backward(g, x, bias, g, grad_bias=to_bias, parts=parts, approximate=approximate):
        launch()
    close(g, wide.grad, factor=2)
    close(to_bias, wide_bias.grad, factor=4)
    slots.check()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_at_the_ends(approximate):
    x = torch.tensor([[-1e4, -60.0, -20.0, 0.0, 20.0, 60.0, 1e4, float("inf")]])
    out, slope = torch.empty_like(x), torch.ones_like(x)
    gelu.launch(x, None, out, approximate)()
    assert torch.equal(out, x.clamp(min=0))
    (launch,) = gelu.launch_backward(slope[:, :7], x[:, :7], None, slope[:, :7], approximate=approximate)
    launch()
    assert torch.equal(slope[0, :7], torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", LENGTHS)
def test_swiglu_on_the_halves_of_one_projection(width, dtype):
    slots = Slots()
    both, grad = (
        slots.place(numbers(1, 2, 7, 2 * width, dtype=dtype)),
        slots.place(numbers(2, 2, 7, width, dtype=dtype)),
    )
    a, b = both.chunk(2, -1)
    out = slots.place(shape=(2, 7, width), dtype=dtype)
    swiglu.launch(a, b, out)()
    wide = both.double().requires_grad_()
    left, right = wide.chunk(2, -1)
    expected = F.silu(left) * right
    close(out, expected.detach(), factor=2)
    expected.backward(grad.double())
    swiglu.launch_backward(grad, a, b, a, b)()  # each onto its operand: the gradient of the projection, in its place
    close(both, wide.grad, factor=2)
    slots.check()


def test_swiglu_onto_an_operand_and_at_the_ends():
    slots = Slots()
    a = slots.place(torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]]))
    b = slots.place(torch.ones(1, 5))
    swiglu.launch(a, b, b)()
    torch.testing.assert_close(b, F.silu(a), atol=1e-30, rtol=1e-6)
    slots.check()


def test_nothing_to_do():
    x = torch.empty(0, 5)
    assert gelu.launch(x, None, x) is None
    assert gelu.launch_backward(x, x, None, x) == []
    assert swiglu.launch(x, x, x) is None
    y = torch.empty(5, 5)
    assert swiglu.launch(y.t(), y, y) is None
    with pytest.raises(ValueError, match="workspace"):
        gelu.launch_backward(y, y, None, y, grad_bias=y[0])
