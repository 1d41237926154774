"""ATen operators called on arena views: through their true out-form, in place, or, failing both, with a copy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from planner.graph import Argument, Dtype, Operation, TensorRef
from planner.operators import base_name, has_out_form, is_elementwise
from runtime.errors import UnknownOperatorError
from runtime.kernels.binding import Call, Context

_NAME = re.compile(r"aten\.(\w+)\.(\w+)")
_ENUMS = {
    "torch.strided": torch.strided,
    "torch.contiguous_format": torch.contiguous_format,
    "torch.preserve_format": torch.preserve_format,
    "torch.channels_last": torch.channels_last,
    "torch.channels_last_3d": torch.channels_last_3d,
}


def bind_aten(operation: Operation, context: Context) -> list[Call]:
    """Bind an ATen operator; see `planner.operators.unplanned_nbytes` for which of them still allocate."""
    special = _SPECIAL.get(base_name(operation.operator))
    outputs = context.outputs(operation)
    if outputs and all(output.numel() == 0 for output in outputs):
        return []
    if special is not None:
        return special(operation, context)
    overload = resolve(operation)
    if overload._schema.is_mutable:
        return _mutating(overload, operation, context)
    out_form = find_out_form(overload)
    if out_form is None or not has_out_form(operation.operator) or None in operation.outputs:
        return [_copying(overload, operation, context)]
    names = [argument.name for argument in out_form._schema.arguments if argument.is_out]
    positional, keywords = arguments(out_form, operation, context)
    keywords |= dict(zip(names, outputs, strict=True))
    return [partial(out_form, *positional, **keywords)]


def resolve(operation: Operation) -> torch._ops.OpOverload:
    """The ATen overload an operation names; only operators on tensors may be called."""
    match = _NAME.fullmatch(operation.operator)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    overload = getattr(packet, match[2], None) if match and packet is not None else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise UnknownOperatorError(operation.operator, operation.name)
    takes_tensor = any("Tensor" in str(argument.type) for argument in overload._schema.arguments)
    gives_tensor = all("Tensor" in str(result.type) for result in overload._schema.returns)
    if not takes_tensor or not gives_tensor:
        raise UnknownOperatorError(operation.operator, operation.name)
    return overload


def find_out_form(overload: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that writes into given tensors and otherwise takes the same arguments."""
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments]
    packet = overload.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        schema = candidate._schema.arguments
        if any(a.is_out for a in schema) and [(a.name, str(a.type)) for a in schema if not a.is_out] == wanted:
            return candidate  # type: ignore[no-any-return]
    return None


def arguments(
    overload: torch._ops.OpOverload, operation: Operation, context: Context
) -> tuple[list[Any], dict[str, Any]]:
    """Call arguments; a number where the schema wants a tensor is made one now, so that no call does."""
    schema = [a for a in overload._schema.arguments if not a.is_out]
    outputs = context.outputs(operation)
    dtype = outputs[0].dtype if outputs else torch.float32
    operands = [context.views[index] for index in operation.reads]
    if operands and is_elementwise(operation.operator):
        dtype = operands[0].dtype if operands[0].is_floating_point() or operands[0].is_complex() else dtype
    positional = [
        _value(argument, str(schema[position].type), dtype, context)
        for position, argument in enumerate(operation.arguments)
    ]
    kinds = {a.name: str(a.type) for a in schema}
    keywords = {name: _value(argument, kinds.get(name, ""), dtype, context) for name, argument in operation.keywords}
    return positional, keywords


def _value(argument: Argument, kind: str, dtype: torch.dtype, context: Context) -> Any:
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    if isinstance(argument, str):
        if argument.startswith("complex:"):
            real, imaginary = argument.removeprefix("complex:").split(",")
            return complex(float(real), float(imaginary))
        return _ENUMS.get(argument, argument)
    if isinstance(argument, (int, float)) and kind.startswith(("Tensor", "Optional[Tensor]")):
        return scalar(argument, dtype, context)
    if isinstance(argument, tuple):
        return [_value(item, "", dtype, context) for item in argument]
    return context.value(argument)


def scalar(value: float, dtype: torch.dtype, context: Context) -> torch.Tensor:
    """A zero-dimensional tensor in the dtype that ATen would convert the number to on every call."""
    return torch.tensor(value, dtype=dtype, device=context.views[0].device if context.views else None)


