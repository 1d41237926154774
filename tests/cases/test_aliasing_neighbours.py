"""The kinds behind the aliasing cases: every scatter, every dtype view, every strided write, one small program each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner import trace
from planner.errors import TraceError
from tests.helpers import forward_equals_eager, joint_equals_eager

Function = Callable[..., Any]
ROWS = torch.tensor([1, 3])
PLACES = torch.tensor([[0, 1, 2, 3, 4, 5]])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed).requires_grad_()


def forward(function: Function, inputs: Callable[[int], tuple[Any, ...]], *, exact: bool = True) -> None:
    forward_equals_eager(function, inputs, strategies=("traced", "auto"), steps=2, exact=exact)


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(6, 6, seed=seed), draw(6, 6, seed=seed + 9)


SCATTERS: dict[str, Function] = {
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 5, 2),
    "as_strided_scatter": lambda x, y: torch.as_strided_scatter(x, y[:2, :2], (2, 2), (6, 1), 3),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y[0, :5], 1),
    "index_copy": lambda x, y: torch.index_copy(x, 0, ROWS, y[:2]),
    "index_add": lambda x, y: torch.index_add(x, 0, ROWS, y[:2]),
    "index_fill": lambda x, _: torch.index_fill(x, 0, ROWS, 3.0),
    "index_fill by a tensor": lambda x, y: torch.index_fill(x, 0, ROWS, y.sum()),
    "index_put": lambda x, y: torch.index_put(x, (ROWS,), y[:2]),
    "index_put accumulating": lambda x, y: torch.index_put(x, (ROWS,), y[:2], accumulate=True),
    "index_reduce": lambda x, y: torch.index_reduce(x, 0, ROWS, y[:2], "amax"),
    "put": lambda x, y: torch.ops.aten.put(x, ROWS, y[0, :2]),
    "scatter": lambda x, y: torch.scatter(x, 0, PLACES, y),
    "scatter a number": lambda x, _: torch.scatter(x, 0, PLACES, 2.0),
    "scatter_add": lambda x, y: torch.scatter_add(x, 0, PLACES, y),
    "scatter_reduce": lambda x, y: torch.scatter_reduce(x, 0, PLACES, y, "amax"),
    "masked_scatter": lambda x, y: torch.masked_scatter(x, x > 0, y),
    "masked_fill": lambda x, _: torch.masked_fill(x, x > 0, 2.0),
    "masked_fill by a tensor": lambda x, y: torch.masked_fill(x, x > 0, y.sum()),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "unfold": lambda x, _: x.unfold(0, 2, 1).clone(),
    "roll": lambda x, _: x.roll(2, 0),
    "take_along_dim": lambda x, _: torch.take_along_dim(x, PLACES, 0),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", SCATTERS)
def test_a03_what_was_scattered_keeps_its_values(name: str) -> None:
    """pytorch/pytorch#198096: the input is cleared after it was read."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = SCATTERS[name](x, y)
        x.zero_()
        return made

    forward(function, pair)


