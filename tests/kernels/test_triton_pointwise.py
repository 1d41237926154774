"""Programs of operators on elements as one launch, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from slots import Slots, numbers

from planner.pointwise import ARITY
from runtime.kernels.triton import pointwise
from tests.reference.pointwise import FORMULAS


@pytest.mark.parametrize("name", ARITY)
@pytest.mark.parametrize("numel", [1, 43, 1025])
def test_every_instruction(name, numel):
    slots = Slots()
    count = ARITY[name]
    values = [numbers(seed, numel) for seed in range(count)]
    if name == "sqrt":
        values[0] = values[0].abs()
    if name == "where":
        values[0] = values[0] > 0
    operands = [slots.place(value) for value in values]
    out = slots.place(shape=(numel,))
    pointwise.launch([(name, tuple(range(count)))], operands, out)()
    wide = [value if value.dtype == torch.bool else value.double() for value in values]
    torch.testing.assert_close(out.double(), FORMULAS[name](*wide), rtol=1e-6, atol=1e-7)
    slots.check()


@given(
    st.lists(st.tuples(st.sampled_from(["add", "sub", "mul", "neg", "tanh", "sigmoid", "relu", "where"]),
                       st.lists(st.integers(0, 30), min_size=3, max_size=3)), min_size=1, max_size=8)
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_programs(drawn):
    """Two tensors, a number and a mask; the result onto the first tensor."""
    slots = Slots()
    first, second, mask = numbers(1, 3, 43), numbers(2, 3, 43), numbers(3, 3, 43) > 0
    wide = [first.double(), second.double(), torch.tensor(0.75, dtype=torch.float64), mask]
    program = []
    for name, choices in drawn:
        usable = [place for place in range(4 + len(program)) if place != 3]
        used = [usable[choice % len(usable)] for choice in choices][: ARITY[name]]
        if name == "where":
            used[0] = 3
        program.append((name, tuple(used)))
        wide.append(FORMULAS[name](*(wide[place] for place in used)).expand(3, 43))
    out = slots.place(first)
    pointwise.launch(program, [out, slots.place(second), 0.75, slots.place(mask)], out)()
    torch.testing.assert_close(out.double(), wide[-1], rtol=1e-5, atol=1e-5)
    slots.check()


def test_nan_and_the_ends_are_as_in_pytorch():
    x = torch.tensor([float("nan"), -1e4, -0.05, 0.05, 1e4, float("inf"), float("-inf")])
    for name in ("tanh", "sigmoid", "relu", "neg"):
        out = torch.empty_like(x)
        pointwise.launch([(name, (0,))], [x], out)()
        torch.testing.assert_close(out, FORMULAS[name](x), equal_nan=True, rtol=1e-6, atol=1e-12)
    assert pointwise.launch([("neg", (0,))], [x[:0]], x[:0]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype):
    """The gate of a feed-forward, ``silu(a) · b``, onto a."""
    slots = Slots()
    a, b = numbers(1, 1025).to(dtype), numbers(2, 1025).to(dtype)
    program = [("neg", (0,)), ("exp", (3,)), ("add", (2, 4)), ("div", (0, 5)), ("mul", (6, 1))]
    out = slots.place(a)
    pointwise.launch(program, [out, slots.place(b), 1.0], out)()
    expected = torch.nn.functional.silu(a.double()) * b.double()
    unit = torch.finfo(dtype).eps
    # The interpreter cuts bfloat16 off, where a GPU rounds to nearest.
    bound = unit if dtype == torch.bfloat16 else 0.505 * unit
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=1e-6)
    slots.check()
