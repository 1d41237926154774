"""Facts about operators: what may overwrite what, which dimensions are batch, what allocates outside the arena.

A fact holds for the kernels of `runtime.kernels`; the tests there check every one of them by execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from planner.graph import Operation, Tensor, TensorRef

COPY = "arenaplan.copy"
FILL = "arenaplan.fill"
MATMUL = "arenaplan.matmul"

#: Rows, columns and depth of the float32 tiles a 16-bit product is computed in on a CPU.
HALF_TILE = 512

_HALF = frozenset({"float16", "bfloat16"})

_RANDOM = (
    "bernoulli",
    "rand",
    "normal",
    "uniform",
    "native_dropout",
    "exponential",
    "multinomial",
    "geometric",
    "cauchy",
    "log_normal",
    "random",
    "poisson",
    "rrelu_with_noise",
)

#: ATen operators that compute each output element from the input elements at the same (broadcast) position.
_ELEMENTWISE = frozenset(
    """
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos div elu eq erf exp
    expm1 floor ge gelu gelu_backward gt hardtanh le leaky_relu lerp log log1p logical_and logical_not logical_or lt
    masked_fill maximum minimum mul ne neg pow reciprocal relu remainder round rsqrt rsub sigmoid sigmoid_backward sign
    silu silu_backward sin softplus sqrt sub tanh tanh_backward threshold_backward where conj_physical
    """.split()
)

#: Softmax and its backward, and which argument is the dimension; their first operand may be overwritten.
SOFTMAX_AXIS = MappingProxyType({"aten._softmax.default": 1, "aten._softmax_backward_data.default": 2})

#: Operators with a true out-form on the CPU: called on arena views they allocate nothing.
_OUT_FORM = _ELEMENTWISE | frozenset(
    "sum mean amax amin addmm baddbmm _softmax _softmax_backward_data triu tril".split()
)


def base_name(operator: str) -> str:
    """``"aten.add_.Tensor"`` → ``"add"``; operators of this project keep their full name."""
    parts = operator.split(".")
    return parts[1].rstrip("_") if parts[0] == "aten" and len(parts) > 1 else operator


def is_random(operator: str) -> bool:
    """Whether the operator draws from the generator, so that its order among its like must not change."""
    return operator.startswith("aten.") and base_name(operator).startswith(_RANDOM)


def is_elementwise(operator: str) -> bool:
    """Whether each output element depends only on input elements at its own (broadcast) position."""
    return operator.startswith("aten.") and base_name(operator) in _ELEMENTWISE


def has_out_form(operator: str) -> bool:
    """Whether the ATen operator's out-form on the CPU writes into given memory without memory of its own."""
    return base_name(operator) in _OUT_FORM


def accepts_strides(operator: str) -> bool:
    """Whether the kernel reads and writes strided views without a copy of its own."""
    return operator in (COPY, FILL, MATMUL) or is_elementwise(operator) or base_name(operator) == "sum"


def batch_rank(operation: Operation, rank: int) -> int:
    """How many leading dimensions of a ``rank``-dimensional operand are mere batch: splitting them changes nothing."""
    if operation.operator == MATMUL:
        return rank - 2
    if operation.operator in SOFTMAX_AXIS:
        return rank - 1 if operation.arguments[SOFTMAX_AXIS[operation.operator]] == -1 else 0
    if operation.operator in (COPY, FILL) or is_elementwise(operation.operator):
        return rank
    return 0


def may_overwrite(operation: Operation, output: Tensor, operand: Tensor, operand_index: int) -> bool:
    """Whether ``output`` may be written onto ``operand``, an input with the same layout that dies here."""
    same = (output.shape, output.strides, output.itemsize) == (operand.shape, operand.strides, operand.itemsize)
    if not same:
        return False
    if operation.operator in SOFTMAX_AXIS:
        return operation.arguments[0] == TensorRef(operand_index)
    if operation.operator == COPY:
        return False
    return is_elementwise(operation.operator)


def unplanned_nbytes(operation: Operation, tensors: Sequence[Tensor]) -> int:
    """Bytes the operation allocates outside the arena on a CPU; zero for one with a true out-form.

    ``tensors`` are the graph's. A 16-bit product needs its float32 tiles (once, shared by all); an elementwise
    operator over operands of different dtypes makes ATen cast them; an operator without an out-form returns new tensors.
    """
    outputs = [tensors[index] for index in operation.outputs if index is not None]
    result_nbytes = sum(output.numel * output.itemsize for output in outputs)
    if operation.operator == MATMUL:
        return _tile_nbytes(operation, tensors) if outputs and outputs[0].dtype in _HALF else 0
    if operation.operator.startswith("arenaplan."):
        return 0
    if has_out_form(operation.operator) or (is_random(operation.operator) and is_mutating(operation)):
        return _cast_nbytes(operation, tensors) if is_elementwise(operation.operator) else 0
    return result_nbytes


def is_mutating(operation: Operation) -> bool:
    """Whether everything the operation writes is also among its arguments: it works in place by its own definition."""
    return bool(operation.outputs) and all(output in operation.reads for output in operation.outputs)


def _tile_nbytes(operation: Operation, tensors: Sequence[Tensor]) -> int:
    left, right = (tensors[index] for index in operation.reads[:2])
    rows, depth, columns = (min(size, HALF_TILE) for size in (left.shape[-2], left.shape[-1], right.shape[-1]))
    return 4 * (rows * depth + depth * columns + rows * columns)


def _cast_nbytes(operation: Operation, tensors: Sequence[Tensor]) -> int:
    """Bytes ATen converts before an elementwise operator whose operands differ in dtype (masks and indices aside)."""
    skipped = {"where": 1, "masked_fill": 2}.get(base_name(operation.operator), 0)
    operands = [tensors[index] for index in operation.reads]
    if skipped:
        operands = [tensor for tensor in operands if tensor.dtype != "bool"]
    kinds = {tensor.dtype for tensor in operands if tensor.shape}
    if len(kinds) < 2:
        return 0
    widest = max(tensor.itemsize for tensor in operands)
    return sum(tensor.numel * widest for tensor in operands if tensor.itemsize < widest or tensor.dtype == "bool")
