"""`TrainingStep` on the cases: lengths that vary, states across steps, custom functions, structures, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from planner.graph import Role
from runtime import TrainingStep
from runtime.measure import allocations


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


class Reader(nn.Module):
    """A language model of one block, for sequences of any length up to 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(16, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(sequence) + self.places[: sequence.shape[1]]))


def reading_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def follow(
    ours: nn.Module,
    eager: nn.Module,
    step: TrainingStep,
    loss: Callable[..., torch.Tensor],
    batches: list[Any],
    rate: float = 0.05,
) -> None:
    """Optimizer steps with equal losses, gradients and buffers, on steps 2…N as on the first."""
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=rate) for m in (ours, eager)]
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        expected = loss(eager, batch)
        expected.backward()
        torch.manual_seed(number)
        torch.testing.assert_close(step(batch), expected.detach())
        for (name, one), two in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), name
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), two in zip(ours.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_l12_shorter_batches_run_in_the_arena_of_the_longest_without_allocations() -> None:
    """meta-pytorch/torchtune#1236, pytorch/pytorch#31252."""
    ours = Reader()
    eager = copy.deepcopy(ours)
    lengths = (16, 3, 9, 16, 1, 9, 3)
    batches = [(tokens(2, length, n), tokens(2, length, n + 50)) for n, length in enumerate(lengths)]
    step = TrainingStep(ours, reading_loss, batches[0])
    most = step.plan.arena_nbytes
    pointers = [parameter.data_ptr() for parameter in ours.parameters()]
    follow(ours, eager, step, lambda model, batch: reading_loss(model(batch[0]), batch[1]), batches)
    assert pointers == [parameter.data_ptr() for parameter in ours.parameters()]
    assert step._arena is not None
    assert step._arena.nbytes == most
    for length in (16, 9, 3, 1):
        batch = (tokens(2, length), tokens(2, length))
        step(batch)
        ours.zero_grad()
        assert allocations(lambda batch=batch: step(batch)).calls == 0
        ours.zero_grad()


def test_l11_the_peak_of_later_steps_is_that_of_the_first_after_planning() -> None:
    """microsoft/onnxruntime#14477."""
    model = Reader()
    batch = (tokens(2, 8), tokens(2, 8, 1))
    step = TrainingStep(model, reading_loss, batch)
    step(batch)
    measured = []
    for _ in range(4):
        model.zero_grad()
        measured.append(allocations(lambda: step(batch)))
    assert {(item.calls, item.peak_nbytes) for item in measured} == {(0, 0)}


def test_l04_a_prompt_then_single_tokens() -> None:
    """microsoft/onnxruntime#28359: length 32, then length 1, then 32 again, each with a plan of its own."""
    ours = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1))
    eager = copy.deepcopy(ours)
    batches = [(draw(2, length, 4, seed=length + n),) for n, length in enumerate((32, 1, 32, 1))]
    step = TrainingStep(ours, lambda y: y.square().sum(), batches[0])
    follow(ours, eager, step, lambda model, batch: model(batch[0]).square().sum(), batches)


