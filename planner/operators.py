"""Facts about operators: what may overwrite what, which dimensions are batch, what allocates outside the arena.

A fact holds for the kernels of `runtime.kernels`; the tests there check every one of them by execution.
"""

from __future__ import annotations

from types import MappingProxyType

from planner.graph import Operation, Tensor, TensorRef

COPY = "arenaplan.copy"
FILL = "arenaplan.fill"
MATMUL = "arenaplan.matmul"

#: Rows, columns and depth of the float32 tiles a 16-bit product is computed in on a CPU.
HALF_TILE = 512

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
_OUT_FORM = _ELEMENTWISE | frozenset("sum mean amax amin addmm baddbmm _softmax _softmax_backward_data triu tril".split())


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


def needs_workspace(operation: Operation) -> bool:
    """Whether the operation allocates outside the arena: it has no true out-form."""
    if operation.operator.startswith("arenaplan."):
        return False
    return base_name(operation.operator) not in _OUT_FORM
