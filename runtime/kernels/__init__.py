"""The operators a plan may name. Each is bound once to its arena views; a bound call allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from planner.flash import ATTENTION, ATTENTION_BACKWARD, ATTENTION_DELTA
from planner.graph import Operation
from planner.operators import (
    ARANGE,
    CHECK_GRADIENTS,
    COPY,
    CROSS_ENTROPY_BACKWARD,
    DROPOUT,
    FILL,
    MATMUL,
    POINTWISE,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    UPDATE,
    base_name,
    is_elementwise,
)
from runtime.errors import UnknownOperatorError
from runtime.kernels import (
    aten,
    attention,
    basic,
    batchnorm,
    bernoulli,
    creation,
    cross_entropy,
    dropout,
    elementwise,
    indexing,
    layernorm,
    matmul,
    pointwise,
    reduction,
    rms_norm,
    update,
)
from runtime.kernels.binding import Binder, Call, Context

#: Kernels of this project's own operators.
TABLE: Mapping[str, Binder] = MappingProxyType(
    {
        ARANGE: creation.bind_arange,
        ATTENTION: attention.bind_attention,
        ATTENTION_BACKWARD: attention.bind_attention_backward,
        ATTENTION_DELTA: attention.bind_attention_delta,
        COPY: basic.bind_copy,
        CROSS_ENTROPY_BACKWARD: cross_entropy.bind_cross_entropy_backward,
        DROPOUT: dropout.bind_dropout,
        FILL: basic.bind_fill,
        MATMUL: matmul.bind_matmul,
        POINTWISE: pointwise.bind_pointwise,
        RMS_NORM: rms_norm.bind_rms_norm,
        RMS_NORM_BACKWARD: rms_norm.bind_rms_norm_backward,
        CHECK_GRADIENTS: update.bind_check,
        UPDATE: update.bind_update,
    }
)

#: Kernels of ATen operators whose own out-form is missing or allocates, by base name.
ATEN_TABLE: Mapping[str, Binder] = MappingProxyType(
    {
        "amax": reduction.bind_reduction,
        "amin": reduction.bind_reduction,
        "bernoulli": bernoulli.bind_bernoulli,
        "index_add": indexing.bind_index_add,
        "linalg_vector_norm": reduction.bind_norm,
        "masked_fill": elementwise.bind_masked_fill,
        "mean": reduction.bind_reduction,
        "native_batch_norm": batchnorm.bind_batch_norm,
        "native_batch_norm_backward": batchnorm.bind_batch_norm_backward,
        "native_layer_norm": layernorm.bind_layer_norm,
        "native_layer_norm_backward": layernorm.bind_layer_norm_backward,
        "pow": elementwise.bind_power,
        "relu": elementwise.bind_relu,
        "rsub": elementwise.bind_rsub,
        "square": elementwise.bind_square,
        "sum": reduction.bind_reduction,
        "where": elementwise.bind_where,
    }
)


def bind(operation: Operation, context: Context) -> list[Call]:
    """The calls that perform one operation on the context's views.

    Raises:
        UnknownOperatorError: the operator is neither in the table nor an ATen operator that may be called.
        ArenaError: the operator does not fit its tensors.
    """
    binder = TABLE.get(operation.operator)
    if binder is None:
        if not operation.operator.startswith("aten."):
            raise UnknownOperatorError(operation.operator, operation.name)
        aten.check_fit(operation, context)
    if context.triton:
        from runtime.kernels.triton.table import bind_triton

        launches = bind_triton(operation, context)
        if launches is not None:
            return launches
    if binder is not None:
        return binder(operation, context)
    binder = ATEN_TABLE.get(base_name(operation.operator))
    if binder is not None:
        return binder(operation, context)
    if is_elementwise(operation.operator):
        return aten.bind_elementwise(operation, context)
    return aten.bind_aten(operation, context)


__all__ = ["ATEN_TABLE", "TABLE", "Binder", "Call", "Callable", "Context", "bind"]
