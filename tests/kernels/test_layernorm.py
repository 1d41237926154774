"""Layer norm against float64: both kernels, in place and out, with rows far from zero, in 16 bits too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.kernels import indexing, layernorm
from tests.kernels.harness import perform

FORWARD, BACKWARD = "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(params=["compiled", "aten"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the compiled loops, and as it is where numba is missing."""
    if request.param == "aten":
        monkeypatch.setattr(layernorm, "compiled", lambda _: None)
        monkeypatch.setattr(indexing, "compiled", lambda _: None)
    return str(request.param)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (13, 7), (50, 1500)])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_forward_against_float64(kernel: str, dtype: torch.dtype, rows: int, width: int, mean: float) -> None:
    x = (draw(rows, width) + mean).to(dtype)
    weight, bias = draw(width, seed=1).to(dtype), draw(width, seed=2).to(dtype)
    expected = torch.native_layer_norm(x.double(), [width], weight.double(), bias.double(), 1e-5)
    shaped = [item.to(dtype) for item in expected]
    for overwrite in (None, 0):
        outcome = perform(
            FORWARD, [x, [width], weight, bias, 1e-5], {}, shaped, overwrite=overwrite, count=overwrite is None
        )
        assert outcome.allocated_nbytes == 0
        bound = TOLERANCE[dtype] * (1 + mean)
        torch.testing.assert_close(outcome.results[0].double(), expected[0], rtol=bound, atol=bound)
        torch.testing.assert_close(outcome.results[1].double(), expected[1], rtol=bound, atol=bound)
        if width > 1:
            assert relative(outcome.results[2], expected[2]) < bound


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("overwrite", [None, 0, 1])
@pytest.mark.parametrize(("rows", "width"), [(13, 7), (50, 1500)])
def test_backward_against_float64(
    kernel: str, dtype: torch.dtype, affine: bool, overwrite: int | None, rows: int, width: int
) -> None:
    x, dy = draw(rows, width).to(dtype), draw(rows, width, seed=3).to(dtype)
    weight, bias = (draw(width, seed=seed).to(dtype) if affine else None for seed in (1, 2))
    wide = [None if item is None else item.double() for item in (weight, bias)]
    _, mean, rstd = torch.native_layer_norm(x.double(), [width], *wide, 1e-5)
    mask = [True, affine, affine]
    expected = torch.ops.aten.native_layer_norm_backward(dy.double(), x.double(), [width], mean, rstd, *wide, mask)
    values: list[Any] = [dy, x, [width], mean.to(dtype), rstd.to(dtype), weight, bias, mask]
    shaped = [None if item is None else item.to(dtype) for item in expected]
    outcome = perform(BACKWARD, values, {}, shaped, overwrite=overwrite, count=overwrite is None)
    assert outcome.allocated_nbytes == 0
    for ours, reference in zip(outcome.results, [item for item in expected if item is not None], strict=True):
        assert relative(ours, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_backward_computes_only_what_is_asked(kernel: str, wanted: tuple[bool, bool, bool]) -> None:
    x, dy = draw(5, 6).float(), draw(5, 6, seed=3).float()
    weight, bias = draw(6, seed=1).float(), draw(6, seed=2).float()
    _, mean, rstd = torch.native_layer_norm(x, [6], weight, bias, 1e-5)
    values: list[Any] = [dy, x, [6], mean, rstd, weight, bias, list(wanted)]
    expected = torch.ops.aten.native_layer_norm_backward(*values)
    shaped = [item if asked else None for item, asked in zip(expected, wanted, strict=True)]
    (ours,) = perform(BACKWARD, values, {}, shaped).results
    torch.testing.assert_close(ours, next(item for item in shaped if item is not None))


@pytest.mark.parametrize("repeats", [1, 9])
def test_rows_are_added_in_order(kernel: str, repeats: int) -> None:
    """The gradient of an embedding: rows named several times sum up, to the bit as ATen adds them."""
    index = torch.tensor([3, 0, 3, 3, 1] * repeats)
    source = draw(5 * repeats, 4).float()
    values: list[Any] = [torch.zeros(6, 4), 0, index, source]
    expected = torch.zeros(6, 4).index_add_(0, index, source)
    outcome = perform("aten.index_add_.default", values, {}, [expected], mutated=0)
    torch.testing.assert_close(outcome.results[0], expected, rtol=0, atol=0)
    assert outcome.allocated_nbytes == 0


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_index_out_of_range_is_an_error(kernel: str, wrong: int) -> None:
    values: list[Any] = [torch.zeros(6, 4), 0, torch.tensor([0, wrong]), draw(2, 4).float()]
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        perform("aten.index_add_.default", values, {}, [torch.zeros(6, 4)], mutated=0)
