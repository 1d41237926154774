"""Masters, remainders, random rounding and 8-bit codes: exact where they claim to be, unbiased where they round."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_helpers import HALVES, adamw_float64, set_gradients, small_model
from torch import nn

from runtime.optimizer import FusedAdam, FusedAdamW, FusedSGD, Precision, codes, convert
from runtime.optimizer.aten import mix_number, random_bits, rounded_at_random, stream_key

FLOATS = st.lists(
    st.one_of(
        st.floats(width=32, allow_nan=True, allow_infinity=True),
        st.floats(min_value=-(2.0**-13), max_value=2.0**-13, width=32),
        st.integers(-(2**31), 2**31 - 1).map(lambda bits: torch.tensor(bits, dtype=torch.int32).view(torch.float32)),
    ).map(float),
    min_size=1,
    max_size=40,
)


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x).float() - x[:, :5].float().sin()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
@given(values=FLOATS)
@settings(max_examples=100, deadline=None)
def test_a_split_value_comes_back_and_rounds_to_its_parameter(dtype, values):
    value = torch.tensor(values, dtype=torch.float32)
    grid = convert.to_grid(value, dtype)
    parameter, remainder = convert.split(value, dtype)
    assert torch.equal(parameter.isnan(), value.isnan())
    shown = ~value.isnan()
    assert torch.equal(parameter[shown], grid.to(dtype)[shown])
    finite = parameter.isfinite()
    assert torch.equal(convert.joined(parameter, remainder)[finite], grid[finite])
    near = (value - grid).abs()[finite]
    if dtype is torch.float16:
        assert bool((near <= 2.0**-40).all())
        assert torch.equal(grid[finite & (value.abs() >= 2.0**-16)], value[finite & (value.abs() >= 2.0**-16)])
    else:
        assert bool((near <= value[finite].abs() * 2.0**-23).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_number_with_no_remainder_is_itself(dtype):
    parameter = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    parameter = parameter[parameter.isfinite()]
    top, rest = convert.split(parameter.float(), dtype)
    assert torch.equal(top, parameter)
    assert not rest.any()
    assert torch.equal(convert.joined(top, rest), parameter.float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("kind", [FusedAdamW, FusedAdam, FusedSGD])
def test_split_equals_the_fp32_master_exactly(dtype, states, kind):
    ends = []
    for master in ("fp32", "split"):
        model = small_model(dtype)
        options = {"momentum": 0.9} if kind is FusedSGD else {}
        optimizer = kind(model.parameters(), lr=3e-3, master=master, states=states, **options)
        train(model, optimizer, 60)
        ends.append(
            [tensor for p in model.parameters() for tensor in (p.detach().clone(), optimizer.master(p))]
            + [optimizer.state[p][optimizer.moments()[0][0]] for p in model.parameters()]
        )
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6, 1e-8])
def test_split_equals_the_fp32_master_near_zero_and_across_it(dtype, scale):
    ends = []
    for master in ("fp32", "split"):
        torch.manual_seed(0)
        parameter = nn.Parameter((torch.randn(5000) * scale).to(dtype))
        optimizer = FusedSGD([parameter], lr=scale / 3, master=master)
        for step in range(60):
            set_gradients([parameter], step)
            optimizer.step()
        ends.append((parameter.detach().clone(), optimizer.master(parameter)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][0], ends[0][1].to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_masters_stay_within_fp32_of_float64(dtype, master):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(2000).to(dtype))
    optimizer = FusedAdamW([parameter], lr=1e-3, master=master)
    exact = parameter.detach().double()
    m, v = torch.zeros_like(exact), torch.zeros_like(exact)
    for step in range(1, 201):
        set_gradients([parameter], step)
        exact = adamw_float64(exact, m, v, parameter.grad.double(), step, 1e-3)
        optimizer.step()
    assert float((optimizer.master(parameter).double() - exact).abs().max()) < 6e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_without_a_master_small_updates_stagnate_and_with_one_they_do_not(dtype):
    moved = {}
    for master in ("none", "stochastic", "split", "fp32"):
        parameter = nn.Parameter(torch.full((4096,), 2.0, dtype=dtype))
        optimizer = FusedSGD([parameter], lr=1e-5, master=master)
        parameter.grad = torch.ones_like(parameter)
        for _ in range(1000):
            optimizer.step()
        moved[master] = 2.0 - float(parameter.detach().double().mean())
    assert moved["none"] == 0.0
    unit = 2.0 ** (-7 if dtype is torch.bfloat16 else -10)
    assert moved["fp32"] == pytest.approx(1e-2, abs=unit)
    assert moved["split"] == moved["fp32"]
    assert moved["stochastic"] == pytest.approx(1e-2, rel=0.15)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1.0003, -0.3333, 65000.0, 7.1e-5, 3.3e-5, -1.7e-7, 2.0e-8])
def test_random_rounding_takes_a_neighbour_and_has_the_right_mean(dtype, value):
    exact = torch.full((200_000,), value, dtype=torch.float32)
    rounded = rounded_at_random(exact, random_bits(stream_key(1, 2, 0), 0, exact.numel(), exact.device), dtype)
    values = sorted(rounded.double().unique().tolist())
    assert len(values) <= 2
    assert values[0] <= float(exact[0]) <= values[-1]
    gap = values[-1] - values[0]
    assert float(rounded.double().mean()) == pytest.approx(float(exact[0]), abs=gap * 4 / math.sqrt(200_000))


@pytest.mark.parametrize("dtype", HALVES)
def test_random_rounding_leaves_what_is_exact_infinite_or_nan(dtype):
    exact = torch.tensor([0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 0.09375])
    for step in range(50):
        random = random_bits(stream_key(1, step, 0), 0, exact.numel(), exact.device)
        torch.testing.assert_close(
            rounded_at_random(exact, random, dtype).float(), exact, rtol=0, atol=0, equal_nan=True
        )


def test_random_bits_differ_between_steps_seeds_and_halves_of_the_index():
    keys = {stream_key(seed, step, high) for seed in range(5) for step in range(5) for high in range(5)}
    assert len(keys) == 125
    assert int(random_bits(keys.pop(), 2**32 - 2, 4, torch.device("cpu")).unique().numel()) == 4
    assert mix_number(0) == 0
    bits = random_bits(12345, 0, 1 << 16, torch.device("cpu"))
    ones = torch.stack([(bits >> bit & 1).double().mean() for bit in range(32)])
    assert float((ones - 0.5).abs().max()) < 0.01


@given(
    values=st.lists(st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), min_size=1, max_size=600),
    signed=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_8_bit_codes_are_close_and_stay_themselves(values, signed):
    x = torch.tensor(values, dtype=torch.float32)
    x = x if signed else x.abs()
    code, scales = convert.encode(x, signed)
    decoded = convert.decode(code, scales, signed)
    again, scales_again = convert.encode(decoded, signed)
    assert torch.equal(code, again)
    assert torch.equal(scales, scales_again)
    levels = codes.SIGNED_LEVELS if signed else codes.UNSIGNED_LEVELS
    spread = scales.repeat_interleave(codes.TILE)[: x.numel()]
    # Between codes k and k + 1 lies 4·(k/levels)³/levels of the scale at most, plus terms of higher order.
    gap = spread * 4 * ((decoded.abs() / spread.clamp_min(1e-37)) ** 0.75 + 5 / levels) ** 1 / levels
    assert bool(((decoded - x).abs() <= gap * 1.2 + 1e-36).all())
    if not signed:
        assert bool((decoded[(x > 0) & (spread > 0)] > 0).all())


def test_8_bit_random_rounding_has_the_right_mean():
    x = torch.full((256 * 400,), 0.0137)
    x[::256] = 1.0
    random = random_bits(stream_key(3, 4, 0), 0, x.numel(), x.device)
    for signed, part in ((True, random >> 16), (False, random & 0xFFFF)):
        code, scales = convert.encode(x, signed, part.float() * 2.0**-16)
        decoded = convert.decode(code, scales, signed)[x < 1]
        assert len(decoded.unique()) == 2
        assert float(decoded.double().mean()) == pytest.approx(0.0137, rel=2e-3)


def test_8_bit_second_moments_decay():
    parameter = nn.Parameter(torch.zeros(512))
    optimizer = FusedAdamW([parameter], states="8bit", betas=(0.9, 0.99))
    parameter.grad = torch.ones(512)
    optimizer.step()
    first = float(optimizer.state_dict()["state"][0]["exp_avg_sq"].mean())
    parameter.grad[1:256] = 0
    for _ in range(100):
        optimizer.step()
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"][1:256].double().mean()
    assert float(second) == pytest.approx(first * 0.99**100, rel=0.1)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_model_may_start_from_fp32_weights(dtype):
    parameter = nn.Parameter(torch.zeros(100).to(dtype))
    weight = torch.randn(100)
    for master in ("fp32", "split"):
        optimizer = FusedAdamW([parameter], master=master)
        optimizer.set_master(parameter, weight)
        assert torch.equal(parameter.detach(), weight.to(dtype))
        assert float((optimizer.master(parameter) - weight).abs().max()) <= 2.0**-22
        assert torch.equal(optimizer.state_dict()["state"][0]["master"], optimizer.master(parameter))


@pytest.mark.parametrize("master", ["fp32", "split"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_parameter_written_by_someone_else_counts(master, dtype):
    parameter = nn.Parameter(torch.randn(300).to(dtype))
    optimizer = FusedSGD([parameter], lr=0.1, master=master)
    set_gradients([parameter], 0)
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(torch.full((300,), 3.0))
    parameter.grad.zero_()
    optimizer.step()
    assert bool((parameter == 3).all())
    parameter.data.fill_(5)
    optimizer.step()
    assert bool((parameter == 5).all())


def test_bytes_per_parameter_are_those_of_the_blocks():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for master in ("none", "fp32", "split", "stochastic"):
            for states in ("fp32", "8bit"):
                optimizer = FusedAdamW([nn.Parameter(torch.ones(25_600, dtype=dtype))], master=master, states=states)
                nbytes = sum(block.nbytes for block in optimizer.state_blocks().values()) + 2 * 25_600 * dtype.itemsize
                assert nbytes / 25_600 == Precision(master, states).bytes_per_parameter(dtype, 2)


def test_the_page_lists_every_choice_with_its_bytes():
    page = (Path(__file__).resolve().parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) == 12
    for dtype, master, states, nbytes in rows:
        assert Precision(master, states).bytes_per_parameter(getattr(torch, dtype), 2) == float(nbytes)
