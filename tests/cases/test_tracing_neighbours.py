"""The kinds behind the tracing cases: control flow, second derivatives, custom functions, randomness, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn import functional

from planner import trace
from planner.errors import TraceError
from tests.custom_functions import AddOne
from tests.helpers import forward_equals_eager, joint_equals_eager

Function = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed).requires_grad_()


def square(seed: int) -> tuple[torch.Tensor]:
    return (leaf(4, 4, seed=seed),)


def joint(function: Function, inputs: Callable[[int], tuple[Any, ...]] = square) -> None:
    joint_equals_eager(function, inputs, strategies=("auto",), steps=2)


# -- T04: control flow that data decide ---------------------------------------------------------------------------


def _siblings(x: torch.Tensor) -> torch.Tensor:
    first = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
    second = torch.cond(x.sum() < 0, lambda a: a * 2, lambda a: a + 1, (x,))
    return first + second


def _nested(x: torch.Tensor) -> torch.Tensor:
    def inner(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 1, lambda b: b.sin(), lambda b: b * 2, (a,))

    return torch.cond(x.sum() > 0, inner, lambda a: a.cos(), (x,))


FLOWS: dict[str, Function] = {
    "torch.cond": _siblings,
    "torch.cond nested": _nested,
    "torch.while_loop": lambda x: while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x))[1],
    "torch.map": lambda x: map_rows(lambda a: a.sin(), x),
    "torch.scan": lambda x: scan(lambda c, a: (c + a, c * a), x[0], x)[1],
}


@pytest.mark.parametrize("name", FLOWS)
def test_t04_control_flow_is_refused_by_name_and_line(name: str) -> None:
    """pytorch/executorch#21494: a branch's memory overwrote a live result."""
    with pytest.raises(TraceError, match=r"torch\.where") as caught:
        trace(FLOWS[name], (draw(4, 4),), mode="forward")
    assert caught.value.operation.startswith(name.split(maxsplit=1)[0])
    assert caught.value.source.startswith("test_tracing_neighbours.py:")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin() if x.sum() > 0 else x.cos(),
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x * len(x.tolist()),
    ],
)
def test_t04_results_that_depend_on_data_are_refused_by_name_and_line(function: Function) -> None:
    with pytest.raises(TraceError, match="depends on data") as caught:
        trace(function, (draw(4, 4),), mode="forward")
    assert caught.value.operation.startswith("aten.")
    assert caught.value.source.startswith("test_tracing_neighbours.py:")


def test_t04_a_branch_on_a_shape_is_taken_when_traced() -> None:
    joint(lambda x: torch.cond(x.shape[0] > 2, lambda a: a.sin(), lambda a: a.cos(), (x,)))


def test_the_line_is_that_of_the_helper_not_of_the_module() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.helper(x * 2)

        def helper(self, y: torch.Tensor) -> torch.Tensor:
            return y.tanh()  # this line

    graph = trace(Model(), (draw(3),), mode="forward")
    line = Model.helper.__code__.co_firstlineno + 1
    assert graph.operations[-1].source == f"test_tracing_neighbours.py:{line}"


# -- T05: statistics kept by a module ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.3}, {"momentum": 0.0}, {"affine": False}, {"track_running_stats": False}]
)
def test_t05_batch_norm_in_every_setting(settings: dict[str, Any]) -> None:
    """pytorch/pytorch#88375."""
    from runtime import TrainingStep

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, **settings)).double()
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, **settings)).double()
    step = TrainingStep(ours, lambda y: y.pow(3).sum(), (draw(6, 5).double(),))
    for number in range(4):
        x = draw(6, 5, seed=number).double()
        loss = eager(x).pow(3).sum()
        torch.testing.assert_close(step((x,)), loss.detach())
        for (name, one), two in zip(ours.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, two, msg=name)


def test_t05_a_cumulative_average_reads_its_counter_and_is_refused() -> None:
    with pytest.raises(TraceError, match="depends on data"):
        trace(nn.BatchNorm1d(4, momentum=None), (draw(6, 4),), mode="joint")


# -- T07: derivatives of derivatives ------------------------------------------------------------------------------


