"""What a program does to an optimizer's parameters, gradients, groups and states between steps, held against torch."""

from __future__ import annotations

import copy
import io
import random
from collections import defaultdict

import pytest
import torch
from optimizer_helpers import backend
from torch import nn

from runtime.errors import OptimizerError
from runtime.optimizer import FusedAdam, FusedAdamW, FusedSGD

OURS_AND_TORCHS = (FusedAdamW, torch.optim.AdamW)


def parameters(count=2, shape=(4,)):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def give(held, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in held:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def outcomes(program, kinds=OURS_AND_TORCHS):
    """What a program of an optimizer's class leaves behind: with ours, and with torch's."""
    return [[tensor.detach().clone() for tensor in program(kind)] for kind in kinds]


def alike(program, kinds=OURS_AND_TORCHS):
    for ours, theirs in zip(*outcomes(program, kinds), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_parameter_that_grows_takes_its_states_along():
    """As programs do that add rows to an embedding, or points to a scene."""

    def program(kind):
        held = parameters()
        optimizer = kind(held, lr=0.1)
        give(held, 0)
        optimizer.step()
        state = optimizer.state.pop(held[0])
        grown = nn.Parameter(torch.cat([held[0].detach(), torch.ones(2)]))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat([state[name], torch.zeros(2)])
        optimizer.state[grown] = state
        optimizer.param_groups[0]["params"][0] = held[0] = grown
        for seed in (1, 2):
            give(held, seed)
            optimizer.step()
        return held

    alike(program)


@pytest.mark.parametrize("change", ["group removed", "group added", "parameter added", "parameter moved"])
def test_groups_edited_by_hand(change):
    def program(kind):
        held = parameters(3)
        groups = [{"params": [held[0]], "lr": 0.1}, {"params": [held[1]], "lr": 0.5}]
        optimizer = kind(groups)
        give(held, 0)
        optimizer.step()
        if change == "group removed":
            del optimizer.param_groups[0]
        elif change == "group added":
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [held[2]], "lr": 0.3})
        elif change == "parameter added":
            optimizer.param_groups[1]["params"].append(held[2])
        else:
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        for seed in (1, 2):
            give(held, seed)
            optimizer.step()
        return held

    alike(program)


def _reset(optimizer, _):
    optimizer.state = defaultdict(dict)


def _forget_one(optimizer, held):
    del optimizer.state[held[0]]


def _replace_values(optimizer, held):
    optimizer.state[held[0]]["exp_avg"] = torch.full((4,), 0.25)
    optimizer.state[held[0]].update(step=torch.tensor(7.0))


@pytest.mark.parametrize("edit", [_reset, lambda optimizer, _: optimizer.state.clear(), _forget_one, _replace_values])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_states_that_are_reset_or_replaced_count(edit, states):
    def program(kind, **options):
        held = parameters()
        optimizer = kind(held, lr=0.1, **options)
        for seed in (0, 1):
            give(held, seed)
            optimizer.step()
        edit(optimizer, held)
        give(held, 2)
        optimizer.step()
        return [*held, *(optimizer.state[parameter]["step"] for parameter in held)]

    ours = program(FusedAdamW, states=states)
    theirs = program(torch.optim.AdamW)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if states == "fp32" else 0.03)


