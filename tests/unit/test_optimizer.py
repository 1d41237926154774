"""The fused optimizers as torch.optim users use them, against torch.optim and float64."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from optimizer_helpers import HALVES, PAIRS, adamw_float64, backend, counted_launches, same, set_gradients, small_model
from optimizer_helpers import snapshot as snapshot_of
from torch import nn

from runtime import TrainingStep, team
from runtime.errors import OptimizerError
from runtime.optimizer import AdamW8bit, FusedAdamW, FusedSGD, compiled


def train(model, optimizer, steps, scheduler=None, first=0):
    for step in range(first, first + steps):
        x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x).float() - x[:, :5].float().sin()).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def distance(one, other):
    return max(
        float((a.detach().double() - b.detach().double()).abs().max())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_the_compiled_update_is_used_here():
    assert compiled.available()


@pytest.mark.parametrize("kernel", ["compiled", "aten"])
@pytest.mark.parametrize("name", PAIRS)
def test_float32_steps_equal_those_of_torch(name, kernel):
    ours, theirs, options = PAIRS[name]
    model, reference = small_model(), small_model()
    with backend(kernel):
        train(model, ours(model.parameters(), **options), 60)
    train(reference, theirs(reference.parameters(), **options), 60)
    assert distance(model, reference) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("master", ["none", "fp32", "split", "stochastic"])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("name", ["adamw", "adam", "nesterov"])
def test_compiled_and_aten_updates_give_the_same_bits(name, states, master, dtype):
    ours, _, options = PAIRS[name]
    ends = []
    for kernel in ("compiled", "aten"):
        torch.manual_seed(0)
        shapes = [(300,), (1,), (7, 43), (513,), (3, 256)]
        parameters = [nn.Parameter((torch.randn(shape) * 10.0**-(i)).to(dtype)) for i, shape in enumerate(shapes)]
        with backend(kernel):
            optimizer = ours(parameters, **options, master=master, states=states, seed=3)
            for step in range(5):
                set_gradients(parameters, step, 10.0 ** (1 - step))
                optimizer.step()
        ends.append(snapshot_of(optimizer))
    assert same(*ends)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_float64_parameters_are_updated_in_float64(dtype):
    model, reference = small_model(dtype), small_model(dtype)
    train(model, FusedAdamW(model.parameters(), lr=1e-2), 40)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 40)
    assert distance(model, reference) < 1e-12


@pytest.mark.parametrize("dtype", HALVES)
def test_one_step_of_a_16_bit_parameter_is_within_its_rounding_of_float64(dtype):
    torch.manual_seed(1)
    start = torch.randn(4099).to(dtype)
    gradient = torch.randn(4099).to(dtype)
    for master in ("none", "fp32", "split", "stochastic"):
        parameter = nn.Parameter(start.clone())
        optimizer = FusedAdamW([parameter], lr=1e-2, master=master)
        parameter.grad = gradient.clone()
        optimizer.step()
        zeros = torch.zeros(4099, dtype=torch.float64)
        exact = adamw_float64(start.double(), zeros, zeros.clone(), gradient.double(), 1, 1e-2)
        units = 1.0 if master == "stochastic" else 0.5
        rounding = units * exact.abs() * 2.0 ** (-7 if dtype is torch.bfloat16 else -10)
        assert bool(((parameter.double() - exact).abs() <= rounding + 2e-6).all()), master
        if master in ("fp32", "split"):
            assert float((optimizer.master(parameter).double() - exact).abs().max()) < 5e-7


def test_many_small_parameters_are_one_launch():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(1 + i % 37)) for i in range(21_000)]
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters[::500]]
    groups = [{"params": parameters[:7000], "lr": 1e-3}, {"params": parameters[7000:], "lr": 1e-2, "weight_decay": 0.0}]
    optimizer = FusedAdamW(groups)
    torch.stack([parameter.sin().sum() for parameter in parameters]).sum().backward()
    with counted_launches() as rows:
        optimizer.step()
    assert len(rows) == 1
    assert optimizer.launches == 1
    assert rows[0] < 40  # neighbours that continue one another are one run
    for number, twin in enumerate(twins):
        lr, decay = (1e-3, 1e-2) if 500 * number < 7000 else (1e-2, 0.0)
        reference = torch.optim.AdamW([twin], lr=lr, weight_decay=decay)
        twin.sin().sum().backward()
        reference.step()
        torch.testing.assert_close(parameters[500 * number], twin, rtol=0, atol=1e-6)


def test_many_small_parameters_are_one_launch_is_no_accident_of_order():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(100)]
    optimizer = FusedAdamW([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 1e-2}])
    set_gradients(parameters, 0)
    with counted_launches() as rows:
        optimizer.step()
    assert len(rows) == 1


def test_every_element_changes_and_the_padding_is_nobodys():
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float16)) for shape in [(1_000_003,), (1,), (70_001, 3)]]
    optimizer = FusedAdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        assert bool((parameter != 1).all())
        assert len(parameter.unique()) == 1


def test_groups_schedulers_and_late_groups_follow_torch():
    def run(kind, model, **extra):
        layers = list(model)
        optimizer = kind([{"params": layers[0].parameters(), "lr": 3e-3}], lr=1e-2, weight_decay=0.1, **extra)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=40)
        train(model, optimizer, 5, scheduler)
        optimizer.add_param_group(
            {"params": [*layers[2].parameters(), *layers[3].parameters()], "lr": 1e-3, "betas": (0.5, 0.9)}
        )
        train(model, optimizer, 20)
        return model

    assert distance(run(FusedAdamW, small_model()), run(torch.optim.AdamW, small_model())) < 2e-6


def test_momentum_may_begin_late():
    model, reference = small_model(), small_model()
    pairs = [
        (model, FusedSGD(model.parameters(), lr=0.1)),
        (reference, torch.optim.SGD(reference.parameters(), lr=0.1)),
    ]
    for each, optimizer in pairs:
        train(each, optimizer, 4)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(each, optimizer, 10)
    assert distance(model, reference) < 2e-6


def test_maximize_and_closures():
    model, reference = small_model(), small_model()
    for each, kind in ((model, FusedAdamW), (reference, torch.optim.AdamW)):
        optimizer = kind(each.parameters(), lr=1e-2, maximize=True)
        x = torch.ones(3, 7)

        def closure(each=each, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = each(x).tanh().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(10)]
        assert losses[-1] > losses[0]
    assert distance(model, reference) < 2e-6


def test_a_parameter_without_gradient_takes_no_part():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    twin = nn.Parameter(torch.ones(3))
    optimizer, reference = FusedAdamW([used, unused], lr=0.1), torch.optim.AdamW([twin], lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        reference.zero_grad()
        (used.sum() + (unused.square().sum() if step == 3 else 0)).backward()
        optimizer.step()
        if step == 3:
            twin.square().sum().backward()
            reference.step()
    assert torch.equal(optimizer.state[unused]["step"], torch.tensor(1.0))
    assert torch.equal(optimizer.state[used]["step"], torch.tensor(6.0))
    torch.testing.assert_close(unused, twin)


@pytest.mark.parametrize("name", PAIRS)
def test_state_goes_to_torch_and_back(name):
    ours, theirs, options = PAIRS[name]
    model, reference = small_model(), small_model()
    fused, plain = ours(model.parameters(), **options), theirs(reference.parameters(), **options)
    train(model, fused, 20)
    train(reference, plain, 20)
    other, another = copy.deepcopy(reference), copy.deepcopy(model)
    from_torch, from_ours = ours(other.parameters(), lr=9.0), theirs(another.parameters(), lr=9.0)
    from_torch.load_state_dict(plain.state_dict())
    from_ours.load_state_dict(fused.state_dict())
    train(other, from_torch, 20, first=20)
    train(another, from_ours, 20, first=20)
    train(reference, plain, 20, first=20)
    assert distance(other, reference) < 2e-6
    assert distance(another, reference) < 2e-6


@pytest.mark.parametrize("options", [{}, {"master": "fp32"}, {"master": "stochastic", "seed": 5}, {"states": "8bit"}])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(options, dtype, model_first):
    whole, half = small_model(dtype), small_model(dtype)
    train(whole, FusedAdamW(whole.parameters(), lr=1e-2, **options), 12)
    optimizer = FusedAdamW(half.parameters(), lr=1e-2, **options)
    train(half, optimizer, 7)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = small_model(dtype, seed=9)
    again = FusedAdamW(resumed.parameters(), lr=5.0, **{**options, "seed": 0})
    if model_first:
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
    else:
        again.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["model"])
    train(resumed, again, 5, first=7)
    assert distance(resumed, whole) == 0.0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_copy_of_model_and_optimizer_goes_on_by_itself(how, dtype):
    model = small_model(dtype)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 5)
    other, theirs = how((model, optimizer))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(other, theirs, 5, first=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    train(model, optimizer, 5, first=5)
    assert distance(model, other) == 0.0
    theirs.step()


def test_named_parameters_are_named_in_messages():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3, sparse=True)})
    optimizer = FusedAdamW(model.named_parameters())
    model["embedding"](torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"embedding.weight has a sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "half"}, "choose one of 'none', 'fp32', 'split', 'stochastic'"),
        ({"states": "4bit"}, "choose one of 'fp32', '8bit'"),
        ({"lr": -1.0}, "none may be negative"),
        ({"betas": (1.0, 0.9)}, "less than 1"),
        ({"max_grad_norm": 0.0}, "positive"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(OptimizerError, match=message):
        FusedAdamW([nn.Parameter(torch.ones(2))], **options)


def test_options_that_are_not_offered_are_refused():
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(OptimizerError, match="amsgrad"):
        FusedAdamW([{"params": [parameter], "amsgrad": True}])
    with pytest.raises(OptimizerError, match="nesterov"):
        FusedSGD([parameter], nesterov=True)
    with pytest.raises(OptimizerError, match="complex64"):
        FusedAdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(2))], amsgrad=True)
    with pytest.raises(OptimizerError, match="amsgrad"):
        FusedAdamW([parameter]).load_state_dict(theirs.state_dict())


def test_hooks_of_torch_are_called():
    model = small_model()
    optimizer = FusedAdamW(model.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["mine"]))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["step", 1, "loaded"]


def test_clipping_equals_torch():
    for dtypes in ([torch.float32] * 3, [torch.float16, torch.float32, torch.bfloat16]):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(500).to(dtype)) for dtype in dtypes]
        twins = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        optimizer = FusedSGD(parameters, lr=1.0, max_grad_norm=0.5, master="fp32")
        reference = torch.optim.SGD(twins, lr=1.0)
        set_gradients(parameters, 0)
        for parameter, twin in zip(parameters, twins, strict=True):
            twin.grad = parameter.grad.float()
        exact = torch.cat([twin.grad.double() for twin in twins]).norm()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
        assert optimizer.grad_norm == pytest.approx(float(exact), rel=1e-6)
        for parameter, twin in zip(parameters, twins, strict=True):
            torch.testing.assert_close(optimizer.master(parameter), twin.detach(), rtol=1e-6, atol=1e-7)


def test_eight_bit_states_take_a_quarter_and_learn():
    model, reference = small_model(), small_model()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    assert optimizer.state[next(model.parameters())]["exp_avg"].dtype is torch.int8
    train(model, optimizer, 200)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 200)
    x = torch.randn(64, 7)
    error, bound = [(m(x) - x[:, :5].sin()).square().mean().item() for m in (model, reference)]
    assert error < 1.3 * bound


def test_moved_parameters_are_followed_without_copies():
    arena = torch.zeros(4096)
    model, reference = small_model(), small_model()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2, link=False)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    train(reference, plain, 3)
    first = 0
    places = []
    for parameter in model.parameters():
        view, gradient = (arena[at : at + parameter.numel()].view(parameter.shape) for at in (first, first + 1024))
        view.copy_(parameter.detach())
        parameter.data = view
        parameter.grad = gradient
        places.append((view, gradient))
        first += 2048 if parameter.numel() > 500 else parameter.numel()
    assert first < 4096
    set_gradients(model.parameters(), 4)
    set_gradients(reference.parameters(), 4)
    with counted_launches() as rows:
        optimizer.step()
    plain.step()
    assert len(rows) == 1
    assert distance(model, reference) < 1e-6
    for parameter, (view, gradient) in zip(model.parameters(), places, strict=True):
        assert parameter.data_ptr() == view.data_ptr()
        assert parameter.grad is gradient


def test_a_linked_optimizer_follows_as_well_and_states_may_be_placed():
    model, reference = small_model(torch.float16), small_model(torch.float16)
    optimizer, other = (FusedAdamW(each.parameters(), lr=1e-2, master="fp32") for each in (model, reference))
    train(model, optimizer, 3)
    train(reference, other, 3)
    optimizer.follow()
    blocks = {name: torch.full_like(block, 7) for name, block in optimizer.state_blocks().items()}
    optimizer.place_states(blocks)
    train(model, optimizer, 3, first=3)
    train(reference, other, 3, first=3)
    assert distance(model, reference) == 0.0
    assert torch.equal(blocks["cpu.float16.exp_avg"], other.state_blocks()["cpu.float16.exp_avg"])
    with pytest.raises(OptimizerError, match="nonsense"):
        optimizer.place_states({"nonsense": torch.zeros(3)})


def test_a_model_converted_after_linking_is_linked_again():
    model = small_model()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    model.to(torch.bfloat16)
    train(model, optimizer, 2, first=2)
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    assert float(optimizer.state[next(model.parameters())]["step"]) == 4.0


def test_a_step_allocates_nothing_after_the_first():
    from runtime.measure import allocations

    model = small_model(torch.float16)
    optimizer = FusedAdamW(model.parameters(), max_grad_norm=1.0)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert allocations(optimizer.step).calls == 0


def test_two_threads_give_the_bits_of_one():
    before = torch.get_num_threads()
    ends = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            parameter = nn.Parameter(torch.randn(1_500_001).to(torch.bfloat16))
            optimizer = FusedAdamW([parameter], master="stochastic")
            set_gradients([parameter], 0)
            optimizer.step()
            ends.append(parameter.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_followed_gradients_are_not_kept_alive():
    model = small_model()
    optimizer = FusedAdamW(model.parameters(), link=False)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None] * len(gradients)


def test_a_planned_training_step_uses_it_without_copies():
    def loss(outputs, target):
        return (outputs - target).square().mean()

    model, reference = small_model(), small_model()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    step = TrainingStep(model, loss, (torch.zeros(4, 7), torch.zeros(4, 5)), optimizer=optimizer)
    addresses = set()
    for number in range(5):
        x, y = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(number)), torch.ones(4, 5)
        step((x[0], y))
        addresses.add(tuple(parameter.data_ptr() for parameter in model.parameters()))
        loss(reference(x[0]), y).backward()
        plain.step()
        plain.zero_grad()
    assert len(addresses) == 1
    assert distance(model, reference) < 2e-6


@pytest.mark.parametrize("rule", [FusedAdamW, FusedSGD])
def test_the_pool_that_stands_in_for_atens_threads_gives_the_same(rule, monkeypatch):
    ends = []
    for stand_in in (False, True):
        if stand_in:
            monkeypatch.setattr(team, "_openmp", lambda: None)
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size, dtype=torch.float16)) for size in (300_001, 3, 70_000)]
        optimizer = rule(parameters, lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            set_gradients(parameters, step)
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in parameters])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
