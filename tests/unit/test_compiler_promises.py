"""What the compile backend promises of memory, aliases and shapes, and what it refuses before anything runs."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import TraceError
from runtime import compiler
from runtime.compiler import backend
from runtime.errors import InputError
from runtime.measure import allocations
from runtime.pool import Pool
from tests.custom_functions import AddOne, ScalesIncoming

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@pytest.fixture(autouse=True)
def own_pool(monkeypatch: pytest.MonkeyPatch):
    """Arenas of this test alone, so that their sizes can be counted."""
    torch._dynamo.reset()
    pool = Pool()
    monkeypatch.setattr(compiler, "_POOL", pool)
    yield pool
    torch._dynamo.reset()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5))


def pair() -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
    ours = net()
    return ours, copy.deepcopy(ours), torch.compile(ours, backend=backend)


def same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    for (name, one), two in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str) -> None:
    ours, eager, run = pair()
    for model, call in ((ours, run), (eager, eager)):
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):

            def closure(call=call, optimizer=optimizer, step=step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = call(draw(8, 6, seed=step)).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_o12_four_micro_batches_equal_one_large_batch() -> None:
    """pytorch/pytorch#169545: the gradient was the graph's own buffer, overwritten by the next call."""
    model = net()
    x = draw(16, 6)
    model(x).pow(2).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run = torch.compile(model, backend=backend)
    for start in range(0, 16, 4):
        run(x[start : start + 4]).pow(2).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_parameters_are_read_where_they_lie(own_pool: Pool) -> None:
    """The arena holds activations only: it is smaller than the parameters, which are not copied there."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    eager = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    pointers = [parameter.data_ptr() for parameter in ours.parameters()]
    for step in range(3):
        for call, model, optimizer in zip((run, eager), (ours, eager), optimizers, strict=True):
            call(draw(2, 128, seed=step)).pow(2).sum().backward()
            if step == 1:
                same_gradients(model, eager) if model is eager else None
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert pointers == [parameter.data_ptr() for parameter in ours.parameters()]
    # The weights' gradients, which the backward leaves in its arena to be copied out, are all it holds of that size.
    assert max(own_pool.arena_sizes()) < 1.1 * sum(parameter.nbytes for parameter in ours.parameters())
    with torch.no_grad():
        run(draw(2, 128))
    assert min(own_pool.arena_sizes()) < ours[0].weight.nbytes * 7


def test_parameters_given_new_memory_are_followed() -> None:
    ours, eager, run = pair()
    x = draw(4, 6)
    run(x)
    for model in (ours, eager):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 2
    torch.testing.assert_close(run(x), eager(x))
    run(x).sum().backward()
    eager(x).sum().backward()
    same_gradients(ours, eager)


def test_a_dead_model_is_not_kept_by_the_arena() -> None:
    import weakref

    model = net()
    run = torch.compile(model, backend=backend)
    run(draw(4, 6)).sum().backward()
    seen = weakref.ref(model[0].weight.untyped_storage())
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


def test_a_parameter_changed_before_the_backward_is_refused_as_in_eager() -> None:
    ours, eager, run = pair()
    for model, call in ((ours, run), (eager, eager)):
        loss = call(draw(4, 6)).pow(2).sum()
        with torch.no_grad():
            model[3].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a06_a_graph_made_for_aliased_inputs_is_not_used_for_others() -> None:
    """pytorch/pytorch#198095: the same shapes, aliased or not, in turn."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(3)
        return b + 1

    run = torch.compile(function, backend=backend)
    for step, kind in enumerate(("behind", "apart", "behind", "in front")):
        results = []
        for call in (run, function):
            whole = draw(8, seed=step)
            a, b = {
                "behind": (whole[:5], whole[1:6]),
                "apart": (whole[:5], draw(5)),
                "in front": (whole[2:7], whole[:5]),
            }[kind]
            results.append((call(a, b), whole))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two)


