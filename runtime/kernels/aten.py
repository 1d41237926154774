"""ATen operators called on arena views: through their true out-form, in place, or, failing both, with a copy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from planner.graph import Argument, Dtype, Operation
from planner.operators import base_name, has_out_form, is_elementwise
from runtime.errors import ArenaError, UnknownOperatorError
from runtime.kernels.binding import Call, Context

_NAME = re.compile(r"aten\.(\w+)\.(\w+)")
#: Operators that change what a tensor is a view of; none belongs in a plan.
_RESHAPING = ("resize", "set_", "set", "_resize", "swap", "as_strided")
_ENUMS = {
    "torch.strided": torch.strided,
    "torch.contiguous_format": torch.contiguous_format,
    "torch.preserve_format": torch.preserve_format,
    "torch.channels_last": torch.channels_last,
    "torch.channels_last_3d": torch.channels_last_3d,
}


def bind_aten(operation: Operation, context: Context) -> list[Call]:
    """Bind an ATen operator; see `planner.operators.unplanned_nbytes` for which of them still allocate."""
    overload = resolve(operation)
    outputs = context.outputs(operation)
    if outputs and all(output.numel() == 0 for output in outputs):
        return []
    if overload._schema.is_mutable:
        return _mutating(overload, operation, context)
    out_form = find_out_form(overload)
    if out_form is None or not has_out_form(operation.operator) or None in operation.outputs:
        return [copying(overload, operation, context)]
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
    if match is not None and match[1].strip("_").startswith(_RESHAPING):
        raise UnknownOperatorError(operation.operator, operation.name)
    takes_tensor = any("Tensor" in str(argument.type) for argument in overload._schema.arguments)
    gives_tensor = all("Tensor" in str(result.type) for result in overload._schema.returns)
    if not takes_tensor or not gives_tensor:
        raise UnknownOperatorError(operation.operator, operation.name)
    return overload


def check_fit(operation: Operation, context: Context) -> None:
    """Raise `ArenaError` unless the operator, on tensors like its operands, gives tensors like its outputs.

    An out-form would resize an output that does not fit, and write over its neighbours in the arena.
    """
    overload = resolve(operation)
    if overload._schema.is_mutable or len(overload._schema.returns) != 1 or len(operation.outputs) != 1:
        return  # kernels of several results have statistics among them that differ between devices, and copy them
    positional, keywords = arguments(overload, operation, context)
    try:
        result = overload(*_on_meta(positional), **_on_meta(keywords))
    except NotImplementedError:  # no shape function: it runs functionally, and copying checks the shape
        return
    (index,) = operation.outputs
    if index is None or not isinstance(result, torch.Tensor):
        return
    view = context.views[index]
    if view.shape != result.shape or view.dtype != result.dtype:
        cause = f"{operation.operator} gives {result.dtype} {tuple(result.shape)}"
        raise ArenaError(f"operation {operation.name}: {cause}, its output is {view.dtype} {tuple(view.shape)}")


def _on_meta(value: Any) -> Any:
    """Arguments with every tensor replaced by one of the same layout without data."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    return value


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
        dtype = operands[-1].dtype  # all alike, but for a mask, which comes first or second
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
    """A zero-dimensional tensor of a number, made once where ATen would make one on every call.

    For 16-bit operands ATen keeps some numbers in float32: see `_bind_half_number`.
    """
    return torch.tensor(value, dtype=dtype, device=context.views[0].device if context.views else None)


def tensor_form(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """``mul.Scalar`` → ``mul.Tensor``, ``clamp_min`` → ``clamp_min.Tensor``: the operator with a tensor for its number.

    ATen makes a tensor of the number on every call; the form with a tensor has an out-form that allocates nothing.
    """
    names = {"Scalar": "Tensor", "Scalar_mode": "Tensor_mode", "default": "Tensor"}
    if not any("number" in str(argument.type) for argument in overload._schema.arguments if not argument.kwarg_only):
        return overload
    wanted = getattr(overload.overloadpacket, names.get(str(overload._overloadname), ""), None)
    if isinstance(wanted, torch._ops.OpOverload) and len(wanted._schema.arguments) == len(overload._schema.arguments):
        return wanted
    return overload


def _mutating(overload: torch._ops.OpOverload, operation: Operation, context: Context) -> list[Call]:
    """An operator that writes its own arguments."""
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


def copying(overload: torch._ops.OpOverload, operation: Operation, context: Context) -> Call:
    """Call the functional form and copy its results into the arena; listed in the plan as unplanned."""
    positional, keywords = arguments(overload, operation, context)

    def call() -> None:
        results = overload(*positional, **keywords)
        returned: Sequence[Any] = [results] if isinstance(results, torch.Tensor) else list(results)
        for index, result in zip(operation.outputs, returned, strict=True):
            if index is not None:
                context.views[index].copy_(result)

    return call


def _bind_half_number(operation: Operation, context: Context) -> list[Call]:
    """``x · number`` and ``x ÷ number`` for 16-bit x, the number in float32 as ATen takes it; rounded once.

    A 0-d tensor of the number would be rounded to 16 bits, or converted on every call. ``addcmul`` takes its factor in
    float32: ``0 + number · x · 1``. A quotient is a product with 1/number. (Sums round the number, in ATen as here.)
    """
    (output,) = context.outputs(operation)
    name = base_name(operation.operator)
    if output.dtype not in (torch.float16, torch.bfloat16) or name not in ("mul", "div", "lerp"):
        return []
    number = operation.arguments[-1]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or operation.keywords:
        return []
    if name == "lerp":
        start, end = (context.tensor(argument) for argument in operation.arguments[:2])
        return [partial(torch.ops.aten.lerp.Scalar_out, start, end, number, out=output)]
    if len(operation.arguments) != 2 or (name == "div" and number == 0):
        return []
    source = context.tensor(operation.arguments[0])
    zero, one = (scalar(value, output.dtype, context) for value in (0, 1))
    factor = number if name == "mul" else 1.0 / number
    return [partial(torch.ops.aten.addcmul.out, zero, source, one, value=factor, out=output)]


def bind_elementwise(operation: Operation, context: Context) -> list[Call]:
    """An operator on elements, in place or not, its numbers as tensors made once; computed in the operands' dtype.

    The output may be any operand of the same layout.
    """
    (output,) = context.outputs(operation)
    if output.numel() == 0:
        return []
    wide = _bind_half_number(operation, context)
    if wide:
        return wide
    overload = resolve(operation)
    if overload._schema.is_mutable:
        plain = getattr(torch.ops.aten, base_name(operation.operator))
        overload = getattr(plain, str(overload._overloadname))
    overload = tensor_form(overload)
    out_form = find_out_form(overload)
    if out_form is None:
        raise UnknownOperatorError(operation.operator, operation.name)
    (name,) = (argument.name for argument in out_form._schema.arguments if argument.is_out)
    positional, keywords = arguments(out_form, operation, context)
    return [partial(out_form, *positional, **keywords, **{name: output})]