@pytest.mark.parametrize("place", [ROWS, (ROWS, ROWS), slice(1, 5, 2), "mask"])
def test_a03_an_assignment_then_a_clone_then_a_mutation(place: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[x > 0 if place == "mask" else place] = 7.0
        kept = x.clone()
        x.mul_(y)
        return kept

    forward(function, pair)


def test_a03_a_view_taken_before_sees_the_mutation() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = x.unfold(0, 2, 1)
        kept = window * 1
        x.copy_(y)
        return kept, window * 1

    forward(function, pair)


DTYPES = [
    ("int64", "int32"),
    ("int64", "int16"),
    ("int64", "uint8"),
    ("int64", "float64"),
    ("int32", "int64"),
    ("uint8", "float32"),
    ("float64", "float32"),
    ("float32", "float64"),
    ("float32", "int32"),
    ("float32", "bfloat16"),
    ("float16", "uint8"),
    ("bfloat16", "int16"),
    ("bfloat16", "int32"),
    ("complex64", "float32"),
]


@pytest.mark.parametrize(("own", "seen"), DTYPES)
def test_a04_other_dtype_views(own: str, seen: str) -> None:
    """pytorch/pytorch#198101: read as one dtype, written as another, read again."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.view(getattr(torch, seen)) * 2
        x[1:3].fill_(7)
        return before, x.view(getattr(torch, seen)) + 1

    def inputs(seed: int) -> tuple[torch.Tensor]:
        numbers = torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(seed))
        return (numbers.to(getattr(torch, own)),)

    forward(function, inputs)


def test_a04_a_view_of_a_view_of_another_dtype() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        parts = x.view(torch.int32).view(torch.int8)[..., ::4] * 1
        x.mul_(2)
        return parts

    forward(function, lambda s: (draw(8, 4, seed=s),))


def test_a05_a_complex_tensor_changed_between_its_consumers() -> None:
    """pytorch/pytorch#122457."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.view_as_complex(x * 1.5)
        w = z.conj() * z
        z.mul_(2)
        return torch.view_as_real(w), torch.view_as_real(z).sum(0), z.real * 3, z.imag.neg()

    forward(function, lambda s: (draw(5, 4, 2, seed=s),), exact=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.view_as_real(torch.view_as_complex(x * 1.5) ** 2).sin(),
        lambda x: torch.view_as_complex(x * 1.5).abs(),
        lambda x: torch.fft.rfft(x * 1.0).abs(),
    ],
)
def test_a05_gradients_through_complex_views(function: Function) -> None:
    joint_equals_eager(function, lambda s: (leaf(5, 4, 2, seed=s),), strategies=("auto",), steps=2)


def three(seed: int) -> tuple[torch.Tensor, ...]:
    whole = draw(8, seed=seed)
    return whole, whole[2:], whole[:4]


def interleaved(seed: int) -> tuple[torch.Tensor, ...]:
    whole = draw(4, 4, seed=seed)
    return whole[::2], whole[1::2], whole[:2]


def transposed(seed: int) -> tuple[torch.Tensor, ...]:
    whole = draw(4, 4, seed=seed)
    return whole, whole.t(), whole[0]


@pytest.mark.parametrize("inputs", [three, interleaved, transposed])
def test_a06_several_aliases_of_which_some_are_written(inputs: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
    """pytorch/pytorch#198095."""

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = a.sum()
        b.add_(1)
        second = c * 2
        c.mul_(3)
        return first, second, a * 1, b * 1

    forward(function, inputs)


VIEWS: dict[str, Function] = {
    "diagonal": lambda a: a.diagonal(),
    "unfold": lambda a: a.unfold(1, 2, 2)[:, 0],
    "as_strided": lambda a: a.as_strided((3, 3), (6, 2)),
    "chunk": lambda a: a.chunk(3)[1],
    "every second column": lambda a: a.t()[::2],
    "real part": lambda a: torch.view_as_real(torch.view_as_complex(a.view(6, 3, 2)))[..., 0],
    "expand by one": lambda a: a[:1].expand(1, 6),
    "squeeze": lambda a: a.unsqueeze(0).squeeze(0)[2:],
    "movedim": lambda a: a.view(6, 2, 3).movedim(2, 0)[1:],
    "split": lambda a: a.split([1, 5])[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a07_writes_through_strided_views(name: str) -> None:
    """pytorch/pytorch#93363, #106456: the rest of the input is untouched."""

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view = VIEWS[name](a)
        view.add_(10)
        view.copy_(view * 2 + 1)
        return a.sum(), a * 1

    forward(function, lambda s: (draw(6, 6, seed=s),))


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.t_(),
        lambda y: y.transpose_(0, 1),
        lambda y: y.unsqueeze_(0),
        lambda y: y.unsqueeze_(0).squeeze_(),
        lambda y: y.as_strided_((3, 3), (6, 2), 1),
        lambda y: y.swapdims_(0, 1)[1:],
    ],
)
def test_a07_changes_of_strides_in_place(change: Function) -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = a * 2
        z = y[1:]
        changed = change(y)
        changed.add_(1)
        return changed * 3, z * 1

    forward(function, lambda s: (draw(6, 6, seed=s),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0, keepdim=True).expand_as(x) * 1.0 + x,
        lambda x: (x.sum().expand(3, 3), x.sum(1, keepdim=True).expand(4, 5)),
        lambda x: x.repeat_interleave(3, 0),
        lambda x: x.sum(0).broadcast_to(2, 4, 5),
    ],
)
def test_a09_expanded_results_then_backward(function: Function) -> None:
    """pytorch/pytorch#184088."""
    joint_equals_eager(function, lambda s: (leaf(4, 5, seed=s),), strategies=("auto",), steps=2)


