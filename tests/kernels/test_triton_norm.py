"""LayerNorm and RMSNorm, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

pytest.importorskip("triton")

from slots import DTYPES, LENGTHS, Slots, close, numbers

from runtime.kernels.triton import norm

WIDTHS = (*LENGTHS[1:], 4099)
ROWS = 11
EPS = 1e-5


def reference(x, weight, bias, *, centred):
    if centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_and_backward_equal_float64(width, dtype, centred):
    slots = Slots(1 << 21)
    value = (numbers(1, ROWS, width) * 2 + 1).to(dtype)
    grad = numbers(2, ROWS, width, dtype=dtype)
    x, weight = slots.place(value), slots.place(numbers(3, width, dtype=dtype))
    bias = slots.place(numbers(4, width, dtype=dtype)) if centred else None
    out, mean, rstd = slots.place(shape=x.shape, dtype=dtype), slots.place(shape=(ROWS,)), slots.place(shape=(ROWS,))
    norm.launch(x, weight, bias, out, mean if centred else None, rstd, EPS)()
    wide = value.double().requires_grad_()
    parameters = [None if item is None else item.double().requires_grad_() for item in (weight, bias)]
    expected = reference(wide, *parameters, centred=centred)
    close(out, expected.detach(), factor=4)
    slots.check()
    expected.backward(grad.double())
    to_x = slots.place(grad)
    to_weight, to_bias = (slots.place(shape=(width,), dtype=dtype) for _ in range(2))
    parts = slots.place(shape=(3, 2, width))
    targets = {"grad_weight": to_weight, "grad_bias": to_bias if centred else None, "parts": parts}
    for launch in norm.launch_backward(to_x, x, weight, mean if centred else None, rstd, to_x, **targets):  # in place
        launch()
    close(to_x, wide.grad, factor=8)
    close(to_weight, parameters[0].grad, factor=4)
    if centred:
        close(to_bias, parameters[1].grad, factor=4)
    slots.check()


@pytest.mark.parametrize("width", [43, 4099])
def test_without_weight_and_without_sums(width):
    slots = Slots()
    value, grad = numbers(1, 3, width), numbers(2, 3, width)
    x, out, mean, rstd = (
        slots.place(value),
        slots.place(shape=(3, width)),
        slots.place(shape=(3,)),
        slots.place(shape=(3,)),
    )
    norm.launch(x, None, None, out, mean, rstd, EPS)()
    wide = value.double().requires_grad_()
    expected = F.layer_norm(wide, (width,), None, None, EPS)
    close(out, expected.detach(), factor=4)
    expected.backward(grad.double())
    g = slots.place(grad)
    (launch,) = norm.launch_backward(g, x, None, mean, rstd, x)  # onto x
    launch()
    close(x, wide.grad, factor=8)
    slots.check()


@pytest.mark.parametrize("parts", [1, 2, 5, 64])
def test_the_sums_do_not_need_much_workspace_and_are_the_same_every_time(parts):
    slots = Slots()
    x, g = slots.place(numbers(1, 37, 43)), slots.place(numbers(2, 37, 43))
    out, mean, rstd = slots.place(shape=(37, 43)), slots.place(shape=(37,)), slots.place(shape=(37,))
    norm.launch(x, None, None, out, mean, rstd, EPS)()
    results = []
    for _ in range(2):
        to_weight, to_bias = slots.place(shape=(43,)), slots.place(shape=(43,))
        workspace = slots.place(shape=(parts, 2, 43))
        for launch in norm.launch_backward(
            g, x, None, mean, rstd, out, grad_weight=to_weight, grad_bias=to_bias, parts=workspace
        ):
            launch()
        results.append((to_weight, to_bias))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    close(results[0][1], g.double().sum(0), factor=4)
    slots.check()


def test_one_wide_row_each_by_several_programs():
    """A row longer than a tile: every program adds to its own part only."""
    slots = Slots(1 << 21)
    x, g = slots.place(numbers(1, 5, 4100)), slots.place(numbers(2, 5, 4100))
    out, rstd, to_weight = slots.place(shape=(5, 4100)), slots.place(shape=(5,)), slots.place(shape=(4100,))
    norm.launch(x, None, None, out, None, rstd, EPS)()
    normal = out.clone()
    for launch in norm.launch_backward(
        g, x, None, None, rstd, out, grad_weight=to_weight, parts=slots.place(shape=(2, 2, 4100))
    ):
        launch()
    close(to_weight, (g.double() * normal.double()).sum(0), factor=4)
    slots.check()


def test_what_it_does_not_take():
    x = torch.empty(3, 5)
    statistics = torch.empty(3)
    assert norm.launch(x[:0], None, None, x[:0], statistics, statistics, EPS) is None
    assert norm.launch(x.t(), None, None, x.t(), statistics, statistics, EPS) is None
    assert norm.launch(x, None, x[0], x, statistics, statistics, EPS) is None
    assert norm.launch_backward(x[:0], x[:0], None, None, statistics, x[:0]) == []
    with pytest.raises(ValueError, match="workspace"):
        norm.launch_backward(x, x, None, None, statistics, x, grad_weight=x[0])
