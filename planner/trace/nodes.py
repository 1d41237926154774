"""What a node of a captured torch.fx graph says of itself: operator, dtype, source line, what it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from planner.errors import TraceError
from planner.graph import ITEMSIZE
from planner.trace.capture import is_user_file

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"float32"``; refuses dtypes a plan cannot name."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise TraceError(f"dtype {name}", "it cannot be planned", "use a dtype of whole bytes")
    return name


def operator_name(target: torch._ops.OpOverload) -> str:
    """``"aten.mm.default"``."""
    return str(target)


def schema_name(target: torch._ops.OpOverload) -> str:
    """``"aten::cat"``, ``"aten::fill_.Scalar"``."""
    overload = target._schema.overload_name
    return f"{target._schema.name}.{overload}" if overload else target._schema.name


def source_of(node: torch.fx.Node) -> str:
    """``file.py:12``, the innermost line of the user's own code, or ``""``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if is_user_file(filename):
            return f"{Path(filename).name}:{line}"
    return ""


def refuse_layout(value: torch.Tensor, node: torch.fx.Node) -> None:
    """Refuse a node whose result is not strided, such as a sparse gradient."""
    if value.layout != torch.strided:
        raise TraceError(
            f"{node.target} ({node.name})",
            f"its result is {value.layout}",
            "sparse tensors and sparse gradients are not planned: pass sparse=False",
            source_of(node),
        )


def is_scalar_read(node: torch.fx.Node, value: Any) -> bool:
    """Whether a node takes a number out of a tensor."""
    return str(node.target) in {"aten._local_scalar_dense.default", "aten.item.default"} or isinstance(
        value, (torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def mutated_arguments(node: torch.fx.Node) -> list[Any]:
    """The fx arguments an operator writes, by its schema (and, where the schema is silent, by what is known)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    mutated: list[Any] = []
    for position, argument in enumerate(target._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        written |= _writes_silently(node, argument.name)
        if not written:
            continue
        item = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        mutated.extend(item if isinstance(item, (list, tuple)) else [item])
    return [item for item in mutated if item is not None]


def _writes_silently(node: torch.fx.Node, argument: str) -> bool:
    """Whether an operator writes ``argument`` although its schema does not say so: batch norm's running statistics."""
    if str(node.target) != "aten.native_batch_norm.default" or argument not in ("running_mean", "running_var"):
        return False
    training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training")
    return bool(training)