WRITES: dict[str, Function] = {
    "add_": lambda y: y.add_(1),
    "fill_": lambda y: y.fill_(1),
    "zero_": lambda y: y.zero_(),
    "copy_": lambda y: y.copy_(torch.ones(3, 4)),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0]), torch.ones(1, 4)),
    "normal_": lambda y: y.normal_(),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 1.0),
    "assignment": lambda y: y.__setitem__((slice(None), 0), 1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a09_every_write_through_an_expanded_view_is_refused(name: str) -> None:
    """pytorch/pytorch#114302; the message has the line of the write."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).expand(3, 4)
        WRITES[name](y)
        return y

    with pytest.raises(TraceError, match=r"overlap|written-to") as caught:
        trace(function, (draw(1, 4),), mode="forward")
    assert caught.value.source.startswith("test_aliasing_neighbours.py:")


def _filled_in_halves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.empty(6, 12)
    whole[:, :6] = x
    half = whole[:, :6].sum()
    whole[:, 6:] = y
    return whole * 1, half


def _added_to_zeros(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.zeros(12, 6)
    whole[:6].copy_(x)
    half = whole.sum()
    whole[6:].add_(y)
    return whole, half


@pytest.mark.parametrize(
    "function",
    [
        _filled_in_halves,
        _added_to_zeros,
        lambda x, y: (torch.cat([x, y])[:3] * 2, torch.cat([x, y], 1)[:, 2:] + 1),
        lambda x, y: (torch.hstack([x, y, x]), torch.vstack([x, y])[::2]),
        lambda x, y: torch.cat([x, y.half()]),
        lambda x, y: torch.cat([torch.cat([x, y], 1)[:, 3:9], torch.stack([x, y]).flatten(0, 1)]),
    ],
)
def test_a10_buffers_filled_piece_by_piece(function: Function) -> None:
    """pytorch/pytorch#100314."""
    forward(function, pair)


def _adam(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    m.lerp_(g, 0.1)
    v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.1)
    return p.bfloat16().float() * 1


def _foreach(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    torch._foreach_lerp_([m, v], [g, g.square()], 0.1)
    torch._foreach_add_([p], [m], alpha=-0.5)
    return p.bfloat16().float()


def _momentum(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    m.mul_(0.9).add_(g)
    p.sub_(g.add(m, alpha=0.9), alpha=0.1)
    v.clamp_min_(0)
    return p.half().float()


@pytest.mark.parametrize("function", [_adam, _foreach, _momentum])
def test_a02_optimizers_inside_the_graph(function: Function) -> None:
    """pytorch/pytorch#183575: moments are those of eager after every step."""
    forward(function, lambda s: tuple(draw(40, seed=s + i).abs() for i in range(4)))


@pytest.mark.parametrize("shift", ["cat", "roll", "copy of a slice", "index"])
def test_a13_buffers_that_move_along(shift: str) -> None:
    """tinygrad/tinygrad#15698: what a step leaves is what the next one reads."""
    from planner import plan
    from runtime import ArenaRuntime

    class Window(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.zeros(4, 3))

        def forward(self, new: torch.Tensor) -> torch.Tensor:
            if shift == "cat":
                self.window = torch.cat([self.window[1:], new])
            elif shift == "roll":
                self.window.copy_(self.window.roll(-1, 0))
                self.window[-1:] = new
            elif shift == "copy of a slice":
                self.window[:-1] = self.window[1:].clone()
                self.window[-1].copy_(new[0])
            else:
                self.window.index_copy_(0, torch.tensor([0, 1, 2]), self.window[1:].clone())
                self.window.select(0, 3).copy_(new[0])
            return self.window.sum(0) * new

    ours, eager = Window(), Window()
    run = ArenaRuntime(plan(trace(ours, (draw(1, 3),), mode="forward")))
    for step in range(6):
        new = draw(1, 3, seed=step)
        torch.testing.assert_close(run(new, poison=True), eager(new), rtol=0, atol=0)
        torch.testing.assert_close(ours.window, eager.window, rtol=0, atol=0)