def test_a13_a_rolling_buffer_and_a_running_sum() -> None:
    """tinygrad/tinygrad#15698: what one step leaves in a buffer the next one reads."""

    class Rolling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3)
            self.register_buffer("window", torch.zeros(4, 3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, new: torch.Tensor) -> torch.Tensor:
            self.window = torch.cat([self.window[1:], new])
            self.count += 1
            return self.linear(self.window).square().sum() / self.count

    ours = Rolling()
    eager = copy.deepcopy(ours)
    batches = [(draw(1, 3, seed=n),) for n in range(6)]
    step = TrainingStep(ours, None, batches[0])
    follow(ours, eager, step, lambda model, batch: model(batch[0]), batches)
    assert ours.count.item() == 6


def test_t07_a_gradient_penalty() -> None:
    """pytorch/pytorch#91469: a gradient of a gradient inside the step."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            score = self.layers(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    ours = Critic()
    eager = copy.deepcopy(ours)
    batches = [(draw(5, 4, seed=n),) for n in range(4)]
    follow(ours, eager, TrainingStep(ours, None, batches[0]), lambda model, batch: model(batch[0]), batches)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x += 1
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def test_t08_a_custom_function_that_changes_what_it_is_handed() -> None:
    """pytorch/pytorch#180642, #133491, #141111."""

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (_Doubled.apply(self.linear(x)) * self.linear(x)).sum()

    ours = Custom()
    eager = copy.deepcopy(ours)
    batches = [(draw(3, 4, seed=n),) for n in range(3)]
    follow(ours, eager, TrainingStep(ours, None, batches[0]), lambda model, batch: model(batch[0]), batches)


def test_t10_branches_that_the_loss_leaves_out() -> None:
    """pytorch/pytorch#131794, #58511: gradients of unused branches are `None`, and nothing is reserved for them."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [branch(x).tanh() for branch in self.branches]

    ours = Branches()
    eager = copy.deepcopy(ours)
    batches = [(draw(3, 4, seed=n),) for n in range(3)]
    step = TrainingStep(ours, lambda outputs: outputs[1].sum(), batches[0])
    follow(ours, eager, step, lambda model, batch: model(batch[0])[1].sum(), batches)
    reserved = [item.nbytes for item in step.plan.graph.storages if item.role is Role.PARAMETER_GRADIENT]
    assert sum(reserved) == (16 + 4) * 4
    assert ours.branches[0].weight.grad is None


@dataclass
class Answer:
    """What a model of the test returns."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    name: str


torch.utils._pytree.register_dataclass(Answer)


class Structured(nn.Module):
    """A model with keyword inputs, optional ones, and one of several kinds of output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, pair: dict[str, torch.Tensor] | None = None) -> Any:
        hidden = self.first(x).relu() * scale
        if pair is not None:
            hidden = hidden + pair["shift"]
        logits = self.second(hidden)
        if self.kind == "dataclass":
            return Answer(logits, (hidden,), "answer")
        return {"logits": logits, "hidden": (hidden,)} if self.kind == "dict" else (logits, (hidden,))


def several_losses(output: Any, batch: Any) -> torch.Tensor:
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    hidden = output[1] if isinstance(output, tuple) else getattr(output, "hidden", None)
    if isinstance(output, dict):
        logits, hidden = output["logits"], output["hidden"]
    first = F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    second = hidden[0].abs().mean()
    return first + 0.1 * second + 0.01 * (logits.sum(1) - batch["x"].sum(1)).square().mean()


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_structures_keywords_and_several_losses(kind: str) -> None:
    ours = Structured(kind)
    eager = copy.deepcopy(ours)
    batches = [{"x": draw(3, 4, seed=n), "scale": 0.5, "pair": {"shift": draw(6, seed=n + 20)}} for n in range(3)]
    step = TrainingStep(ours, several_losses, batches[0])
    follow(ours, eager, step, lambda model, batch: several_losses(model(**batch), batch), batches)


def test_o10_safetensors_take_the_state_and_hold_nothing_else(tmp_path: Path) -> None:
    """safetensors/safetensors#202, #304: tensors that share a storage are refused by the format."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = Reader()
    batch = (tokens(2, 8), tokens(2, 8, 1))
    step = TrainingStep(model, reading_loss, batch)
    step(batch)
    file = tmp_path / "model.safetensors"
    safetensors.save_file(step.state_dict(), file)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes <= file.stat().st_size < nbytes + 4096
    loaded = safetensors.load_file(file)
    again = Reader()
    again.load_state_dict(loaded)
    for (name, one), two in zip(again.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=name)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step.load_state_dict(loaded)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    torch.testing.assert_close(model.places.detach(), loaded["places"], rtol=0, atol=0)


def test_o02_weight_decay_leaves_frozen_parameters_alone() -> None:
    """pytorch/pytorch#104690, huggingface/peft#1702."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(requires_grad=False)
    frozen = model[0].weight.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    step = TrainingStep(model, lambda y: y.square().mean(), (draw(3, 4),), optimizer=optimizer)
    for number in range(3):
        step((draw(3, 4, seed=number),))
    torch.testing.assert_close(model[0].weight, frozen, rtol=0, atol=0)
    assert model[0].weight.grad is None
    reserved = [item.nbytes for item in step.plan.graph.storages if item.role is Role.PARAMETER_GRADIENT]
    assert sum(reserved) == (8 + 2) * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_o12_four_micro_batches_several_times(steps: int) -> None:
    """pytorch/pytorch#169545, #96693: accumulated gradients equal one large batch's, again after each update."""
    ours, eager = nn.Linear(6, 3), nn.Linear(6, 3)
    eager.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    step = TrainingStep(ours, lambda y: y.square().mean() / 4, (draw(4, 6),))
    for number in range(steps):
        x = draw(16, 6, seed=number)
        eager(x).square().mean().backward()
        for start in range(0, 16, 4):
            step((x[start : start + 4],))
        for one, two in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
