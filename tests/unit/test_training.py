"""`TrainingStep` beside an ordinary PyTorch loop: losses, gradients, parameters, buffers, checkpoints, memory."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime import TrainingStep
from runtime.measure import allocations


def net(seed: int = 0, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),  # in front of a batch norm a bias has only rounding noise for a gradient
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def same_state(one: nn.Module, two: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_ten_steps_follow_eager(optimizer: type[torch.optim.Optimizer]) -> None:
    ours, eager = net(), net()
    ours_optimizer, eager_optimizer = (optimizer(m.parameters(), lr=0.05) for m in (ours, eager))
    step = TrainingStep(ours, F.cross_entropy, batch(0))
    kept = []
    for number in range(10):
        torch.manual_seed(number)
        x, target = batch(number)
        eager_loss = F.cross_entropy(eager(x), target)
        eager_loss.backward()
        torch.manual_seed(number)
        loss = step(batch(number))
        torch.testing.assert_close(loss, eager_loss.detach())
        for (name, a), (_, b) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
        for made in (ours_optimizer, eager_optimizer):
            made.step()
            made.zero_grad(set_to_none=number % 2 == 0)
        kept.append((loss, eager_loss.item()))
    same_state(ours, eager)
    for loss, value in kept:
        assert loss.item() == pytest.approx(value), "a loss the caller keeps is not overwritten"


def test_the_optimizer_can_be_part_of_the_step() -> None:
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    step = TrainingStep(ours, F.cross_entropy, batch(0), optimizer=torch.optim.AdamW(ours.parameters(), lr=0.01))
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for number in range(5):
        optimizer.zero_grad()
        x, target = batch(number)
        F.cross_entropy(eager(x), target).backward()
        optimizer.step()
        step(batch(number))
    same_state(ours, eager)


def test_o12_gradients_accumulate_over_micro_batches() -> None:
    """pytorch/pytorch#169545, #96693: four micro-batches equal one large batch."""
    model = nn.Linear(6, 3)
    x, target = batch(0, rows=16)
    F.cross_entropy(model(x), target).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    step = TrainingStep(model, lambda y, t: F.cross_entropy(y, t) / 4, (x[:4], target[:4]))
    for start in range(0, 16, 4):
        step((x[start : start + 4], target[start : start + 4]))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_o11_gradients_come_back_after_they_were_dropped() -> None:
    """facebookresearch/fairscale#354."""
    model = nn.Linear(6, 3)
    step = TrainingStep(model, F.cross_entropy, batch(0))
    step(batch(0))
    first = model.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    assert model.weight.grad is None
    step(batch(0))
    torch.testing.assert_close(model.weight.grad, first)


def test_o10_a_checkpoint_holds_only_the_parameters() -> None:
    """pytorch/pytorch#1995: a saved view writes its whole storage."""
    model = net()
    step = TrainingStep(model, F.cross_entropy, batch(0))
    step(batch(0))
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    elements = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert file.tell() < elements + 16 * 2**10
    pointers = {tensor.untyped_storage().data_ptr() for tensor in step.state_dict().values()}
    assert len(pointers) == len(step.state_dict())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    for number in range(3):
        step(batch(number))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    step.load_state_dict(saved)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, saved[name])


def test_resuming_from_a_checkpoint_continues_the_same_curve() -> None:
    def run(step: TrainingStep, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            losses.append(step(batch(number)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = TrainingStep(model, F.cross_entropy, batch(0))
    run(step, optimizer, range(3))
    saved, state = step.state_dict(), copy.deepcopy(optimizer.state_dict())
    expected = run(step, optimizer, range(3, 6))
    other = net(seed=9)
    other.load_state_dict(saved)
    again = torch.optim.AdamW(other.parameters(), lr=0.05)
    again.load_state_dict(state)
    assert run(TrainingStep(other, F.cross_entropy, batch(0)), again, range(3, 6)) == expected


def test_batches_of_other_shapes_share_one_arena() -> None:
    """meta-pytorch/torchtune#1236: batches of varying length."""
    ours, eager = net(dropout=0.0), net(dropout=0.0)
    step = TrainingStep(ours, F.cross_entropy, batch(0, rows=4))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager)]
    for number, rows in enumerate([4, 16, 2, 16, 4, 7, 2]):
        x, target = batch(number, rows=rows)
        loss = F.cross_entropy(eager(x), target)
        loss.backward()
        torch.testing.assert_close(step((x, target)), loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_state(ours, eager)
    pointers = [p.data_ptr() for p in ours.parameters()]
    for rows in (2, 4, 16):
        step(batch(1, rows=rows))
        step(batch(1, rows=rows))
        assert allocations(lambda r=rows: step(batch_cache[r])).calls == 0
    assert pointers == [p.data_ptr() for p in ours.parameters()]


batch_cache = {rows: batch(1, rows=rows) for rows in (2, 4, 16)}


def test_frozen_tied_and_unused_parameters() -> None:
    """O01, O02: one slot and one gradient for tied weights; none for frozen or unused ones."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
            self.unused = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(self.embedding(tokens)).relu())

    torch.manual_seed(0)
    ours = Model()
    eager = copy.deepcopy(ours)
    tokens = torch.randint(0, 11, (4, 5))
    step = TrainingStep(ours, lambda y: y.square().mean(), (tokens,))
    frozen = ours.frozen.weight.clone()
    for _ in range(3):
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (ours, eager)]
        loss = eager(tokens).square().mean()
        loss.backward()
        torch.testing.assert_close(step((tokens,)), loss.detach())
        torch.testing.assert_close(ours.embedding.weight.grad, eager.embedding.weight.grad)
        assert ours.head.weight is ours.embedding.weight
        assert ours.unused.weight.grad is None
        assert ours.frozen.weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.frozen.weight, frozen, rtol=0, atol=0)
    gradients = [port for port in step.plan.graph.gradients if port.tensor is not None]
    assert len(gradients) == 1


def test_a_dict_batch_and_a_model_with_its_own_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.linear(x)
            return {"loss": F.cross_entropy(y, labels), "logits": y}

    model = Model()
    x, labels = batch(2)
    expected = model(x, labels)["loss"].item()
    assert TrainingStep(model, None, {"x": x, "labels": labels})({"x": x, "labels": labels}).item() == pytest.approx(
        expected
    )
    loss = TrainingStep(model, lambda out, b: out["logits"].sum() * b["x"].mean(), {"x": x, "labels": labels})
    expected = (model(x, labels)["logits"].sum() * x.mean()).item()
    assert loss({"x": x, "labels": labels}).item() == pytest.approx(expected, rel=1e-5)


def test_a_steady_step_allocates_nothing_and_peaks_stay() -> None:
    """L11: the second run needs no more memory than the first."""
    model = net()
    step = TrainingStep(model, F.cross_entropy, batch(0))
    data = batch(3)
    for _ in range(3):
        step(data)
        model.zero_grad(set_to_none=True)
        assert allocations(lambda: step(data)).calls == 0
        model.zero_grad(set_to_none=True)


def test_release_gives_the_model_its_memory_back() -> None:
    model = net()
    step = TrainingStep(model, F.cross_entropy, batch(0))
    step(batch(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step.release()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
