"""Masters, remainders, random rounding and 8-bit codes: exact where they claim to be, unbiased where they round."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_helpers import HALVES, adamw_float64, backend, set_gradients, small_model
from torch import nn

from runtime.optimizer import FusedAdam, FusedAdamW, FusedSGD, Precision, codes, convert
from runtime.optimizer.aten import block_bits, mix_number, random_bits, rounded_at_random, stream_key

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
    back = convert.joined(parameter, remainder)[finite]
    assert torch.equal(back, grid[finite])
    assert torch.equal(back.signbit(), grid[finite].signbit())
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


@pytest.mark.parametrize("form", ["compiled", "aten"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_split_parameter_keeps_the_sign_of_zero(dtype, form):
    parameter = nn.Parameter(torch.tensor([0.0, -0.0, 1.0, -1.0]).to(dtype))
    parameter.grad = torch.tensor([0.0, 0.0, 0.0, 1.0]).to(dtype)
    with backend(form):
        optimizer = FusedSGD([parameter], lr=0.5, master="split")
        for _ in range(2):
            optimizer.step()
    assert parameter.detach().signbit().tolist() == [False, True, False, True]
    assert optimizer.master(parameter).signbit().tolist() == [False, True, False, True]


@pytest.mark.parametrize("form", ["compiled", "aten"])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("pair", [(FusedAdamW, torch.optim.AdamW), (FusedAdam, torch.optim.Adam)])
def test_infinite_parameters_spoil_no_moments_that_torchs_keep(pair, options, states, form):
    ends = []
    for kind in pair:
        parameter = nn.Parameter(torch.ones(300))
        with torch.no_grad():
            parameter[7], parameter[299] = math.inf, -math.inf
        with backend(form):
            optimizer = kind([parameter], **options, **({"states": states} if kind is pair[0] else {}))
            for step in range(2):
                set_gradients([parameter], step)
                optimizer.step()
        ends.append((parameter.detach(), optimizer.state_dict()["state"][0]["exp_avg"]))
    (ours, moment), (theirs, expected) = ends
    spoiled = expected.isnan()
    if states == "8bit" and bool(spoiled.any()):  # the block of 256 has one scale
        spoiled = spoiled.clone()
        spoiled[:256] |= spoiled[:256].any()
        spoiled[256:] |= spoiled[256:].any()
    assert torch.equal(moment.isnan(), spoiled)
    assert bool(ours[~spoiled & theirs.isfinite()].isfinite().all())
    if not options.get("weight_decay", 1.0 if pair[0] is FusedAdamW else 0.0):
        assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize("form", ["compiled", "aten"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}])
def test_an_infinite_gradient_does_what_torchs_sgd_does_with_it(options, form):
    ends = []
    for kind in (FusedSGD, torch.optim.SGD):
        parameter = nn.Parameter(torch.ones(300))
        with backend(form):
            optimizer = kind([parameter], lr=0.1, **options)
            for _ in range(2):
                parameter.grad = torch.ones(300)
                parameter.grad[7], parameter.grad[8] = math.inf, -math.inf
                optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends, equal_nan=True)


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
    unit = convert.decode(torch.arange(-124 if signed else 0, 125 if signed else 253), torch.ones(2), signed).double()
    wanted, spread = x.double(), scales.double().repeat_interleave(codes.TILE)[: x.numel()]
    nearest = (wanted[:, None] - unit * spread[:, None]).abs().amin(1)
    off = (decoded.double() - wanted).abs()
    some = (wanted > 0) & (spread > 0)
    if signed:
        assert bool((off <= nearest + 1e-6 * spread + 1e-37).all())
    else:
        assert bool((decoded[some] > 0).all())
        assert bool((off <= nearest + spread * 2.0**-24 + 1e-37).all())


@pytest.mark.parametrize("form", [codes.SIGNED, codes.UNSIGNED])
def test_the_8_bit_code_is_the_documented_function(form):
    signed = form is codes.SIGNED
    whole = torch.arange(form.top - 3)
    value = convert.decode(whole, torch.ones(1), signed).double() + form.zero
    place = (whole + 4).double()
    octave = place.log2().floor()
    within = (place / 2**octave - 1) * 4  # quarters of the way to the next power of two
    start = 2.0 ** (4 * (octave - math.log2(form.top)) + within.floor())
    assert torch.allclose(value, start * (1 + within - within.floor()), rtol=2.0**-20, atol=0)
    for share, wanted in ((7 / 8, 1 / 2), (3 / 4, 1 / 4), (5 / 8, 1 / 8), (1 / 2, 1 / 16), (1 / 4, 1 / 256)):
        assert float(value[int(form.top * share) - 4]) == pytest.approx(wanted, rel=1e-6)
    if signed:
        assert torch.equal(convert.decode(-whole, torch.ones(1), True), -convert.decode(whole, torch.ones(1), True))


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_scales_stay_themselves_for_every_mantissa(signed):
    generator = torch.Generator().manual_seed(0)
    low, high = 0x3F800000, 0x40000000
    bits = torch.cat(
        (
            torch.arange(low, low + 1024),
            torch.arange(high - 1024, high),
            torch.randint(low, high, (6_000,), generator=generator),
        )
    )
    largest = bits.to(torch.int32).view(torch.float32)
    x = torch.zeros(largest.numel(), 256)
    x[:, 7] = largest
    for random in (convert.NEAREST, 0, 0xFFFFFFFF):  # the largest is the top code whatever the random bits
        code, scales = convert.encode(x.view(-1), signed, random)
        assert bool((code.view(-1, 256)[:, 7] == (124 if signed else 252)).all())
        decoded = convert.decode(code, scales, signed)
        again, scales_again = convert.encode(decoded, signed)
        assert torch.equal(again, code)
        assert torch.equal(scales, scales_again)
        assert float((decoded.view(-1, 256)[:, 7] / largest - 1).abs().max()) <= 2.0**-23


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [0.93, 0.3, 0.0137, 2e-4, 3e-6, 2e-7, 1e-8])
def test_8_bit_random_rounding_has_the_right_mean(signed, size):
    x = torch.full((256 * 2000,), size)
    x[::256] = 1.0
    code, scales = convert.encode(x, signed, block_bits(stream_key(3, 4, 0), 0, x.numel(), x.device))
    decoded = convert.decode(code, scales, signed)[x < 1].double()
    values = decoded.unique()
    assert len(values) <= 2
    if not signed and size < 2.0**-24:
        assert values.tolist() == [pytest.approx(2.0**-24, rel=1e-6)]  # what is not zero never becomes zero
        return
    assert float(values[0]) <= size <= float(values[-1])
    gap = float(values[-1] - values[0])
    assert float(decoded.mean()) == pytest.approx(size, abs=gap * 4 * 0.5 / math.sqrt(decoded.numel()) + 1e-6 * size)


def test_8_bit_random_bits_are_uniform_and_neighbours_independent():
    count = 1 << 14
    bits = block_bits(stream_key(5, 6, 0), 256 * 12345, 256 * count, torch.device("cpu")).view(count, 256)
    first, second = (bits >> 18).double() / 2**14 - 0.5, ((bits & 0xFFFE) >> 1).double() / 2**15 - 0.5
    for part in (first, second):
        assert float(part.mean(0).abs().max()) < 5 / math.sqrt(12 * count)
        assert float((part.square().mean(0) * 12 - 1).abs().max()) < 5 * math.sqrt(0.8 / count)
    both = torch.cat((first, second), 1)
    together = (both.T @ both) * 12 / count
    together.fill_diagonal_(0.0)
    assert float(together.abs().max()) < 6 / math.sqrt(count)
    assert float(together.std()) == pytest.approx(1 / math.sqrt(count), rel=0.02)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_blocks_of_zeros_tiny_infinite_and_nan_numbers(signed):
    sign = -1.0 if signed else 1.0
    blocks = {
        "zero": torch.zeros(256),
        "subnormal": torch.full((256,), 1e-40) * sign,
        "smallest": torch.linspace(1e-37, 2e-37, 256) * sign,
        "largest": torch.linspace(0, 3e38, 256) * sign,
        "infinite": torch.cat((torch.full((1,), math.inf), torch.ones(255))) * sign,
        "nan": torch.cat((torch.full((1,), math.nan), torch.ones(255))) * sign,
        "usual": torch.linspace(0, 1, 256) * sign,
    }
    code, scales = convert.encode(torch.cat(tuple(blocks.values())), signed)
    decoded = dict(zip(blocks, convert.decode(code, scales, signed).view(-1, 256), strict=True))
    assert not decoded["zero"].any()
    assert not decoded["subnormal"].any()
    for name in ("smallest", "largest", "usual"):
        assert float((decoded[name] - blocks[name]).abs().max()) <= 0.04 * float(blocks[name].abs().max())
    assert not decoded["infinite"].isfinite().any()
    assert decoded["nan"].isnan().all()
    assert float(scales[-1]) == pytest.approx(1.0, rel=2e-6)


@pytest.mark.parametrize("kernel", ["compiled", "aten"])
def test_8_bit_moments_of_a_gradient_that_is_not_finite_show_it(kernel):
    parameter = nn.Parameter(torch.ones(600))
    with backend(kernel):
        optimizer = FusedAdamW([parameter], states="8bit", skip_nonfinite=False)
        parameter.grad = torch.ones(600)
        parameter.grad[300] = math.nan
        for _ in range(2):
            optimizer.step()
    assert bool(parameter[256:512].isnan().all())
    assert bool(parameter[:256].isfinite().all())
    assert bool(parameter[512:].isfinite().all())


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