def test_outputs_that_are_views_of_one_tensor_stay_so() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t(), x.view(-1), x, y.sum()

    run = torch.compile(function, backend=backend)
    x = draw(3, 3)
    for _ in range(2):
        ours, expected = run(x), function(x)
        for one, two in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, two)
        assert ours[4] is x
        assert ours[3].data_ptr() == x.data_ptr()
        ours[0].fill_(1.0)
        assert ours[1].eq(1).all()
        assert ours[2].eq(1).all()


def test_l12_dynamic_batches_run_in_the_arena_of_the_largest(own_pool: Pool) -> None:
    """pytorch/pytorch#31252: `mark_dynamic` with a maximum; no later shape needs more memory."""
    ours, eager, run = pair()
    sizes = []
    for step, rows in enumerate((4, 9, 5, 64, 3, 17)):
        x = draw(rows, 6, seed=step)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        run(x).pow(2).sum().backward()
        eager(x).pow(2).sum().backward()
        gc.collect()
        sizes.append(own_pool.arena_sizes())
    same_gradients(ours, eager)
    assert len(sizes[0]) == 1
    assert sizes == [sizes[0]] * len(sizes)


def test_l12_without_a_maximum_the_arena_grows_to_the_largest(own_pool: Pool) -> None:
    ours, eager, run = pair()
    for step, rows in enumerate((4, 9, 64, 3, 17)):
        run(draw(rows, 6, seed=step)).sum().backward()
        eager(draw(rows, 6, seed=step)).sum().backward()
        gc.collect()
    same_gradients(ours, eager)
    assert len(own_pool.arena_sizes()) == 1


def test_l11_a_later_step_needs_no_more_than_the_second(own_pool: Pool) -> None:
    """microsoft/onnxruntime#14477."""
    model = net()
    run = torch.compile(model, backend=backend)
    x = draw(8, 6)

    def step() -> None:
        run(x).pow(2).sum().backward()
        model.zero_grad(set_to_none=False)

    for _ in range(3):
        step()
    arenas = own_pool.arena_sizes()
    measured = [allocations(step) for _ in range(4)]
    assert len({item.peak_nbytes for item in measured}) == 1
    assert own_pool.arena_sizes() == arenas


def test_the_number_of_plans_is_bounded() -> None:
    model = net()
    held: list[Any] = []
    original = compiler._Compiled.__init__

    def noted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        held.append(self)

    compiler._Compiled.__init__ = noted  # type: ignore[method-assign]
    try:
        run = torch.compile(model, backend=backend, dynamic=True)
        for rows in range(2, compiler.MOST_SHAPES + 6):
            torch.testing.assert_close(run(draw(rows, 6)), model(draw(rows, 6)))
    finally:
        compiler._Compiled.__init__ = original  # type: ignore[method-assign]
    assert max(len(item._versions) for item in held) == compiler.MOST_SHAPES


def test_o18_gradients_have_the_strides_of_their_parameters() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 3)).to(memory_format=torch.channels_last)
    eager = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend)
    x = draw(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        run(x).square().mean().backward()
        eager(x).square().mean().backward()
    same_gradients(ours, eager)
    assert all(parameter.grad.stride() == parameter.stride() for parameter in ours.parameters())


def _branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)) * 2


@pytest.mark.parametrize("kind", ["sparse", "control flow"])
def test_t04_o20_refusals_come_before_the_forward_runs(kind: str) -> None:
    if kind == "sparse":
        model: Any = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        inputs: torch.Tensor = torch.tensor([1, 2])
    else:
        model, inputs = _branch, draw(4, 4)
    with pytest.raises(TraceError, match=r"sparse=False|torch\.where"):
        torch.compile(model, backend=backend)(inputs)


