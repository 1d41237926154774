"""``arenaplan.pointwise``: a whole program of operators on elements as one launch, compiled for that program.

The program and the kinds of its operands are compile-time constants, so every program is a kernel of its own. Computed
in float32, rounded once. Each element is read before it is written, so the result may lie on any operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from planner.pointwise import ARITY, Instruction
from runtime.kernels.triton.launch import Launch, Setting, ceil_div
from runtime.kernels.triton.registry import FLOATS, Configuration, Kernel

BLOCK = 1024
#: Kinds of operands.
TENSOR, MASK, NUMBER = 0, 1, 2
#: Instructions by number, as the kernel names them.
CODES = MappingProxyType({name: number for number, name in enumerate(ARITY)})
_ADD, _SUB, _MUL, _DIV, _NEG, _EXP, _TANH, _SIGMOID, _SQRT, _RELU, _POSITIVE, _WHERE = (
    tl.constexpr(CODES[name]) for name in "add sub mul div neg exp tanh sigmoid sqrt relu positive where".split()
)
_MASK, _NUMBER = tl.constexpr(MASK), tl.constexpr(NUMBER)


@triton.jit
def _instruction(CODE: tl.constexpr, a, b, c):
    """The value of one instruction; what it does not take is passed all the same."""
    if CODE == _ADD:
        a = a + b
    elif CODE == _SUB:
        a = a - b
    elif CODE == _MUL:
        a = a * b
    elif CODE == _DIV:
        a = tl.div_rn(a, b)
    elif CODE == _NEG:
        a = -a
    elif CODE == _EXP:
        a = tl.exp(a)
    elif CODE == _TANH:
        # By the series where the exponential would lose digits.
        small = a * (1.0 - a * a * (0.33333333 - a * a * (0.13333333 - a * a * 0.05396825)))
        a = tl.where(tl.abs(a) < 0.1, small, 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0))
    elif CODE == _SIGMOID:
        a = 1.0 / (1.0 + tl.exp(-a))
    elif CODE == _SQRT:
        a = tl.sqrt_rn(a)
    elif CODE == _RELU:
        a = tl.where(a <= 0.0, 0.0, a)
    elif CODE == _POSITIVE:
        a = tl.where(a <= 0.0, 0.0, b)
    else:
        a = tl.where(a != 0, b, c)
    return a


@triton.jit
def pointwise_kernel(out, operands, numel, PROGRAM: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements; ``PROGRAM`` holds ``(code, three operands)`` for each instruction."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    values = ()  # a tuple that grows as the program is unrolled
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == _NUMBER:
            values = values + (tl.full((BLOCK,), 0.0, tl.float32) + operands[i],)  # type: ignore[assignment]
        elif KINDS[i] == _MASK:
            values = values + (tl.load(operands[i] + place, mask=inside, other=0),)  # type: ignore[assignment]
        else:
            value = tl.load(operands[i] + place, mask=inside, other=0.0).to(tl.float32)
            values = values + (value,)  # type: ignore[assignment]
    for i in tl.static_range(len(PROGRAM)):
        value = _instruction(PROGRAM[i][0], values[PROGRAM[i][1]], values[PROGRAM[i][2]], values[PROGRAM[i][3]])
        values = values + (value,)  # type: ignore[assignment]
    tl.store(out + place, values[len(KINDS) + len(PROGRAM) - 1].to(out.dtype.element_ty), mask=inside)


def encode(instructions: Sequence[Instruction]) -> tuple[tuple[int, int, int, int], ...]:
    """The program as numbers; instructions of fewer operands name their last again."""
    program = []
    for name, operands in instructions:
        one, two, three = (*operands, *(operands[-1:] * (3 - len(operands))))
        program.append((CODES[name], one, two, three))
    return tuple(program)


def setting(instructions: Sequence[Instruction], kinds: Sequence[int]) -> Setting:
    """The setting of a program."""
    return Setting({"PROGRAM": encode(instructions), "KINDS": tuple(kinds), "BLOCK": BLOCK}, 4)


def launch(
    instructions: Sequence[Instruction], operands: Sequence[torch.Tensor | float], out: torch.Tensor
) -> Launch | None:
    """Bind a checked program on dense tensors of one shape and dtype, and boolean masks; ``None`` without elements."""
    if out.numel() == 0:
        return None
    kinds = [
        NUMBER if not isinstance(item, torch.Tensor) else MASK if item.dtype == torch.bool else TENSOR
        for item in operands
    ]
    arguments = (out, tuple(operands), out.numel())
    return Launch(pointwise_kernel, (ceil_div(out.numel(), BLOCK),), arguments, setting(instructions, kinds))


def _example(dtype: str) -> Configuration:
    """A program with every instruction once, on five tensors, a mask and a number."""
    program: list[Instruction] = []
    given = 7
    for name in ("add", "sub", "mul", "div"):
        program.append((name, (given + len(program) - 1 if program else 0, len(program) + 1)))
    for name in ("neg", "exp", "tanh", "sigmoid", "sqrt", "relu"):
        program.append((name, (given + len(program) - 1,)))
    program.append(("positive", (given + len(program) - 1, 6)))
    program.append(("where", (5, 6, given + len(program) - 1)))
    kinds = (TENSOR, TENSOR, TENSOR, TENSOR, TENSOR, MASK, NUMBER)
    operands = ",".join({TENSOR: f"*{dtype}", MASK: "*i1", NUMBER: "fp32"}[kind] for kind in kinds)
    signature = {"out": f"*{dtype}", "operands": operands, "numel": "i64"}
    return Configuration(f"{dtype} every instruction", signature, setting(program, kinds))


KERNELS = (Kernel("pointwise", pointwise_kernel, tuple(_example(dtype) for dtype in FLOATS)),)
