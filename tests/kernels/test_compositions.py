"""Operators written as others when traced, casts and dense copies: equal to eager, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from planner import plan, trace
from planner.graph import Role
from runtime import ArenaRuntime
from runtime.measure import allocations
from tests.helpers import same_tree

Program = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, high: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _masked_rows(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 6, dtype=torch.bool).tril()
    mask[2] = False
    scores = x.masked_fill(~mask, float("-inf"))
    return torch.ops.aten._safe_softmax(scores, -1) + torch.ops.aten._safe_softmax(scores.t(), 0).t()


def _in_place_casts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.half()
    z.add_(y)
    z.mul_(2)
    return z


def _puts(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row = torch.arange(6.0)
    return (
        torch.index_put(x, [i], row),
        torch.index_put(x, [i], row, accumulate=True),
        torch.index_add(x, 0, i, row.expand(5, 6)),
        torch.scatter(x, 1, i[:4, None], x * 2),
        torch.scatter_add(x, 1, i[:4, None], x),
    )


PROGRAMS: dict[str, tuple[Program, tuple[torch.Tensor, ...]]] = {
    "arange": (lambda x: x[:, None] * torch.arange(2.0, 11.0, 1.5) + torch.arange(6), (draw(4),)),
    "arange of numbers that rounding could add to": (lambda x: x + torch.arange(0, 1, 0.1), (draw(10),)),
    "pad": (lambda x: functional.pad(x, (1, -2, 3, 0), value=2.5), (draw(4, 6),)),
    "pad integers": (lambda x: functional.pad(x, (0, 1), value=-100), (whole(4, 6),)),
    "repeat": (lambda x: (x.repeat(2, 3), x.t().repeat(3, 1, 2), x[0].repeat(4, 1)), (draw(4, 6),)),
    "fill": (lambda x, y: torch.zeros_like(x).fill_(y) + x, (draw(4, 6), torch.tensor(3.0))),
    "masked rows": (_masked_rows, (draw(4, 6),)),
    "embedding": (lambda x, i: functional.embedding(i, x) * 2, (draw(6, 5), whole(3, 4))),
    "embedding, transposed indices": (lambda x, i: functional.embedding(i.t(), x), (draw(6, 5), whole(3, 4))),
    "mean squared error": (
        lambda x, y: functional.mse_loss(x, y) + functional.mse_loss(x, y, reduction="sum"),
        (draw(9), draw(9, seed=1)),
    ),
    "elements squared": (lambda x, y: functional.mse_loss(x, y, reduction="none"), (draw(9), draw(9, seed=1))),
    "puts": (_puts, (draw(4, 6), torch.tensor([3, 0, 2, 1, 3]))),
    "integer and float": (
        lambda i, x: (i * x, x - i, i / 4, i > x, torch.where(i > 2, x, i)),
        (whole(4, 6), draw(4, 6)),
    ),
    "boolean sums": (lambda x: ((x > 0).sum(), (x > 0).sum(1), (x > 0).cumsum(1)), (draw(4, 6),)),
    "broadcast casts": (lambda i, x: i[:, None].expand(4, 6) * x, (whole(4), draw(4, 6))),
    "float16 and float32": (lambda x, y: x.half() * y + y.half(), (draw(4, 6), draw(4, 6, seed=1))),
    "float64 number": (lambda x: x * torch.tensor(2.0, dtype=torch.float64), (draw(4, 6),)),
    "casts in place": (_in_place_casts, (draw(4, 6), draw(4, 6, seed=1))),
    "division of integers": (lambda i: (i / 2, i // 2, i % 4, -i, i.sin()), (whole(4, 6) + 1,)),
    "softmax of a transpose": (lambda x: (x.t().softmax(-1), x.t().log_softmax(0)), (draw(4, 6),)),
    "gelu of a transpose": (lambda x: functional.gelu(x.t() * 2), (draw(4, 6),)),
    "layer norm of a transpose": (lambda x: functional.layer_norm(x.t(), (4,)), (draw(4, 6),)),
    "large sums": (lambda x: (x.sum(), x.mean(), x.flatten().sum()), (draw(300, 400),)),
    "sums of float16": (lambda x: (x.half().sum(), x.half().mean(1)), (draw(30, 40),)),
    "flips": (lambda x: (x.flip(0), x.flip(0, 1), x.t().flip(-1), x.flip(0).cumsum(0).flip(0)), (draw(4, 6),)),
    "any and all": (
        lambda x: ((x > 0).any(), (x > 0).any(1), (x > -9).all(), (x > 0).all(0, keepdim=True)),
        (draw(4, 6),),
    ),
    "not finite": (lambda x: (torch.isnan(x.log()), torch.isinf(x / 0), (x / 0).isinf().any()), (draw(4, 6),)),
    "large extremes": (lambda x: (x.amax(), x.max(), (x > 3).any()), (draw(300, 400),)),
    "numbers first": (lambda x: (2 - x, 2 / x, 2**x, x**2, x**0.5), (draw(4, 6).abs(),)),
}


@pytest.mark.parametrize("strategy", ["traced", "auto"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager_without_allocation(name: str, strategy: str) -> None:
    program, inputs = PROGRAMS[name]
    made = plan(trace(program, inputs, mode="forward"), strategy=strategy)
    run = ArenaRuntime(made)
    for _ in range(2):
        same_tree(run(*[value.clone() for value in inputs], poison=True), program(*inputs), exact=False)
    run.load(*inputs)
    assert allocations(run.execute).calls == 0
    assert made.unplanned == ()


def test_random_tensors_are_eager_s() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) + torch.randn_like(x)

    run = ArenaRuntime(plan(trace(program, (draw(40),), mode="forward")))
    torch.manual_seed(3)
    ours = run(draw(40))
    torch.manual_seed(3)
    torch.testing.assert_close(ours, program(draw(40)), rtol=0, atol=0)


def test_scratch_is_planned_and_lives_one_step() -> None:
    layer = torch.nn.LayerNorm(7)
    made = plan(trace(layer, (draw(5, 7).requires_grad_(),), mode="joint"))
    scratch = [index for index, storage in enumerate(made.graph.storages) if storage.role is Role.WORKSPACE]
    assert len(scratch) == 6
    for index in scratch:
        assert made.placements[index].death == made.placements[index].birth + 1


def test_an_operator_without_a_kernel_runs_and_is_listed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, 0) * 2

    made = plan(trace(program, (draw(5, 7),), mode="forward"))
    assert [(entry.operator, entry.nbytes) for entry in made.unplanned] == [("aten.roll.default", 5 * 7 * 4)]
    run = ArenaRuntime(made)
    torch.testing.assert_close(run(draw(5, 7), poison=True), program(draw(5, 7)), rtol=0, atol=0)
    run.load(draw(5, 7))
    assert allocations(run.execute).nbytes == 5 * 7 * 4
