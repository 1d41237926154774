"""Views, in-place writes and aliases that broke other planners in public; sources in each docstring."""

from __future__ import annotations

import pytest
import torch

from planner import plan, trace
from planner.errors import TraceError
from runtime import ArenaRuntime
from runtime.errors import InputError
from tests.helpers import forward_equals_eager, joint_equals_eager


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a01_a_returned_view_keeps_its_reused_storage_alive() -> None:
    """pytorch/pytorch#187678: B reuses A's storage and only a view of B is returned."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.sin()
        b = a.cos()
        view = b[1:, ::2].t()
        c = (x * 2).exp().sum()
        return view, c

    forward_equals_eager(function, lambda s: (draw(6, 8, seed=s),))


def test_a02_lerp_then_add_keeps_the_moment() -> None:
    """pytorch/pytorch#183575: the optimizer-in-graph pattern, with a cast afterwards."""

    def function(p: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        m.lerp_(g, 0.1)
        p.add_(m, alpha=-0.5)
        return (p.bfloat16().float() * 2).relu()

    forward_equals_eager(function, lambda s: (draw(40, seed=s), draw(40, seed=s + 1), draw(40, seed=s + 2)))


@pytest.mark.parametrize("kind", ["slice", "select", "diagonal", "index_fill"])
def test_a03_a_scatter_keeps_the_values_from_before_a_mutation(kind: str) -> None:
    """pytorch/pytorch#198096."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "slice":
            out = torch.slice_scatter(x, y[:2], 0, 1, 5, 2)
            x.zero_()
        elif kind == "select":
            out = torch.select_scatter(x, y[0], 0, 3)
            x.fill_(3.0)
        elif kind == "diagonal":
            out = torch.diagonal_scatter(x, y[0, :5], 1)
            x.fill_(5.0)
        else:
            x.index_fill_(0, torch.tensor([1, 2]), 9.0)
            out = x.clone()
            x.clamp_(-0.1, 0.1)
        return out

    forward_equals_eager(function, lambda s: (draw(6, 6, seed=s), draw(6, 6, seed=s + 9)))


def test_a04_reads_before_writes_across_dtype_views() -> None:
    """pytorch/pytorch#198101."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.view(torch.int32) * 2
        x[1:3].fill_(7)
        return y.view(torch.int64)

    forward_equals_eager(function, lambda s: (torch.arange(s, s + 8, dtype=torch.int64),))


def test_a05_complex_and_real_views_are_one_storage() -> None:
    """pytorch/pytorch#122457: view_as_complex then view_as_real, two consumers."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = torch.view_as_complex(x * 1.5)
        w = z * z
        back = torch.view_as_real(w)
        return back + 1, back.sin(), torch.view_as_real(z.conj() * w).sum(0)

    forward_equals_eager(function, lambda s: (draw(5, 4, 2, seed=s),))


@pytest.mark.parametrize("variant", ["element", "view", "whole"])
def test_a06_aliased_inputs_keep_their_offsets(variant: str) -> None:
    """pytorch/pytorch#198095: ``ta = t0[1:]`` is an input beside ``t0``, which is mutated."""

    def function(t0: torch.Tensor, ta: torch.Tensor) -> torch.Tensor:
        t0.mul_(3)
        if variant == "element":
            return ta[0] * 1.0
        return ta.view(-1) if variant == "view" else t0 + 1

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        t0 = draw(6, seed=seed)
        return t0, t0[1:]

    forward_equals_eager(function, inputs)


def test_a06_inputs_that_no_longer_alias_are_refused() -> None:
    """A plan made for aliased inputs must not quietly run on separate ones."""
    t0 = draw(6)
    graph = trace(lambda a, b: a.mul_(3).sum() + b.sum(), (t0, t0[1:]), mode="forward")
    run = ArenaRuntime(plan(graph))
    with pytest.raises(InputError, match="shared memory"):
        run(draw(6), draw(5))


@pytest.mark.parametrize("view", [lambda a: a[0::2], lambda a: a[:, 0], lambda a: a.t()[1:3]])
def test_a07_in_place_on_a_strided_view_leaves_the_rest(view) -> None:
    """pytorch/pytorch#93363, #106456."""

    def function(a: torch.Tensor) -> torch.Tensor:
        view(a).add_(10)
        return a.sum()

    forward_equals_eager(function, lambda s: (draw(6, 6, seed=s),))


def test_a07_a_strided_input_is_written_back_through_its_strides() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sum(0)

    def inputs(seed: int) -> tuple[torch.Tensor]:
        return (draw(4, 6, seed=seed)[:, ::2],)

    forward_equals_eager(function, inputs)


def test_a09_an_expanded_result_then_backward() -> None:
    """pytorch/pytorch#184088: the output has stride 0."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True).expand_as(x)

    joint_equals_eager(function, lambda s: (draw(4, 5, seed=s).requires_grad_(),))


def test_a09_writing_through_an_expanded_view_is_refused() -> None:
    """pytorch/pytorch#114302: write after expand."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).expand(3, 4)
        y.add_(1)
        return y

    with pytest.raises(TraceError, match=r"overlap|expand|written-to"):
        trace(function, (draw(1, 4),), mode="forward")


def test_a10_a_concatenation_is_alive_from_its_first_piece() -> None:
    """pytorch/pytorch#100314: the pieces are used again, and one of them is empty."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.exp(), y.sigmoid()
        noise = (a * b).cos()
        c = torch.cat([a, torch.empty(0), b, a * 2], dim=1)
        d = torch.stack([a, b]) * noise
        return c + 1, d + a

    forward_equals_eager(function, lambda s: (draw(3, 4, seed=s), draw(3, 4, seed=s + 5)))


def test_a13_a_rolling_buffer_across_steps() -> None:
    """tinygrad/tinygrad#15698: state assigned back to itself each step."""

    class Rolling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.zeros(4, 3))

        def forward(self, new: torch.Tensor) -> torch.Tensor:
            self.window.copy_(torch.cat([self.window[1:], new]))
            return self.window * 2

    ours, eager = Rolling(), Rolling()
    run = ArenaRuntime(plan(trace(ours, (draw(1, 3),), mode="forward")))
    for step in range(6):
        torch.testing.assert_close(
            run(draw(1, 3, seed=step), poison=True), eager(draw(1, 3, seed=step)), rtol=0, atol=0
        )
    torch.testing.assert_close(ours.window, eager.window, rtol=0, atol=0)


def test_a15_a_returned_alias_extends_the_life_of_the_mutated_argument() -> None:
    """pytorch/pytorch#189735, #183611."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        z = y.add_(1)
        big = (x * 3).tanh().sum()
        return z[1:], z.sum() + big

    forward_equals_eager(function, lambda s: (draw(7, 5, seed=s),))


def test_an_identity_and_a_constant_output() -> None:
    constant = torch.arange(4.0)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x + constant, constant * 2

    forward_equals_eager(function, lambda s: (draw(4, seed=s),))
