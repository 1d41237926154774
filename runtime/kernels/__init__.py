"""The operators a plan may name. Each is bound once to its arena views; a bound call allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from planner.graph import Operation
from planner.operators import COPY, FILL, MATMUL
from runtime.errors import UnknownOperatorError
from runtime.kernels import aten, basic, matmul
from runtime.kernels.binding import Binder, Call, Context

TABLE: Mapping[str, Binder] = MappingProxyType(
    {
        COPY: basic.bind_copy,
        FILL: basic.bind_fill,
        MATMUL: matmul.bind_matmul,
    }
)


def bind(operation: Operation, context: Context) -> list[Call]:
    """The calls that perform one operation on the context's views.

    Raises:
        UnknownOperatorError: the operator is neither in the table nor an ATen operator that may be called.
    """
    binder = TABLE.get(operation.operator)
    if binder is not None:
        return binder(operation, context)
    if operation.operator.startswith("aten."):
        return aten.bind_aten(operation, context)
    raise UnknownOperatorError(operation.operator, operation.name)


__all__ = ["TABLE", "Binder", "Call", "Callable", "Context", "bind"]