def test_states_that_are_read_copied_and_saved_change_nothing():
    held = [*parameters(), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer = FusedAdamW(held, lr=0.1)
    give(held[:2], 0)
    optimizer.step()
    shown = optimizer.state[held[0]]["exp_avg"]
    assert optimizer.state[held[2]] == {}
    assert type(copy.copy(optimizer.state)) is dict
    file = io.BytesIO()
    torch.save({"state": optimizer.state, "entry": optimizer.state[held[0]]}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["entry"]["exp_avg"], shown)
    give(held[:2], 1)
    optimizer.step()
    assert optimizer.state[held[0]]["exp_avg"] is shown, "nothing was laid out anew"
    assert not optimizer.state.touched


def test_eight_bit_codes_are_no_states_of_another_parameter():
    held = parameters(shape=(300,))
    optimizer = FusedAdamW(held, states="8bit")
    give(held, 0)
    optimizer.step()
    optimizer.state[held[0]] = {**optimizer.state[held[1]]}
    give(held, 1)
    with pytest.raises(OptimizerError, match="give it in float32"):
        optimizer.step()


@pytest.mark.parametrize("how", ["late group", "loaded", "copied"])
def test_a_frozen_parameter_keeps_its_states_until_it_is_thawed(how):
    def program(kind):
        held = parameters(3)
        optimizer = kind(held[:2], lr=0.1)
        give(held[:2], 0)
        optimizer.step()
        optimizer.zero_grad()
        held[1].requires_grad_(False)
        if how == "late group":
            optimizer.add_param_group({"params": [held[2]]})
        elif how == "loaded":
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            held = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in held]
            optimizer = kind(held[:2], lr=0.1)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        else:
            held, optimizer = copy.deepcopy((held, optimizer))
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]
        give(held[:1], 1)
        optimizer.step()
        held[1].requires_grad_(True)
        give(held[:2], 2)
        optimizer.step()
        return held[:2]

    alike(program)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_a_frozen_parameter_over_the_same_memory_moves_along(frozen_first):
    def program(kind):
        weight = nn.Parameter(torch.linspace(-1, 1, 5))
        shown = nn.Parameter(weight.data, requires_grad=False)
        optimizer = kind([shown, weight] if frozen_first else [weight, shown], lr=0.1)
        weight.grad = torch.ones(5)
        optimizer.step()
        return weight, shown

    alike(program)


def test_columns_of_one_matrix_are_no_overlap_but_parts_of_each_other_are():
    def program(kind):
        matrix = torch.arange(32.0).view(4, 8)
        held = [nn.Parameter(matrix[:, :3]), nn.Parameter(matrix[:, 3:])]
        optimizer = kind(held, lr=0.1)
        give(held, 0)
        optimizer.step()
        return held

    alike(program)
    matrix = torch.ones(4, 8)
    with pytest.raises(OptimizerError, match="share a part of their memory"):
        FusedAdamW([nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 3:])])
    with pytest.raises(OptimizerError, match="share a part of their memory"):
        FusedAdamW([nn.Parameter(torch.Tensor(matrix[:2])), nn.Parameter(matrix[1:3], requires_grad=False)])


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("link", [True, False])
def test_a_gradient_whose_data_was_replaced_by_one_of_other_strides(link):
    def program(kind):
        weight = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        optimizer = kind([weight], lr=0.1, **({"link": link} if kind is FusedAdamW else {}))
        new = torch.linspace(-1, 1, 24).view(2, 3, 2, 2)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        for _ in range(2):
            weight.grad.data = new.clone()
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        cleared = weight.grad.clone()
        weight.square().sum().backward()
        optimizer.step()
        return weight, cleared

    alike(program)


@pytest.mark.parametrize("link", [True, False])
def test_gradients_that_are_negated_when_read(link):
    """pytorch: the imaginary part of a conjugate shares the number's memory and changes its sign as it is read."""

    def program(kind):
        number = nn.Parameter(torch.tensor(1.0))
        optimizer = kind([number], lr=0.1, **({"link": link} if kind is FusedAdamW else {}))
        number.grad = torch.tensor(1 + 2j).conj().imag
        optimizer.step()
        return (number,)

    alike(program)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_can_be_differentiated():
    def program(kind):
        weight = nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = kind([weight], lr=0.1)
        curvatures = []
        for _ in range(3):
            optimizer.zero_grad()
            (weight**3).sum().backward(create_graph=True)
            curvatures += torch.autograd.grad(weight.grad.sum(), weight)
            optimizer.step()
        optimizer.zero_grad()
        weight.square().sum().backward()
        assert weight.grad.grad_fn is None
        return weight, *curvatures

    alike(program)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("seed", range(20))
def test_tied_parameters_have_one_gradient_however_backwards_follow_each_other(seed):
    def program(kind):
        chosen = random.Random(seed)
        first = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        second = nn.Parameter(first.data) if kind is FusedSGD else first
        optimizer = kind([first, second] if kind is FusedSGD else [first], lr=0.01)
        seen = []
        for _ in range(8):
            loss = torch.zeros((), dtype=torch.float64)
            for part, weight in ((lambda x: (x**3).sum(), first), (lambda x: x.sin().sum(), second)):
                loss = loss + part(weight) if chosen.random() < 0.7 else loss
            if loss.requires_grad:
                loss.backward(create_graph=chosen.random() < 0.5)
            held = {id(weight.grad): weight.grad for weight in (first, second) if weight.grad is not None}
            assert len(held) <= 1
            seen += [gradient.detach().clone() for gradient in held.values()]
            what = chosen.random()
            if what < 0.3:
                optimizer.zero_grad(set_to_none=what < 0.2)
            elif what < 0.7:
                optimizer.step()
        return first, second, *seen

    alike(program, (FusedSGD, torch.optim.SGD))