@pytest.mark.parametrize(
    "function", [lambda x: AddOne.apply(x * 1) * x, lambda x: ScalesIncoming.apply(x.sin()) + x.cos()]
)
def test_t08_custom_functions(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run = torch.compile(function, backend=backend)
    ours, eager = draw(4, 4).requires_grad_(), draw(4, 4).requires_grad_()
    for _ in range(2):
        with warnings.catch_warnings():
            # Dynamo looks at the `.grad` of what a custom function gets, whether it is a leaf or not.
            warnings.simplefilter("ignore", UserWarning)
            one = run(ours)
        two = function(eager)
        torch.testing.assert_close(one, two)
        one.pow(2).sum().backward()
        two.pow(2).sum().backward()
        torch.testing.assert_close(ours.grad, eager.grad)


def test_a13_a_buffer_assigned_anew() -> None:
    class Rolling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.zeros(4, 3))

        def forward(self, new: torch.Tensor) -> torch.Tensor:
            self.window = torch.cat([self.window[1:], new])
            return self.window * 2

    ours, eager = Rolling(), Rolling()
    run = torch.compile(ours, backend=backend)
    for step in range(4):
        torch.testing.assert_close(run(draw(1, 3, seed=step)), eager(draw(1, 3, seed=step)))
        torch.testing.assert_close(ours.window, eager.window)


def test_a07_writes_through_strides() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        a[0::2].add_(10)
        return a.sum()

    run = torch.compile(function, backend=backend)
    for turned in (False, True, False):
        for step in range(2):
            ours, eager = draw(6, 6, seed=step), draw(6, 6, seed=step)
            torch.testing.assert_close(run(ours.t() if turned else ours), function(eager.t() if turned else eager))
            torch.testing.assert_close(ours, eager)


def test_r01_masks_of_the_forward_in_the_backward() -> None:
    run = torch.compile(nn.Dropout(0.5), backend=backend)
    x = torch.ones(40, 30, requires_grad=True)
    for step in range(3):
        x.grad = None
        torch.manual_seed(step)
        y = run(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach(), rtol=0, atol=0)
        torch.manual_seed(step)
        torch.testing.assert_close(nn.functional.dropout(x.detach(), 0.5), y.detach(), rtol=0, atol=0)


def test_dropout_that_nobody_reads_draws_as_in_eager() -> None:
    """Left out, it would change the masks after it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(x, 0.5) * x

    compiled = torch.compile(function, backend=backend)
    x = torch.randn(16, 8, requires_grad=True)
    for step in range(2):
        found = []
        for called in (function, compiled):
            torch.manual_seed(step)
            output = called(x)
            found.append((output, *torch.autograd.grad(output.sum(), x)))
        torch.testing.assert_close(found[1], found[0])


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.table(tokens)).relu() @ self.table.weight.t()

    torch.manual_seed(0)
    ours = Tied()
    eager = copy.deepcopy(ours)
    run = torch.compile(ours, backend=backend)
    tokens = torch.tensor([[1, 2, 3], [4, 4, 0]])
    for _ in range(2):
        run(tokens).square().mean().backward()
        eager(tokens).square().mean().backward()
    same_gradients(ours, eager)
    assert ours.frozen.weight.grad is None


def test_saved_tensors_moved_by_hooks_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    ours, eager, run = pair()
    with torch.autograd.graph.save_on_cpu():
        loss = run(draw(4, 6)).pow(2).sum()
    loss.backward()
    eager(draw(4, 6)).pow(2).sum().backward()
    same_gradients(ours, eager)
    again = torch.compile(lambda x: checkpoint(ours, x, use_reentrant=False), backend=backend)
    again(draw(4, 6)).pow(2).sum().backward()
    eager(draw(4, 6)).pow(2).sum().backward()
    same_gradients(ours, eager)


def test_several_threads() -> None:
    model = net()
    run = torch.compile(model, backend=backend)
    x = draw(4, 6)
    expected = run(x).detach().clone()
    wrong: list[float] = []

    def work() -> None:
        for _ in range(20):
            difference = (run(x).detach() - expected).abs().max().item()
            if difference > 1e-6:
                wrong.append(difference)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_of_another_device_are_refused() -> None:
    compiled = torch.compile(nn.Linear(3, 3).to("meta"), backend="arenaplan")
    with pytest.raises(InputError, match=r"runs on the CPU; use runtime.TrainingStep"):
        compiled(torch.randn(2, 3, device="meta"))
