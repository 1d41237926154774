"""What running an operation once more costs, in the one unit that products and passes over memory share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.graph import Operation, Tensor, TensorRef
from planner.operators import MATMUL, base_name

#: Floating-point operations that take as long as moving one byte: about the ratio of peak arithmetic to memory
#: bandwidth in float32, of two cores of a server CPU as of a GPU without tensor cores.
PER_BYTE = 10
#: One call, in the same unit: what keeps many tiny recomputations from looking free.
PER_CALL = 100_000

#: Products, and which operand is the left one.
_PRODUCTS = {MATMUL: 0, "mm": 0, "bmm": 0, "matmul": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}


def cost(operation: Operation, tensors: Sequence[Tensor]) -> int:
    """The cost of running an operation: 2·m·n·k for a product, and every byte it reads and writes.

    Args:
        operation: to run.
        tensors: the graph's.
    """
    moved = sum(tensors[index].numel * tensors[index].itemsize for index in operation.reads + operation.writes)
    return PER_CALL + PER_BYTE * moved + flops(operation, tensors)


def flops(operation: Operation, tensors: Sequence[Tensor]) -> int:
    """Floating-point operations of a product or a convolution; one an element for everything else."""
    results = [tensors[index] for index in operation.outputs if index is not None]
    if not results:
        return 0
    name = base_name(operation.operator)
    operands = [tensors[argument.tensor] for argument in operation.arguments if isinstance(argument, TensorRef)]
    if name in _PRODUCTS and len(operands) > _PRODUCTS[name]:
        left = operands[_PRODUCTS[name]]
        return 2 * results[0].numel * (left.shape[-1] if left.shape else 1)
    if name == "convolution" and len(operands) > 1:
        return 2 * results[0].numel * prod(operands[1].shape[1:])
    if name == "convolution_backward" and len(operands) > 2:
        return 4 * operands[0].numel * prod(operands[2].shape[1:])
    return sum(result.numel for result in results)
