"""Column sums in Triton's interpreter, against float64, and where a plan takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from slots import DTYPES, Slots, close, numbers

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.kernels.triton import sums
from runtime.kernels.triton.launch import Launch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 43), (129, 16), (441, 65), (5, 1000)])
def test_column_sums_equal_float64(rows, width, dtype):
    slots = Slots(1 << 20)
    value = numbers(1, rows, width, dtype=dtype)
    x, out = slots.place(value), slots.place(shape=(width,), dtype=dtype)
    sums.launch_columns(x, out)()
    close(out, value.double().sum(0), factor=4)
    slots.check()


def test_sixteen_bit_sums_are_formed_in_float32():
    x, out = torch.ones(4097, 3, dtype=torch.float16), torch.empty(3, dtype=torch.float16)
    sums.launch_columns(x, out)()
    assert out.tolist() == [4096.0] * 3  # 4097 rounded; summed in float16 it stops at 2048


class Sum(nn.Module):
    def __init__(self, dims: list[int], *, keep: bool = False) -> None:
        super().__init__()
        self.dims, self.keep = dims, keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(self.dims, keepdim=self.keep)


@pytest.mark.parametrize(
    ("dims", "taken"),
    [
        ([0], True),
        ([0, 1], True),
        ([1, 0], True),
        ([-3], True),
        ([1], False),
        ([2], False),
        ([0, 2], False),
        ([0, 1, 2], False),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_plans_take_them_for_the_first_dimensions(dims, taken, keep):
    x = torch.randn(4, 7, 33)
    made = plan(trace(Sum(dims, keep=keep), (x,), mode="forward"))
    run = ArenaRuntime(made, kernels="triton")
    torch.testing.assert_close(run(x, poison=True), x.sum(dims, keepdim=keep), rtol=1e-5, atol=1e-5)
    assert any(isinstance(item, Launch) for item in run._program) is taken


def test_other_sums_stay_atens():
    for x in (torch.randn(6, 4).t(), torch.randn(4, 6, dtype=torch.float64), torch.randn(0, 6)):
        made = plan(trace(Sum([0]), (x,), mode="forward"))
        run = ArenaRuntime(made, kernels="triton")
        torch.testing.assert_close(run(x), x.sum(0), rtol=1e-5, atol=1e-5)
        assert not any(isinstance(item, Launch) for item in run._program)
