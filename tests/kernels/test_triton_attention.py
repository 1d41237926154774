"""The fused attention's Triton kernels, in the interpreter, against the definition in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.test_attention import Example, definition
from slots import LENGTHS, Slots

from runtime.kernels.triton import attention_launch

#: Weights are rounded to 16 bits before they meet the values on the matrix units.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SMALL = {"batch": 1, "heads": 2, "key_heads": 2, "depth": 16, "width": 16}


def spread(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``(batch, heads, length, depth)`` as views of a projection: heads side by side, with a gap."""
    _, heads, length, depth = shape
    row = heads * (depth + 8)
    return (length * row, depth + 8, row, 1)


def run(slots: Slots, values: list[Any], incoming: torch.Tensor, *, strided: bool = False) -> list[torch.Tensor]:
    """Result and gradients, everything in poisoned slots between canaries."""

    def placed(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        laid = strided and value.dim() == 4 and value.dtype.is_floating_point
        return slots.place(value, strides=spread(tuple(value.shape)) if laid else None)

    def fresh(like: torch.Tensor) -> torch.Tensor:
        strides = spread(tuple(like.shape)) if strided else None
        return slots.place(shape=like.shape, dtype=like.dtype, strides=strides)

    q, k, v = (placed(tensor) for tensor in values[:3])
    mask = None
    if values[3] is not None:  # a mask keeps the dimensions it is expanded along
        whole = values[3]
        narrow = whole.as_strided([1 if step == 0 else n for n, step in zip(whole.shape, whole.stride(), strict=True)],
                                  whole.stride())  # fmt: skip
        mask = slots.place(narrow.contiguous()).expand(whole.shape)
    seed = placed(values[4])
    out = fresh(incoming)
    lse, delta = (slots.place(shape=q.shape[:3]) for _ in range(2))
    settings = (mask, seed, *values[5:])
    forward = attention_launch.launch(q, k, v, out, lse, *settings)
    assert forward is not None
    forward()
    grad = placed(incoming)
    summed = attention_launch.launch_delta(grad, out, delta)
    assert summed is not None
    summed()
    grads = tuple(fresh(tensor) for tensor in (q, k, v))
    backward = attention_launch.launch_backward(grad, q, k, v, lse, delta, grads, *settings)
    assert backward is not None
    for item in backward:
        item()
    slots.check()
    return [out, *grads]


def close(results: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    floor = 0.1 * max(tensor.norm().item() for tensor in expected)
    for name, one, two in zip(("out", "grad_q", "grad_k", "grad_v"), results, expected, strict=True):
        error = (one.double() - two).norm().item() / max(two.norm().item(), floor, 1e-30)
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


def check(example: Example, **options: bool) -> None:
    values, incoming = example.draw()
    close(run(Slots(1 << 24), values, incoming, **options), definition(values, incoming), example.dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("length", [*LENGTHS[:-1], pytest.param(LENGTHS[-1], marks=pytest.mark.slow)])
def test_n04_equals_float64_at_odd_lengths(length: int, dtype: torch.dtype) -> None:
    causal = length % 2 == 1
    heads = {**SMALL, "heads": 1, "key_heads": 1} if length == 441 else SMALL
    check(Example(rows=length, columns=length, dtype=dtype, causal=causal, **heads))


@pytest.mark.parametrize(
    "example",
    [
        Example(**SMALL, rows=70, columns=43, dtype=torch.float16),
        Example(**SMALL, rows=43, columns=70, mask="bool"),
        Example(**SMALL, rows=43, columns=70, mask="bool", dtype=torch.float16),
        Example(**SMALL, rows=43, columns=70, mask="added", dtype=torch.bfloat16),
        Example(**SMALL, rows=43, columns=70, mask="added"),
        Example(**SMALL, rows=5, columns=9, mask="keys"),
        Example(batch=2, heads=4, key_heads=2, rows=33, columns=65, depth=20, width=12, causal=True),
        Example(batch=1, heads=3, key_heads=1, rows=33, columns=33, depth=80, width=72, dropout=0.3),
        Example(**SMALL, rows=70, columns=70, dropout=0.2, causal=True, dtype=torch.float16),
        Example(**SMALL, rows=70, columns=70, dropout=0.2, mask="bool", dtype=torch.bfloat16),
        Example(batch=1, heads=1, key_heads=1, rows=1, columns=1, depth=1, width=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("strided", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_masks_groups_dropout_and_strides(example: Example, strided: bool) -> None:
    check(example, strided=strided)


def test_n01_rows_without_a_key_give_zeros_and_finite_gradients() -> None:
    values, incoming = Example(**SMALL, rows=43, columns=43, mask="bool", dropout=0.2).draw()
    mask = values[3].clone()
    mask[:, :, 5] = False
    mask[:, 1] = False
    values[3] = mask
    results = run(Slots(1 << 24), values, incoming)
    assert not results[0][:, :, 5].any()
    assert not results[0][:, 1].any()
    close(results, definition(values, incoming), torch.float32)


@pytest.mark.parametrize("kind", ["bool", "added", "causal"])
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_n02_what_lies_at_masked_keys_does_not_leak(kind: str, value: float, dtype: torch.dtype) -> None:
    values, incoming = Example(**SMALL, rows=70, columns=70, dtype=dtype).draw()
    hidden = slice(66, 70)
    seen = torch.ones(70, dtype=torch.bool)
    seen[hidden] = False
    if kind == "causal":
        values[7] = True
    else:
        added = torch.zeros(70).masked_fill(~seen, -math.inf).to(dtype)
        values[3] = (seen if kind == "bool" else added).expand(1, 2, 70, 70)
    expected = definition(values, incoming)
    for tensor in values[1:3]:
        tensor[:, :, hidden] = value
    results = run(Slots(1 << 24), values, incoming)
    if kind == "causal":
        for one, two in zip(results[:2], expected[:2], strict=True):
            error = (one[:, :, :66].double() - two[:, :, :66]).norm() / two[:, :, :66].norm()
            assert error <= TOLERANCE[dtype]
        assert not torch.isfinite(results[0][:, :, 69]).any()
    else:
        close(results, expected, dtype)


def test_i01_i02_offsets_past_two_to_the_31() -> None:
    """fla-org/flash-linear-attention#1080, thu-ml/SageAttention#386: rows far apart, few elements."""
    values, incoming = Example(**SMALL, rows=3, columns=3, dtype=torch.float16).draw()
    q, k, v = values[:3]
    expected = run(Slots(1 << 24), values, incoming)
    row = (1 << 30) + 8
    block = torch.empty(2 * row + 256, dtype=torch.float16)  # only the pages written are ever real
    far = [block.as_strided(q.shape, (0, 16, row, 1), 32 * place) for place in range(3)]
    for view, value in zip(far, (q, k, v), strict=True):
        view.copy_(value)
    out, lse, delta = torch.empty_like(q), torch.empty(1, 2, 3), torch.empty(1, 2, 3)
    attention_launch.launch(*far, out, lse, *values[3:])()
    attention_launch.launch_delta(incoming, out, delta)()
    grads = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
    for item in attention_launch.launch_backward(incoming, *far, lse, delta, grads, *values[3:]):
        item()
    for one, two in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_what_the_kernels_cannot_take_is_said() -> None:
    def refused(example: Example, **changes: Any) -> bool:
        values, incoming = example.draw()
        for position, value in changes.items():
            values[int(position[1:])] = value
        lse = torch.empty(values[0].shape[:3])
        return attention_launch.launch(*values[:3], torch.empty_like(incoming), lse, *values[3:]) is None

    assert refused(Example(**SMALL, rows=4, columns=4, dtype=torch.float64))
    assert refused(Example(batch=1, heads=1, key_heads=1, rows=4, columns=4, depth=160, width=160))
    assert refused(Example(**SMALL, rows=4, columns=4), _3=torch.zeros(4, 4, dtype=torch.float64))
    assert refused(Example(**SMALL, rows=4, columns=4), _0=torch.empty(1, 2, 16, 4).transpose(2, 3))