def _mutating(overload: torch._ops.OpOverload, operation: Operation, context: Context) -> list[Call]:
    """An operator that writes its own arguments; an elementwise one through its out-form, which takes 0-d tensors."""
    if is_elementwise(operation.operator):
        plain = getattr(torch.ops.aten, base_name(operation.operator), None)
        functional = getattr(plain, overload._overloadname, None)
        out_form = find_out_form(_tensor_form(functional)) if functional is not None else None
        if out_form is not None:
            positional, keywords = arguments(out_form, operation, context)
            return [partial(out_form, *positional, **keywords, out=context.outputs(operation)[0])]
    positional, keywords = arguments(overload, operation, context)
    read = set(operation.reads)
    fresh = [index for index in operation.outputs if index is not None and index not in read]
    if not fresh:
        return [partial(overload, *positional, **keywords)]

    def call() -> None:
        results = overload(*positional, **keywords)
        returned = [results] if isinstance(results, torch.Tensor) else list(results)
        for index, result in zip(fresh, returned, strict=False):
            context.views[index].copy_(result)

    return [call]


def _tensor_form(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """``mul.Scalar`` → ``mul.Tensor``: the same operator, with an out-form that allocates nothing."""
    if overload._overloadname == "Scalar":
        tensor = getattr(overload.overloadpacket, "Tensor", None)
        if tensor is not None:
            return tensor  # type: ignore[no-any-return]
    return overload


def _copying(overload: torch._ops.OpOverload, operation: Operation, context: Context) -> Call:
    """Call the functional form and copy its results into the arena; listed in the plan as unplanned."""
    positional, keywords = arguments(overload, operation, context)

    def call() -> None:
        results = overload(*positional, **keywords)
        returned: Sequence[Any] = [results] if isinstance(results, torch.Tensor) else list(results)
        for index, result in zip(operation.outputs, returned, strict=True):
            if index is not None:
                context.views[index].copy_(result)

    return call


def _bind_masked_fill(operation: Operation, context: Context) -> list[Call]:
    """``out[i] = value where mask[i] else self[i]``; in place if the output is the input."""
    (output,) = context.outputs(operation)
    source, mask = (context.tensor(argument) for argument in operation.arguments[:2])
    value = context.value(operation.arguments[2])
    calls: list[Call] = []
    if operation.arguments[0] != TensorRef(operation.outputs[0] or 0) and not _same_place(source, output):
        calls.append(partial(output.copy_, source))
    return [*calls, partial(output.masked_fill_, mask, value)]


def _same_place(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.stride() == two.stride()


def _bind_scalar_form(operation: Operation, context: Context) -> list[Call]:
    """``add/sub/mul/div`` with a number: its tensor form with the number as a 0-d tensor made once."""
    overload = _tensor_form(resolve(operation))
    out_form = find_out_form(overload)
    if overload._schema.is_mutable or out_form is None or str(overload._overloadname) not in ("Tensor", "Tensor_mode"):
        return (
            _mutating(overload, operation, context)
            if overload._schema.is_mutable
            else [_copying(overload, operation, context)]
        )
    positional, keywords = arguments(out_form, operation, context)
    return [partial(out_form, *positional, **keywords, out=context.outputs(operation)[0])]


def _bind_mean(operation: Operation, context: Context) -> list[Call]:
    """``mean`` over dimensions: the sum, then one division in place (ATen's own makes a tensor of the divisor)."""
    overload = resolve(operation)
    (output,) = context.outputs(operation)
    source = context.value(operation.arguments[0])
    if overload._overloadname != "dim" or not isinstance(source, torch.Tensor) or not source.is_floating_point():
        return [_copying(overload, operation, context)]
    dims = context.value(operation.arguments[1]) if len(operation.arguments) > 1 else None
    keep = bool(operation.arguments[2]) if len(operation.arguments) > 2 else False
    count = scalar(source.numel() / max(output.numel(), 1), output.dtype, context)
    return [
        partial(torch.ops.aten.sum.IntList_out, source, dims, keep, out=output),
        partial(torch.ops.aten.div.out, output, count, out=output),
    ]


_SPECIAL = {
    "masked_fill": _bind_masked_fill,
    "mul": _bind_scalar_form,
    "div": _bind_scalar_form,
    "add": _bind_scalar_form,
    "sub": _bind_scalar_form,
    "mean": _bind_mean,
}
