"""Fusion of operators on elements: what lies between them never becomes a tensor.

An operator whose result is read by one group of operations only joins that group (the fanout-free cones of logic
synthesis), so a group has one result. Only operators that the compiled loop computes with ATen's roundings take part
(exp and tanh to 3 units in the last place), in float32, on dense tensors of one shape and dtype; masks are boolean, and
numbers may stand in any other place. In 16 bits a group is rounded once, where its operators round once each. A group
may be part of another: after recomputation more is read by one group only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner.graph import Argument, Graph, Operation, TensorRef
from planner.operators import HALF, POINTWISE, base_name
from planner.pointwise import MOST_INSTRUCTIONS, decode
from planner.rewrite.program import Program

_DTYPES = frozenset({"float32", *HALF})
#: Tensors a group may read: more, and compilers no longer turn its loop into vector lanes.
MOST_OPERANDS = 7


@dataclass(frozen=True, slots=True)
class _Value:
    """An operand given to the operation, or the result of an instruction, by position."""

    position: int
    computed: bool = False


class _Writer:
    """Instructions under construction; operands are arguments and numbers, results are numbered behind them."""

    def __init__(self) -> None:
        self.operands: list[TensorRef | float] = []
        self.instructions: list[tuple[str, tuple[_Value, ...]]] = []

    def operand(self, argument: TensorRef | float) -> _Value:
        """An argument of the operation; what is equal is given once."""
        key = argument if isinstance(argument, TensorRef) else float(argument)
        for position, known in enumerate(self.operands):
            if known == key and str(known) == str(key):  # 0.0 and −0.0 are equal
                return _Value(position)
        self.operands.append(key)
        return _Value(len(self.operands) - 1)

    def __call__(self, name: str, *operands: _Value | float) -> _Value:
        """Append an instruction; plain numbers become operands."""
        fixed = tuple(item if isinstance(item, _Value) else self.operand(item) for item in operands)
        self.instructions.append((name, fixed))
        return _Value(len(self.instructions) - 1, computed=True)

    def encode(self) -> tuple[Argument, ...]:
        """The arguments of the pointwise operation."""
        given = len(self.operands)
        program: tuple[Argument, ...] = tuple(
            (name, *(value.position + (given if value.computed else 0) for value in values))
            for name, values in self.instructions
        )
        return (program, *self.operands)


_Emit = Callable[[_Writer, list[_Value], Operation], _Value]


def _scaled(write: _Writer, operands: list[_Value], operation: Operation) -> _Value:
    """The second operand of a sum, times ``alpha``."""
    alpha = dict(operation.keywords).get("alpha", operation.arguments[2] if len(operation.arguments) > 2 else 1)
    return operands[1] if alpha == 1 or not isinstance(alpha, (int, float)) else write("mul", operands[1], alpha)


def _power(write: _Writer, operands: list[_Value], operation: Operation) -> _Value:
    square = write("mul", operands[0], operands[0])
    return square if operation.arguments[1] == 2 else write("mul", square, operands[0])


def _tanh_backward(write: _Writer, operands: list[_Value], _: Operation) -> _Value:
    gradient, result = operands
    return write("mul", gradient, write("sub", 1.0, write("mul", result, result)))


def _sigmoid_backward(write: _Writer, operands: list[_Value], _: Operation) -> _Value:
    gradient, result = operands
    return write("mul", write("mul", gradient, write("sub", 1.0, result)), result)


def _silu(write: _Writer, operands: list[_Value], _: Operation) -> _Value:
    return write("div", operands[0], write("add", 1.0, write("exp", write("neg", operands[0]))))


def _silu_backward(write: _Writer, operands: list[_Value], _: Operation) -> _Value:
    gradient, source = operands
    gate = write("sigmoid", source)
    slope = write("add", 1.0, write("mul", source, write("sub", 1.0, gate)))
    return write("mul", write("mul", gradient, gate), slope)


def _inlined(write: _Writer, operands: list[_Value], operation: Operation) -> _Value:
    values = list(operands)
    for name, used in decode(operation.arguments):
        values.append(write(name, *(values[position] for position in used)))
    return values[-1]


def _same(name: str) -> _Emit:
    return lambda write, operands, _: write(name, *operands)


#: ATen's operators as instructions.
_EMIT: Mapping[str, _Emit] = MappingProxyType(
    {
        "add": lambda write, operands, op: write("add", operands[0], _scaled(write, operands, op)),
        "sub": lambda write, operands, op: write("sub", operands[0], _scaled(write, operands, op)),
        "rsub": lambda write, operands, _: write("sub", operands[1], operands[0]),
        **{name: _same(name) for name in ("mul", "div", "neg", "exp", "tanh", "sigmoid", "sqrt", "relu")},
        POINTWISE: _inlined,
        "square": lambda write, operands, _: write("mul", operands[0], operands[0]),
        "pow": _power,
        "silu": _silu,
        "silu_backward": _silu_backward,
        "tanh_backward": _tanh_backward,
        "sigmoid_backward": _sigmoid_backward,
        "threshold_backward": lambda write, operands, _: write("positive", operands[1], operands[0]),
        "masked_fill": lambda write, operands, _: write("where", operands[1], operands[2], operands[0]),
        "where": lambda write, operands, _: write("where", *operands),
    }
)
#: Arguments that become operands, where not all do.
_TAKEN = MappingProxyType({"add": 2, "sub": 2, "pow": 1, "threshold_backward": 2})
#: Position of the mask among the operands.
_MASK = MappingProxyType({"masked_fill": 1, "where": 0})


def fuse_elementwise(graph: Graph) -> Graph:
    """The graph with every group of two or more such operators as one ``arenaplan.pointwise``."""
    program = Program(graph)
    groups = _groups(program)
    roots = {members[-1]: members for members in groups}
    inner = {position for members in groups for position in members[:-1]}
    operations: list[Operation] = []
    for position, operation in enumerate(program.operations):
        if position in roots:
            operations.append(_fused([program.operations[member] for member in roots[position]]))
        elif position not in inner:
            operations.append(operation)
    program.operations = operations
    return program.close()


@dataclass(slots=True)
class _Uses:
    """Where each storage is read and written."""

    touched: dict[int, list[int]]
    written: dict[int, list[int]]


def _groups(program: Program) -> list[list[int]]:
    """Positions of the operations that become one, in order, each list ending with the one whose result remains."""
    uses = _Uses({}, {})
    for position, operation in enumerate(program.operations):
        for storage in {program.storage_of(index) for index in operation.reads + operation.writes}:
            uses.touched.setdefault(storage, []).append(position)
        for storage in {program.storage_of(index) for index in operation.writes}:
            uses.written.setdefault(storage, []).append(position)
    root: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for position in range(len(program.operations) - 1, -1, -1):
        operation = program.operations[position]
        if not _fits(program, operation):
            continue
        home = _home(program, operation, position, uses, root)
        if home is not None and _may_join(program, position, home, members[home], uses):
            root[position] = home
            members[home].insert(0, position)
        else:
            root[position] = position
            members[position] = [position]
    return [group for group in members.values() if len(group) > 1]


def _fits(program: Program, operation: Operation) -> bool:
    """Whether the operation can be instructions: its operator, its dtypes, and dense tensors of one shape."""
    name = base_name(operation.operator)
    if name not in _EMIT or operation.lane is not None:
        return False
    if operation.operator.split(".")[1].endswith("_") or len(operation.outputs) != 1 or operation.outputs[0] is None:
        return False
    if any(key != "alpha" for key, _ in operation.keywords):
        return False
    result = program.tensors[operation.outputs[0]]
    if result.dtype not in _DTYPES or result.numel == 0 or not _is_whole(program, operation.outputs[0]):
        return False
    if program.storage_of(operation.outputs[0]) in {program.storage_of(index) for index in operation.reads}:
        return False
    if name == "pow" and not (operation.operator.endswith(".Tensor_Scalar") and operation.arguments[1] in (2, 3)):
        return False
    if name in ("div", "rsub") and (len(operation.arguments) != 2 or operation.keywords):
        return False
    if name == "threshold_backward" and operation.arguments[2] != 0:
        return False
    if name == POINTWISE:
        return True  # its operands were looked at when it was made
    return all(_is_operand(program, operation, position) for position in range(len(operation.arguments)))


def _is_operand(program: Program, operation: Operation, position: int) -> bool:
    argument = operation.arguments[position]
    name = base_name(operation.operator)
    if not isinstance(argument, TensorRef):
        return isinstance(argument, (int, float)) and position != _MASK.get(name)
    tensor, result = program.tensors[argument.tensor], program.tensors[operation.outputs[0] or 0]
    if tensor.shape != result.shape or not tensor.is_contiguous:
        return False
    return tensor.dtype == ("bool" if position == _MASK.get(name) else result.dtype)


def _is_whole(program: Program, index: int) -> bool:
    tensor = program.tensors[index]
    return (
        tensor.is_contiguous
        and tensor.offset == 0
        and tensor.numel * tensor.itemsize == program.storages[tensor.storage].nbytes
    )


def _home(program: Program, operation: Operation, position: int, uses: _Uses, root: dict[int, int]) -> int | None:
    """The one group that reads all of the operation's result, if it is written here only and read by no other."""
    result = operation.outputs[0]
    if result is None:
        return None
    storage = program.storage_of(result)
    if storage in program.border or uses.written[storage] != [position]:
        return None
    homes = {root.get(reader) for reader in uses.touched[storage] if reader != position}
    if len(homes) != 1 or None in homes:
        return None
    (home,) = homes
    # Read as the same elements: another view of the storage would see them in another order.
    readers = (program.operations[reader] for reader in uses.touched[storage] if reader != position)
    same = all(index == result for reader in readers for index in reader.reads if program.storage_of(index) == storage)
    return home if same else None


