"""Programs of ``arenaplan.pointwise``: chains of operators on elements, run as one without tensors between them.

A program is a tuple of instructions ``(name, operand, …)``. Operands are numbered: first the operation's own arguments
behind the program (tensors and numbers), then the results of the instructions. The last instruction is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.graph import Argument

Instruction = tuple[str, tuple[int, ...]]

#: Operands of each instruction. ``where`` takes a mask, a value where it is true, and one where it is false.
ARITY: Mapping[str, int] = MappingProxyType(
    {
        "add": 2,
        "sub": 2,
        "mul": 2,
        "div": 2,
        "neg": 1,
        "exp": 1,
        "tanh": 1,
        "sigmoid": 1,
        "sqrt": 1,
        "relu": 1,
        "positive": 2,
        "where": 3,
    }
)
MOST_INSTRUCTIONS = 64


def decode(arguments: Sequence[Argument]) -> tuple[Instruction, ...]:
    """The instructions in an operation's arguments.

    Raises:
        ValueError: an unknown instruction, or operands that are missing or not yet computed.
    """
    program = arguments[0] if arguments else None
    if not isinstance(program, tuple) or not 0 < len(program) <= MOST_INSTRUCTIONS:
        raise ValueError(f"a pointwise program has 1 to {MOST_INSTRUCTIONS} instructions")
    given = len(arguments) - 1
    decoded: list[Instruction] = []
    for number, item in enumerate(program):
        name = item[0] if isinstance(item, tuple) and item else None
        if not isinstance(item, tuple) or not isinstance(name, str) or name not in ARITY:
            raise ValueError(f"instruction {number} of the pointwise program is unknown: {item!r}")
        operands = tuple(
            operand
            for operand in item[1:]
            if isinstance(operand, int) and not isinstance(operand, bool) and 0 <= operand < given + number
        )
        if len(operands) != ARITY[name] or len(item) != ARITY[name] + 1:
            raise ValueError(f"instruction {number} of the pointwise program, {name}, has wrong operands: {item[1:]!r}")
        decoded.append((name, operands))
    return tuple(decoded)


def registers(instructions: Sequence[Instruction], given: int) -> tuple[tuple[int, ...], int]:
    """The register each instruction's result lies in, and how many there are; the last result needs none (−1)."""
    last = {operand: number for number, (_, operands) in enumerate(instructions) for operand in operands}
    assigned: list[int] = []
    free: list[int] = []
    count = 0
    for number, (_, operands) in enumerate(instructions):
        # Results may be written over operands, which end here.
        free += [assigned[operand - given] for operand in set(operands) if operand >= given and last[operand] == number]
        if number == len(instructions) - 1:
            assigned.append(-1)
        elif free:
            assigned.append(free.pop())
        else:
            assigned.append(count)
            count += 1
    return tuple(assigned), count
