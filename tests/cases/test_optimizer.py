"""Cases O01 to O20 and I06: what broke other optimizers and loss scalers in public, and its neighbours."""

from __future__ import annotations

import copy
import io
import math
import re
import warnings

import numpy as np
import pytest
import torch
from optimizer_helpers import counted_launches, same, set_gradients, small_model, snapshot
from torch import nn

from runtime import TrainingStep, team
from runtime.errors import LossScaleWarning, OptimizerError, SparseGradientError
from runtime.optimizer import FusedAdam, FusedAdamW, FusedSGD, LossScaler, codes, words
from runtime.optimizer.layout import Segment, chunk_table, lay_out


class Tied(nn.Module):
    """An embedding whose weight is the output projection as well."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Embedding(11, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.how = how
        if how == "same":
            self.decoder.weight = self.encoder.weight
        elif how == "memory":
            self.decoder.weight = nn.Parameter(self.encoder.weight.data)

    def forward(self, x):
        h = self.encoder(x).tanh()
        if self.how == "transposed":
            return h @ self.encoder.weight.t()
        return self.decoder(h)


@pytest.mark.parametrize("how", ["same", "transposed", "memory"])
def test_o01_tied_weights_are_one_slot_one_gradient_one_update(how):
    model, reference = Tied(how), Tied("transposed" if how == "transposed" else "same")
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    x = torch.tensor([1, 4, 4, 10])
    for _ in range(5):
        for each, other in ((model, optimizer), (reference, plain)):
            other.zero_grad()
            nn.functional.cross_entropy(each(x), x.roll(1)).backward()
        torch.testing.assert_close(model.encoder.weight.grad, reference.encoder.weight.grad)
        optimizer.step()
        plain.step()
    torch.testing.assert_close(model.encoder.weight, reference.encoder.weight, rtol=0, atol=1e-6)
    if how == "memory":
        assert model.decoder.weight.data_ptr() == model.encoder.weight.data_ptr()
        assert model.decoder.weight is not model.encoder.weight
        assert model.decoder.weight.grad is model.encoder.weight.grad
    assert sum(block.numel() for block in optimizer.state_blocks().values()) < 2 * (66 + 64) * (
        2 if how != "transposed" else 3
    )


def test_o01_a_parameter_named_twice_is_updated_once():
    weight, twin = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = FusedAdamW([weight, weight])
    assert optimizer.param_groups[0]["params"] == [weight]
    reference = torch.optim.AdamW([twin])
    weight.grad, twin.grad = torch.ones(5), torch.ones(5)
    optimizer.step()
    reference.step()
    assert torch.equal(weight, twin)


def test_o01_parameters_that_share_a_part_of_their_memory_are_refused():
    memory = torch.ones(10)
    with pytest.raises(OptimizerError, match="share a part of their memory"):
        FusedAdamW([nn.Parameter(memory[:6]), nn.Parameter(memory[4:])])
    with pytest.raises(OptimizerError, match="share a part of their memory"):
        FusedAdamW([nn.Parameter(memory.view(2, 5)), nn.Parameter(memory.view(2, 5).t())])


@pytest.mark.parametrize("frozen_place", [0, 1, 2])
def test_o02_frozen_parameters_take_no_bytes_and_do_not_decay(frozen_place):
    parameters = [nn.Parameter(torch.ones(1000)) for _ in range(3)]
    parameters[frozen_place].requires_grad_(False)
    optimizer = FusedAdamW(parameters, lr=0.1, weight_decay=0.5)
    assert sum(block.numel() for block in optimizer.state_blocks().values()) == 2 * 2 * 1024
    for _ in range(3):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
    for number, parameter in enumerate(parameters):
        assert bool((parameter == 1).all()) is (number == frozen_place)
        assert (parameter in optimizer.state) is (number != frozen_place)


def test_o02_thawed_and_frozen_again():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    twins = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer, reference = FusedAdamW([first, second], lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    for step in range(9):
        for parameters, each in (((first, second), optimizer), (twins, reference)):
            parameters[1].requires_grad_(3 <= step < 6)
            each.zero_grad()
            (parameters[0] * parameters[1]).sum().backward()
            each.step()
    for ours, theirs in zip((first, second), twins, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,), (3, 0, 2)])
@pytest.mark.parametrize("place", ["first", "middle", "last", "only"])
def test_o03_o04_empty_parameters_keep_their_shape_wherever_they_stand(shape, place):
    others = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(300))]
    empty = nn.Parameter(torch.empty(shape))
    order = {"first": [empty, *others], "middle": [others[0], empty, others[1]], "last": [*others, empty]}
    parameters = order.get(place, [empty])
    optimizer = FusedAdamW([{"params": parameters}], lr=0.1)
    assert empty.shape == shape
    for _ in range(2):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
    assert empty.shape == shape
    assert empty.grad is not None
    assert optimizer.state[empty]["exp_avg"].shape == shape
    assert all(bool((parameter != 1).all()) for parameter in parameters)
    assert {float(optimizer.state[parameter]["step"]) for parameter in parameters} == {2.0}
    saved = optimizer.state_dict()
    FusedAdamW(parameters).load_state_dict(saved)
    assert empty.shape == shape


def test_o05_empty_groups_and_empty_parameters_count_steps():
    full, empty = nn.Parameter(torch.ones(4)), nn.Parameter(torch.empty(0, 3))
    optimizer = FusedAdamW([{"params": [full]}, {"params": [empty], "lr": 0.5}, {"params": []}], lr=0.1)
    for _ in range(3):
        set_gradients([full, empty], 0)
        optimizer.step()
    state = optimizer.state_dict()
    assert [float(entry["step"]) for entry in state["state"].values()] == [3.0, 3.0]
    assert [len(group["params"]) for group in state["param_groups"]] == [1, 1, 0]
    optimizer.load_state_dict(state)
    set_gradients([full, empty], 1)
    optimizer.step()
    assert float(optimizer.state[empty]["step"]) == float(optimizer.state[full]["step"]) == 4.0


@pytest.mark.parametrize("kind", [FusedAdamW, FusedAdam, FusedSGD])
def test_o06_mixed_dtypes_in_one_list_equal_each_alone(kind):
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64]
    torch.manual_seed(0)
    start = [torch.randn(30 + i).to(dtype) for i, dtype in enumerate(dtypes)]
    together = [nn.Parameter(value.clone()) for value in start]
    alone = [nn.Parameter(value.clone()) for value in start]
    optimizer = kind(together, lr=1e-2)
    each = [kind([parameter], lr=1e-2) for parameter in alone]
    for step in range(5):
        set_gradients(together, step)
        set_gradients(alone, step)
        with counted_launches() as rows:
            optimizer.step()
        assert len(rows) == 3  # float64 goes another way
        for other in each:
            other.step()
    assert optimizer.launches == 4
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_o08_state_saved_before_the_first_step_and_with_missing_keys():
    model, other = small_model(), small_model()
    fresh = FusedAdamW(model.parameters()).state_dict()
    optimizer = FusedAdamW(other.parameters(), lr=1e-2)
    set_gradients(other.parameters(), 0)
    optimizer.step()
    optimizer.load_state_dict(fresh)
    assert all(not entry["exp_avg"].any() and entry["step"] == 0 for entry in optimizer.state.values())
    set_gradients(other.parameters(), 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        del entry["exp_avg"]
    saved["param_groups"][0].pop("maximize")
    saved.pop("fused")
    optimizer.load_state_dict(saved)
    first = next(iter(optimizer.state.values()))
    assert not first["exp_avg"].any()
    assert first["exp_avg_sq"].any()
    assert first["step"] == 1
    assert optimizer.param_groups[0]["maximize"] is False


def test_o08_old_states_with_numbers_for_steps_load():
    parameter = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    theirs.step()
    state = theirs.state_dict()
    state["state"][0]["step"] = 7
    ours = FusedAdamW([parameter])
    ours.load_state_dict(state)
    assert float(ours.state[parameter]["step"]) == 7.0


def test_o08_a_state_of_other_shapes_or_groups_is_refused():
    parameter, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([other])
    set_gradients([other], 0)
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"shape \(4,\)"):
        FusedAdamW([parameter]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="parameter groups"):
        FusedAdamW([parameter, nn.Parameter(torch.ones(1))]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"states": "8bit"}, {"master": "fp32"}])
def test_o09_loading_copies_into_place_and_keeps_no_alias(options):
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    source, target = (FusedAdamW(each.parameters(), lr=1e-2, **options) for each in (model, other))
    set_gradients(model.parameters(), 0)
    source.step()
    addresses = {name: block.data_ptr() for name, block in target.state_blocks().items()}
    parameters = [parameter.data_ptr() for parameter in other.parameters()]
    state = source.state_dict()
    target.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    assert {name: block.data_ptr() for name, block in target.state_blocks().items()} == addresses
    assert [parameter.data_ptr() for parameter in other.parameters()] == parameters
    before = snapshot(target)
    set_gradients(model.parameters(), 1)
    source.step()
    for entry in state["state"].values():
        for tensor in entry.values():
            tensor.zero_()
    assert same(before, snapshot(target))


def saved_nbytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_o10_saved_files_hold_what_they_name_and_nothing_else(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = FusedAdamW(model.parameters())
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert saved_nbytes(model.state_dict()) < nbytes + 8000
    assert saved_nbytes(model[2].state_dict()) < model[2].weight.nbytes + 4000
    assert saved_nbytes(optimizer.state_dict()) < 2 * nbytes + 16000
    tensors = [tensor for entry in optimizer.state_dict()["state"].values() for tensor in entry.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    path = tmp_path / "model.safetensors"
    safetensors.save_model(model, path)
    safetensors.save_file(model.state_dict(), path)
    loaded = safetensors.load_file(path)
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_o10_a_model_outlives_its_optimizer():
    model = small_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = FusedAdamW(model.parameters())
    del optimizer
    junk = [torch.full((4096,), 7.0) for _ in range(50)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    model(torch.ones(2, 7)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    del junk


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_o11_gradient_views_survive_clearing(set_to_none, clear):
    model, reference = small_model(), small_model()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model(torch.ones(1, 7)).sum().backward()
    views = [parameter.grad.data_ptr() for parameter in model.parameters()]
    optimizer.zero_grad()
    for step in range(4):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        for each, other in ((model, optimizer), (reference, plain)):
            each(x).square().sum().backward()
            other.step()
            (other if clear == "optimizer" else each).zero_grad(set_to_none=set_to_none)
            grads = [parameter.grad for parameter in each.parameters()]
            assert all(grad is None if set_to_none else not grad.any() for grad in grads)
        if not set_to_none:
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == views
    model(torch.ones(1, 7)).sum().backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == views
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("planned", [True, False])
def test_o12_micro_batches_accumulate_to_the_gradient_of_the_whole(planned):
    model, reference = small_model(), small_model()
    optimizer, plain = FusedSGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)

    def loss(outputs, target):
        return (outputs - target).square().sum()

    step = TrainingStep(model, loss, (torch.zeros(4, 7), torch.zeros(4, 5))) if planned else None
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 7, generator=generator), torch.randn(16, 5, generator=generator)
        optimizer.zero_grad()
        plain.zero_grad()
        for part, target in zip(x.split(4), y.split(4), strict=True):
            if step is None:
                loss(model(part), target).backward()
            else:
                step((part, target))
        loss(reference(x), y).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


BAD = [math.inf, -math.inf, math.nan]
PLACES = [(0, 0), (0, 7), (1, 65_536), (1, 131_070), (2, 0), (2, -1)]


def guarded(dtype, **options):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n).to(dtype)) for n in (8, 131_071, 300_001)]
    optimizer = FusedAdamW(parameters, lr=1e-2, **options)
    set_gradients(parameters, 0)
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_o13_an_overflow_anywhere_changes_nothing(dtype, bad, place):
    parameters, optimizer = guarded(dtype, skip_nonfinite=True, max_grad_norm=1.0)
    set_gradients(parameters, 1)
    parameters[place[0]].grad[place[1]] = bad
    before = snapshot(optimizer)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.launches == 0
    assert same(before, snapshot(optimizer))
    parameters[place[0]].grad[place[1]] = 1.0
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    assert all(float(optimizer.state[parameter]["step"]) == 2.0 for parameter in parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("bad", [None, *BAD])
def test_o13_grad_scaler_of_torch_unscales_and_skips(dtype, unscale_first, bad):
    parameters, optimizer = guarded(dtype)
    twins, other = guarded(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    set_gradients(parameters, 1, 256.0)
    set_gradients(twins, 1)
    if bad is not None:
        parameters[2].grad[-1] = bad
    before = snapshot(optimizer)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (256.0 if bad is None else 128.0)
    if bad is not None:
        assert same(before, snapshot(optimizer))
        return
    other.step()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    for ours, theirs in zip(parameters, twins, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_o13_grad_scaler_of_torch_with_float16():
    parameters, optimizer = guarded(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    scaler.scale(torch.ones(()))
    set_gradients(parameters, 1)
    parameters[0].grad[3] = math.inf
    before = snapshot(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert same(before, snapshot(optimizer))
    assert scaler.get_scale() == 2.0**14


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_o13_our_scaler_with_and_without_unscaling_first(dtype):
    for unscale_first in (True, False):
        parameters, optimizer = guarded(dtype)
        scaler = LossScaler(64.0)
        set_gradients(parameters, 1)
        parameters[2].grad[-1] = math.nan
        before = snapshot(optimizer)
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) is False
        assert same(before, snapshot(optimizer))
        assert scaler.update() == 32.0


def test_o13_without_a_scaler_nan_is_not_hidden_where_torch_would_show_it():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([parameter])
    parameter.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert parameter.isnan().tolist() == [False, True, False]


def test_o16_a_collapsing_scale_stops_at_its_floor_and_a_run_recovers():
    model = small_model(torch.float16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    scaler = LossScaler(2.0**24, min_scale=1.0, growth_interval=5)
    x = torch.randn(8, 7, dtype=torch.float16)
    skipped = 0
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean()).backward()
        skipped += not scaler.step(optimizer)
        scaler.update()
    assert 0 < skipped < 30
    assert scaler.skipped_steps == skipped
    assert scaler.state_dict()["skipped_steps"] == skipped
    assert float(optimizer.state[model[0].weight]["step"]) == 40 - skipped
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(40):
            model[0].weight.grad.fill_(math.nan)
            assert not scaler.step(optimizer)
            scaler.update()
    assert [item.category for item in seen] == [LossScaleWarning]
    assert re.search(r"floor of 1 .*\d+ steps skipped in a row, \d+ in all", str(seen[0].message))
    assert scaler.get_scale() == 1.0


def test_o18_channels_last_and_other_strides():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 3, padding=1))
        return model.to(memory_format=torch.channels_last)

    model, reference = build(), build()
    strides = [parameter.stride() for parameter in model.parameters()]
    optimizer, plain = FusedAdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    assert [parameter.stride() for parameter in model.parameters()] == strides
    for step in range(4):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        x = x.to(memory_format=torch.channels_last) if step % 2 else x
        for each, other in ((model, optimizer), (reference, plain)):
            other.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
            assert ours.grad.stride() == ours.stride()
        optimizer.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert optimizer.state[model[1].weight]["exp_avg"].stride() == model[1].weight.stride()


@pytest.mark.parametrize("link", [True, False])
def test_o18_a_gradient_with_other_strides_than_its_parameter_counts_by_value(link):
    for strides in ((1, 4), (8, 2), (0, 1)):
        parameter, twin = (nn.Parameter(torch.arange(20.0).view(4, 5)) for _ in range(2))
        optimizer, reference = FusedAdamW([parameter], lr=0.1, link=link), torch.optim.AdamW([twin], lr=0.1)
        parameter.grad = torch.randn(40).as_strided((4, 5), strides)
        twin.grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(parameter, twin, rtol=0, atol=4e-6)


def test_o18_parameters_with_gaps_between_their_elements():
    memory = torch.randn(6, 10)
    parameter, twin = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, ::2].clone())
    optimizer, reference = FusedAdamW([parameter], lr=0.1), torch.optim.AdamW([twin], lr=0.1)
    for each, other in ((parameter, optimizer), (twin, reference)):
        each.sin().sum().backward()
        other.step()
    torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedAdamW, FusedAdam, FusedSGD])
@pytest.mark.parametrize("link", [True, False])
def test_o20_sparse_gradients_are_refused_before_anything_changes(kind, link):
    embedding, head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)
    optimizer = kind([*embedding.named_parameters("embedding"), *head.named_parameters("head")], link=link)
    head(embedding(torch.tensor([1, 1, 2]))).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(SparseGradientError, match=r"embedding.weight has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert same(before, snapshot(optimizer))


def test_i06_the_layout_of_a_workspace_past_two_to_the_31_elements():
    lengths = [5, 2**31 + 7, 0, 2**33 + 1, 3]
    segments = lay_out(lengths, 256)
    assert [segment.offset for segment in segments] == [0, 256, 2**31 + 512, 2**31 + 512, 2**31 + 2**33 + 768]
    base, gradients = 2**40, 2**45
    where = [base + 2 * segment.offset for segment in segments]
    from_where = [gradients + 2 * segment.offset for segment in segments]
    table = chunk_table(
        segments, where, from_where, [0, 0, 0, 1, 1], np.zeros(5, dtype=np.int64), (base, gradients), 2, 2**24
    )
    assert table.dtype == np.int64
    covered = 0
    for group in (0, 1):
        rows = table[table[:, codes.GROUP] == group]
        start = rows[0, codes.STATE]
        assert rows[:, codes.STATE].tolist() == (start + 2**24 * np.arange(len(rows))).tolist()
        assert (rows[:, codes.PARAMETER] == base + 2 * rows[:, codes.STATE]).all()
        assert (rows[:, codes.GRADIENT] == gradients + 2 * rows[:, codes.STATE]).all()
        assert (rows[:-1, codes.LENGTH] == 2**24).all()
        covered += int(rows[:, codes.LENGTH].sum())
        assert rows[-1, codes.STATE] + rows[-1, codes.LENGTH] == (segments[1] if not group else segments[4]).offset + (
            2**31 + 7 if not group else 3
        )
    assert covered == 256 + 2**31 + 7 + (2**33 + 256 + 3)


@pytest.mark.parametrize("master", [codes.NONE, codes.MASTER, codes.SPLIT, codes.STOCHASTIC])
@pytest.mark.parametrize("moments", [codes.FULL, codes.BYTES])
@pytest.mark.parametrize("offset", [2**31 - 512, 2**31, 2**32 + 256, 2**36])
def test_i06_the_update_reaches_states_past_two_to_the_31_elements(offset, moments, master):
    from runtime.optimizer.update_kernel import update_adam

    ends = []
    for at in (0, offset):
        torch.manual_seed(0)
        parameter, gradient = torch.randn(1000).half(), torch.randn(1000).half()
        kept = (parameter.float(), torch.zeros(1024, dtype=torch.int16))[master == codes.SPLIT]
        kinds = (torch.float32,) * 2 if moments == codes.FULL else (torch.int8, torch.uint8)
        m, v = (torch.zeros(1024, dtype=kind) for kind in kinds)
        m_scales, v_scales = torch.zeros(4), torch.zeros(4)
        table = np.array([[parameter.data_ptr(), gradient.data_ptr(), at, 1000, 0, 0]], dtype=np.int64)
        setting = np.array([[1e-2, 0.9, 0.999, 1e-8, 0.01, 1.0, 1.0]])
        start = parameter.clone()
        # Addresses of a state element 0 that would lie far before these small tensors.
        bases = [block.data_ptr() - block.element_size() * at for block in (kept, m, v)]
        scales = [block.data_ptr() - 4 * (at // codes.TILE) for block in (m_scales, v_scales)]
        steps = np.zeros(1, dtype=np.float32)
        given = np.zeros(words.COUNT, dtype=np.int64)
        given[words.TABLE : words.MOMENTS] = [
            *(table.ctypes.data, 1),
            *(setting.ctypes.data, 1),
            *(steps.ctypes.data, 1),
        ]
        given[words.MOMENTS] = moments
        given[words.SCALE : words.SCALE + 1].view(np.float64)[0] = 1.0
        given[words.KEPT :] = [*bases, *scales]
        team.share(update_adam(codes.FLOAT16, master), given, 1)
        assert bool((parameter != start).all())
        ends.append((parameter, kept, m, v, m_scales, v_scales))
    exact = master != codes.STOCHASTIC and moments == codes.FULL  # random bits belong to an element's number
    for one, other in zip(*ends, strict=True):
        if exact:
            assert torch.equal(one, other)
        elif one.dtype.is_floating_point:
            torch.testing.assert_close(one.float(), other.float(), rtol=2e-3, atol=1e-5)


def test_i06_every_element_of_a_large_parameter_changes():
    parameter = nn.Parameter(torch.ones(5_000_011, dtype=torch.bfloat16))
    optimizer = FusedAdamW([parameter], lr=0.1, states="8bit")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(parameter.detach().unique()) == 1
    assert bool((parameter.detach() != 1).all())


def test_segments_are_what_they_say():
    assert lay_out([0, 1, 64, 65], 64) == (
        Segment(0, 0, 0),
        Segment(0, 1, 64),
        Segment(64, 64, 64),
        Segment(128, 65, 128),
    )


def test_copies_of_an_optimizer_alone_are_independent():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    other = twin.param_groups[0]["params"][0]
    assert other is not parameter
    assert other.data_ptr() != parameter.data_ptr()
    other.grad = torch.ones(4)
    twin.step()
    assert float(optimizer.state[parameter]["step"]) == 1.0
    assert float(twin.state[other]["step"]) == 2.0