def test_lazy_modules_join_when_they_have_a_shape():
    def program(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model.parameters()

    alike(program)


def test_what_cannot_be_updated_is_refused_in_one_line():
    with pytest.raises(OptimizerError, match="device meta"):
        FusedAdamW(nn.Linear(3, 3, device="meta").parameters())
    with pytest.raises(OptimizerError, match="gaps in its memory"):
        FusedAdamW([nn.Parameter(torch.ones(4, 8)[:, ::2])], link=False)
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([weight])
    weight.data = torch.ones(9)
    with pytest.raises(OptimizerError, match=r"shape \(9,\), its states \(4,\)"):
        optimizer.step()
    optimizer = FusedAdamW([nn.Parameter(torch.ones(4))])
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones(4)
    optimizer.step()
    weight.grad.data = torch.ones(5)
    with pytest.raises(OptimizerError, match=r"gradient of .* has shape \(5,\)"):
        optimizer.step()


@pytest.mark.parametrize("name", ["compiled", "aten"])
def test_momentum_that_is_switched_on_in_a_copy_begins_undamped(name):
    def program(kind):
        held = parameters()
        optimizer = kind(held, lr=0.1, dampening=0.5)
        give(held, 0)
        optimizer.step()
        held, optimizer = copy.deepcopy((held, optimizer))
        optimizer.param_groups[0]["momentum"] = 0.9
        for step in (1, 2):
            give(held, step)
            optimizer.step()
        return held

    with backend(name):
        alike(program, (FusedSGD, torch.optim.SGD))


@pytest.mark.parametrize("name", ["compiled", "aten"])
def test_momentum_that_is_switched_on_late_begins_undamped(name):
    def program(kind):
        held = parameters()
        optimizer = kind([{"params": [held[0]]}, {"params": [held[1]], "momentum": 0.5}], lr=0.1, dampening=0.5)
        for step in range(6):
            optimizer.param_groups[0]["momentum"] = 0.9 if step in (2, 3, 5) else 0.0
            give(held, step)
            optimizer.step()
            if step == 3:
                saved = optimizer.state_dict()
                optimizer = kind([{"params": [held[0]]}, {"params": [held[1]]}], lr=0.1)
                optimizer.load_state_dict(saved)
        return held

    with backend(name):
        alike(program, (FusedSGD, torch.optim.SGD))


def test_arguments_of_torch_that_choose_its_implementation():
    weight = nn.Parameter(torch.ones(2))
    for kind in (FusedAdamW, FusedAdam):
        optimizer = kind([weight], 1e-3, (0.9, 0.99), 1e-8, 0.1, False, foreach=True, fused=False, capturable=False)
        assert optimizer.defaults["amsgrad"] is False
        with pytest.raises(OptimizerError, match="amsgrad"):
            kind([weight], amsgrad=True)
        with pytest.raises(OptimizerError, match="capturable"):
            kind([weight], capturable=True)
    FusedSGD([weight], foreach=True, fused=None)
    with pytest.raises(OptimizerError, match="differentiable"):
        FusedSGD([weight], differentiable=True)

    def decoupled(kind):
        held = parameters()
        optimizer = kind(held, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True)
        optimizer = copy.deepcopy(optimizer)
        held = optimizer.param_groups[0]["params"]
        for seed in (0, 1):
            give(held, seed)
            optimizer.step()
        return held

    alike(decoupled, (FusedAdam, torch.optim.Adam))


@pytest.mark.parametrize(
    "options",
    [
        *({name: float("nan")} for name in ("lr", "eps", "weight_decay")),
        *({"betas": betas} for betas in ((0.9,), 0.9)),
        *({"seed": seed} for seed in (2**64, 1.5, None)),
    ],
)
def test_settings_that_are_no_numbers_are_refused(options):
    with pytest.raises(OptimizerError):
        FusedAdamW([nn.Parameter(torch.ones(2))], **options)
    if "lr" in options or "weight_decay" in options:
        with pytest.raises(OptimizerError):
            FusedSGD([nn.Parameter(torch.ones(2))], **options)


def test_a_scale_of_zero_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.grad_scale = torch.tensor(0.0)
    with pytest.raises(OptimizerError, match="grad_scale=0"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2))