def _may_join(program: Program, position: int, home: int, members: list[int], uses: _Uses) -> bool:
    """Whether the operation may run at ``home`` as part of that group.

    Its operands must hold then what they hold now, and those that would live on until then for this alone must not be
    larger than the result that need not.
    """
    operation = program.operations[position]
    result = program.tensors[operation.outputs[0] or 0]
    if result.shape != program.tensors[program.operations[home].outputs[0] or 0].shape:
        return False
    kept = 0
    for storage in {program.storage_of(index) for index in operation.reads}:
        if any(position < writer <= home for writer in uses.written.get(storage, ())):
            return False
        if uses.touched[storage][-1] < home and storage not in program.border:
            kept += program.storages[storage].nbytes
    if kept > result.numel * result.itemsize:
        return False
    together = [*members, position]
    if sum(_cost(program.operations[member]) for member in together) > MOST_INSTRUCTIONS:
        return False
    made = {program.operations[member].outputs[0] for member in together}
    read = {index for member in together for index in program.operations[member].reads}
    return len(read - made) <= MOST_OPERANDS


def _cost(operation: Operation) -> int:
    """Instructions of one operation, at most."""
    if operation.operator == POINTWISE:
        return len(decode(operation.arguments))
    return 6 if base_name(operation.operator).endswith("backward") or base_name(operation.operator) == "silu" else 2


def _fused(members: list[Operation]) -> Operation:
    write = _Writer()
    computed: dict[int, _Value] = {}
    for operation in members:
        operands: list[_Value] = []
        name = base_name(operation.operator)
        for argument in operation.arguments[name == POINTWISE : _TAKEN.get(name)]:
            if isinstance(argument, TensorRef) and argument.tensor in computed:
                operands.append(computed[argument.tensor])
            elif isinstance(argument, (TensorRef, int, float)):
                operands.append(write.operand(argument))
        computed[operation.outputs[0] or 0] = _EMIT[name](write, operands, operation)
    root = members[-1]
    return replace(root, operator=POINTWISE, arguments=write.encode(), keywords=())
