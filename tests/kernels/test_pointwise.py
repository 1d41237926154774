"""Pointwise programs: against float64, compiled and in chunks, in place, special values; bad programs are refused."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import plan, trace
from planner.operators import POINTWISE, POINTWISE_CHUNK
from planner.pointwise import ARITY, decode, registers
from runtime import ArenaRuntime
from runtime.errors import ArenaError
from runtime.kernels import pointwise, pointwise_source
from tests.kernels.harness import perform
from tests.reference.pointwise import FORMULAS

#: Small enough for chunks of ATen calls (in two chunks, the last partial), and for the compiled loop with a remainder.
SHAPES = {"one": (1,), "chunks": (3, POINTWISE_CHUNK // 2 + 1), "loop": (7, 4691)}


def test_every_instruction_is_shown_here() -> None:
    assert set(FORMULAS) == set(ARITY)


def expected(program: tuple[Any, ...], operands: list[Any]) -> torch.Tensor:
    """The program in float64."""
    values = [
        item.double() if isinstance(item, torch.Tensor) and item.dtype != torch.bool else item for item in operands
    ]
    for name, *used in program:
        given_values = [
            torch.tensor(values[k], dtype=torch.float64) if isinstance(values[k], float) else values[k] for k in used
        ]
        values.append(FORMULAS[name](*given_values))
    return values[-1]


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ARITY)
@pytest.mark.parametrize("overwrite", [None, 0, 1])
def test_each_instruction(shape: tuple[int, ...], name: str, overwrite: int | None) -> None:
    count = ARITY[name]
    operands: list[Any] = [draw(shape, seed) * 3 for seed in range(count)]
    if name == "sqrt":
        operands[0] = operands[0].abs()
    if name == "where":
        operands[0] = operands[0] > 0
    if overwrite is not None and (overwrite >= count or operands[overwrite].dtype == torch.bool):
        pytest.skip("no such operand to write onto")
    program = ((name, *range(count)),)
    reference = expected(program, operands)
    position = None if overwrite is None else overwrite + 1
    outcome = perform(POINTWISE, [program, *operands], {}, [reference.float()], overwrite=position)
    torch.testing.assert_close(outcome.results[0].double(), reference, rtol=4e-7, atol=1e-37)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes == 0


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "relu", "sqrt", "neg", "positive"])
def test_special_values_are_aten_s(name: str) -> None:
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, -1e-42, 88.0, 89.0, -87.5, -100.0, -104.0, 1e30, -1e30]
    source = torch.tensor(special).repeat(4000)
    operands = [source] * ARITY[name]
    program = ((name, *range(ARITY[name])),)
    reference = FORMULAS[name](*operands)
    ours = perform(POINTWISE, [program, *operands], {}, [reference], count=False).results[0]
    assert source.numel() >= pointwise.LEAST_NUMEL
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=3e-45, equal_nan=True)
    if name != "relu":  # ATen's relu keeps −0 in some builds and not in others
        assert torch.equal(ours.nan_to_num().signbit(), reference.nan_to_num().signbit())


@pytest.mark.parametrize("name", ["tanh", "exp", "sigmoid"])
def test_error_in_units_of_the_last_place(name: str) -> None:
    numel = 1 << 18
    source = torch.cat(
        [torch.linspace(-20, 20, numel), torch.logspace(-30, 1.2, numel), -torch.logspace(-30, 1.2, numel)]
    )
    reference = FORMULAS[name](source.double())
    ours = perform(POINTWISE, [((name, 0),), source], {}, [reference.float()], count=False).results[0].double()
    exponent = torch.frexp(reference.abs().clamp_min(2.0**-126)).exponent
    assert ((ours - reference).abs() * 2.0 ** (24 - exponent).double()).max() < 3.0


@st.composite
def programs(draw_: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """A program of instructions that keep values moderate, and its operands: tensors, masks and numbers."""
    tensors, numbers, masks = draw_(st.integers(1, 3)), draw_(st.integers(0, 2)), draw_(st.integers(0, 1))
    operands: list[Any] = ["tensor"] * tensors + ["number"] * numbers + ["mask"] * masks
    usable = list(range(tensors + numbers))
    program: list[tuple[Any, ...]] = []
    names = [name for name in ARITY if name not in ("exp", "div", "sqrt") and (masks or name != "where")]
    for number in range(draw_(st.integers(1, 9))):
        name = draw_(st.sampled_from(names))
        chosen = [draw_(st.sampled_from(usable)) for _ in range(ARITY[name])]
        if name == "where":
            chosen[0] = tensors + numbers
        program.append((name, *chosen))
        usable.append(len(operands) + number)
    assume(not masks or any(name == "where" for name, *_ in program))
    return tuple(program), operands


@settings(max_examples=60, deadline=None)
@given(
    drawn=programs(), size=st.sampled_from([1, 5, 63, POINTWISE_CHUNK + 3]), overwrite=st.booleans(), loop=st.booleans()
)
def test_any_program(drawn: tuple[tuple[Any, ...], list[Any]], size: int, overwrite: bool, loop: bool) -> None:
    program, kinds = drawn
    operands: list[Any] = []
    for position, kind in enumerate(kinds):
        value = draw((size,), position)
        operands.append(value > 0 if kind == "mask" else float(value[0]) if kind == "number" else value.tanh())
    reference = expected(program, operands)
    reference = reference.expand(size)
    before = pointwise.LEAST_NUMEL
    # The loop is compiled for few programs only: it takes half a second each.
    pointwise.LEAST_NUMEL = 1 if loop and len(program) == 2 else 1 << 30
    try:
        outcome = perform(
            POINTWISE, [program, *operands], {}, [reference.float()], overwrite=1 if overwrite else None, count=False
        )
    finally:
        pointwise.LEAST_NUMEL = before
    scale = 1 + reference.abs().max().item()
    torch.testing.assert_close(outcome.results[0].double(), reference, rtol=1e-4, atol=1e-5 * scale)


@settings(max_examples=100, deadline=None)
@given(drawn=programs())
def test_registers_never_hold_two_values_at_once(drawn: tuple[tuple[Any, ...], list[Any]]) -> None:
    program, kinds = drawn
    instructions = decode([program, *kinds])
    places, count = registers(instructions, len(kinds))
    assert places[-1] == -1
    assert all(0 <= place < count for place in places[:-1])
    holder: dict[int, int] = {}
    for number, (_, operands) in enumerate(instructions):
        for operand in operands:
            if operand >= len(kinds):
                made = operand - len(kinds)
                assert holder[places[made]] == made
        holder[places[number]] = number


BAD: dict[str, Any] = {
    "no program": [3.0],
    "empty": [()],
    "unknown": [(("os.system", 0),)],
    "too few operands": [(("add", 0),)],
    "too many operands": [(("neg", 0, 0),)],
    "itself": [(("add", 0, 1),)],
    "a negative operand": [(("neg", -1),)],
    "a flag": [(("neg", True),)],
    "no instruction": [((),)],
    "text": ["neg"],
    "a mask computed": [(("neg", 0), ("where", 1, 0, 0))],
    "a mask of numbers": [(("where", 0, 0, 0),)],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_programs_are_refused(arguments: list[Any]) -> None:
    x = torch.ones(4)
    with pytest.raises((ArenaError, ValueError)):
        perform(POINTWISE, [*arguments, x], {}, [x])


@pytest.mark.parametrize(
    "operand", [torch.ones(5), torch.ones(4, dtype=torch.float64), torch.ones(4) > 0, "x"], ids=str
)
def test_operands_that_do_not_fit_are_refused(operand: Any) -> None:
    with pytest.raises(ArenaError, match="pointwise program"):
        perform(POINTWISE, [(("add", 0, 1),), torch.ones(4), operand], {}, [torch.ones(4)])


def test_a_kept_loop_is_compiled_anew_with_the_functions_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(pointwise_source, "_kept", lambda text, _: texts.append(text))
    monkeypatch.setattr(pointwise_source, "compiled_function", lambda _: lambda _: SimpleNamespace(address=1))
    for said in ("before", "before", "after"):
        monkeypatch.setattr(pointwise_source.inspect, "getsource", lambda _, said=said: said)
        pointwise_source.compiled_text("def loop(words):\n    pass\n", {}, "pointwise", (pointwise_source,))
    assert texts[0] == texts[1] != texts[2]


def test_source_names_nothing_from_the_program() -> None:
    signature = pointwise_source.Signature(decode([(("tanh", 0),), 1.0]), (pointwise_source.TENSOR,), None)
    assert "tanh(x0)" in pointwise_source.source(signature)


#: ``silu(a) · b`` of a, b and 1; its gradient for a, of a, b, the gradient, a mask and 1.
GATED = (("neg", 0), ("exp", 3), ("add", 2, 4), ("div", 0, 5), ("mul", 6, 1))
GATED_BACKWARD = (
    ("mul", 2, 1), ("sigmoid", 0), ("sub", 4, 6), ("mul", 0, 7), ("add", 4, 8), ("mul", 5, 6), ("mul", 10, 9),
    ("where", 3, 11, 4),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", [GATED, GATED_BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("overwrite", [None, 1, 2])
@pytest.mark.parametrize("loop", [True, False], ids=["loop", "chunks"])
@pytest.mark.parametrize("size", [7, POINTWISE_CHUNK + 3])
def test_sixteen_bits_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, program: Any, overwrite: int | None, loop: bool, size: int
) -> None:
    """Within half a unit in the last place of 16 bits, and what float32 adds; in place too; nothing allocated."""
    monkeypatch.setattr(pointwise, "LEAST_NUMEL", 1 if loop else 1 << 30)
    tensors: list[Any] = [draw((size,), seed).to(dtype) for seed in range(3)]
    operands = [*tensors[:2], 1.0] if program is GATED else [*tensors, draw((size,), 3) > 0, 1.0]
    reference = expected(program, operands)
    outcome = perform(POINTWISE, [program, *operands], {}, [reference.to(dtype)], overwrite=overwrite)
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(outcome.results[0].double(), reference, rtol=1.01 * half, atol=1e-6)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes == 0


class Gelu(torch.nn.Module):
    """The feed-forward of GPT-2, its activation written out as there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(width, 2 * width, generator=generator) / width**0.5) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = x @ self.up
        gelu = 0.5 * u * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * torch.pow(u, 3.0))))
        return gelu @ self.down.t()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [16, 96])
def test_a_planned_feed_forward_is_no_further_from_float64_than_eager(dtype: torch.dtype, width: int) -> None:
    module = Gelu(width).to(dtype)
    x, incoming = draw((200, width), 1).to(dtype), draw((200, width), 2).to(dtype)

    def results(of: torch.nn.Module, source: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        leaf = source.clone().requires_grad_()
        named = dict(of.named_parameters()) | {"input.0": leaf}
        output = of(leaf)
        found = torch.autograd.grad(output, list(named.values()), gradient)
        return {"output": output.detach(), **dict(zip(named, found, strict=True))}

    eager = results(module, x, incoming)
    exact = results(copy.deepcopy(module).double(), x.double(), incoming.double())
    made = plan(trace(module, (x.clone().requires_grad_(),), mode="joint"), time_limit=1)
    assert POINTWISE in {operation.operator for operation in made.graph.operations}
    run = ArenaRuntime(made)
    for _ in range(2):
        output, found = run(x, incoming, poison=True)
    for name, reference in exact.items():
        ours, theirs = (
            (item.double() - reference).norm() / reference.norm()
            for item in ({"output": output, **found}[name], eager[name])
        )
        assert ours <= 1.25 * theirs + torch.finfo(dtype).eps / 2, name