def _penalty(function: Function) -> Function:
    def program(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return first.pow(2).sum()

    return program


DOUBLE: dict[str, Function] = {
    "pow": lambda x: x**5,
    "softmax": lambda x: x.softmax(-1) * x,
    "log_softmax": lambda x: functional.log_softmax(x, -1) * x,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "layer_norm": lambda x: functional.layer_norm(x, (4,)) ** 2,
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True) ** 2,
    "matmul": lambda x: x @ x.t(),
    "norm": lambda x: x.norm(),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1], [2], [3]])) ** 3,
    "cumsum": lambda x: x.cumsum(0) ** 2,
    "conv1d": lambda x: functional.conv1d(x.view(1, 4, 4), x.view(4, 4, 1)) ** 2,
}


@pytest.mark.parametrize("name", DOUBLE)
def test_t07_second_derivatives_of_every_kind_of_operator(name: str) -> None:
    """pytorch/pytorch#91469, #181581."""
    joint(_penalty(DOUBLE[name]))


def _thrice(x: torch.Tensor) -> torch.Tensor:
    y = x**5
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y


@pytest.mark.parametrize(
    "function",
    [
        _thrice,
        lambda x: torch.autograd.grad((x**3).sum(), x)[0] * x,
        torch.func.grad(lambda z: (torch.func.grad(lambda w: (w**4).sum())(z) ** 2).sum()),
        lambda x: torch.func.jvp(lambda z: z.sin() * z, (x,), (x * 2,))[1],
    ],
)
def test_t07_other_ways_to_differentiate_twice(function: Function) -> None:
    joint(function)


def test_t07_a_hessian() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.hessian(lambda z: (z**3).sum())(x)

    forward_equals_eager(function, lambda s: (draw(4, seed=s),), steps=2, exact=False)


def test_t07_a_gradient_penalty_trains() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            return (slope.norm(dim=1) - 1).pow(2).mean()

    torch.manual_seed(0)
    joint(Critic())


# -- T08: custom functions ----------------------------------------------------------------------------------------


class _DirtySaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        x.mul_(y)
        ctx.save_for_backward(x, y)
        return x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


class _WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        indices, mask = x.argmax(-1), x > 0
        ctx.mark_non_differentiable(indices, mask)
        ctx.save_for_backward(mask)
        return x * mask, indices, mask

    @staticmethod
    def backward(ctx, gradient, _indices, _mask):
        (mask,) = ctx.saved_tensors
        return gradient * mask


class _ScalesIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


class _MixesIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx, first, second):
        first.add_(second)
        second.zero_()
        return first


class _NoGradientForOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2 + y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Unmaterialised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, first, second):
        return first if second is None else second * 2


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class _AView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(4, 4) * 2


def _dirty_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    AddOne.apply(y[1:])
    return y.sin()


def _scaled_and_shared(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return _ScalesIncoming.apply(y) + y


def _mixed(x: torch.Tensor) -> torch.Tensor:
    first, second = _MixesIncoming.apply(x)
    return first.sin() + second.cos()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: AddOne.apply(x * 1) * x,
        _dirty_view,
        lambda x: _DirtySaved.apply(x * 1, x.cos()).sin(),
        _WithIndices.apply,
        _ScalesIncoming.apply,
        lambda x: _ScalesIncoming.apply(x.sin()) + x.cos(),
        _scaled_and_shared,
        _mixed,
        lambda x: _NoGradientForOne.apply(x, x.sin()),
        lambda x: _Unmaterialised.apply(x)[1].sin(),
        lambda x: _Returned.apply(x) * x,
        lambda x: _AView.apply(x).sin(),
    ],
)
def test_t08_custom_functions_of_every_kind(function: Function) -> None:
    """pytorch/pytorch#180642, #133491, #141111."""
    joint(function)


# -- R01: randomness in the forward --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.bernoulli(torch.full((4, 4), 0.5)),
        lambda x: x * torch.bernoulli(x.detach().sigmoid()),
        lambda x: functional.alpha_dropout(x, 0.3, training=True),
        lambda x: functional.dropout1d(x.view(1, 4, 4), 0.3, training=True),
        lambda x: functional.feature_alpha_dropout(x.view(1, 4, 4), 0.3, training=True),
        lambda x: functional.dropout(x * 1, 0.3, training=True, inplace=True),
        functional.gumbel_softmax,
        lambda x: x * torch.randint_like(x, 5),
        lambda x: x * torch.empty_like(x).exponential_(),
        lambda x: x * torch.normal(x.detach(), torch.ones(4, 4)),
        lambda x: x[torch.multinomial(x.detach().exp().sum(1), 2)],
    ],
)
def test_r01_the_backward_uses_what_the_forward_drew(function: Function) -> None:
    """pytorch/pytorch#190758."""
    joint(function)


@pytest.mark.parametrize("function", [lambda x: functional.rrelu(x, training=True), lambda x: x[torch.randperm(4)]])
def test_r01_what_cannot_be_drawn_in_eagers_order_is_refused(function: Function) -> None:
    with pytest.raises(TraceError) as caught:
        trace(function, square(0), mode="joint")
    assert caught.value.source.startswith("test_tracing_neighbours.py:")


# -- O18, O20: layouts --------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "1 x 1": lambda: nn.Conv2d(6, 8, 1),
    "strided": lambda: nn.Conv2d(6, 8, 3, padding=1, stride=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, groups=6),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3),
    "grouped norm": lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8)),
    "pooled": lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
}


@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_o18_channels_last_by_value(name: str, images_last: bool, weights_last: bool) -> None:
    """pytorch/pytorch#70222, #127922."""
    torch.manual_seed(0)
    module = CONVOLUTIONS[name]()
    if weights_last:
        module = module.to(memory_format=torch.channels_last)

    def inputs(seed: int) -> tuple[torch.Tensor]:
        image = draw(2, 6, 6, 6, seed=seed)
        return ((image.contiguous(memory_format=torch.channels_last) if images_last else image).requires_grad_(),)

    joint(module, inputs)


def test_o18_gradients_of_a_step_have_the_strides_of_their_parameters() -> None:
    from runtime import TrainingStep

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    batch = (draw(2, 6, 5, 5).contiguous(memory_format=torch.channels_last),)
    expected = torch.autograd.grad(module(*batch).square().mean(), list(module.parameters()))
    strides = [parameter.stride() for parameter in module.parameters()]
    step = TrainingStep(module, lambda y: y.square().mean(), batch)
    step(batch)
    for parameter, gradient, stride in zip(module.parameters(), expected, strides, strict=True):
        assert parameter.stride() == stride
        torch.testing.assert_close(parameter.grad, gradient, check_stride=False)
    torch.optim.SGD(module.parameters(), lr=0.1).step()


class _Sparse(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_o20_sparse_tables_are_refused_by_line(kind: type[nn.Module]) -> None:
    """pytorch/pytorch#150656: through `trace`, `TrainingStep` and the compiler, before anything runs."""
    from runtime import TrainingStep

    model = _Sparse(kind(10, 4, sparse=True))
    tokens = torch.tensor([[1, 2], [3, 4]])
    before = model.table.weight.clone()
    for attempt in (
        lambda: trace(model, (tokens,), loss=lambda y: y, mode="joint"),
        lambda: TrainingStep(model, None, (tokens,)),
    ):
        with pytest.raises(TraceError, match="sparse=False") as caught:
            attempt()
        assert caught.value.source.startswith("test_tracing_neighbours.py:")
    assert model.table.weight.equal(before)
    assert model.table.weight.grad is None


@pytest.mark.parametrize(
    "table",
    [
        lambda: nn.EmbeddingBag(10, 4),
        lambda: nn.EmbeddingBag(10, 4, mode="max"),
        lambda: nn.Embedding(10, 4, scale_grad_by_freq=True),
        lambda: nn.Embedding(10, 4, padding_idx=1),
        lambda: nn.Embedding(10, 4, max_norm=1.0),
    ],
)
def test_o20_dense_tables_of_every_kind(table: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    joint(table(), lambda s: (torch.randint(0, 10, (3, 2), generator=torch.Generator().manual_seed(s)),))
