"""Operators lowered to plain copies and fills: one form for every way PyTorch spells "put these elements there"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from planner.errors import TraceError
from planner.graph import Role, TensorRef, dense_strides
from planner.operators import ARANGE
from planner.trace import compose, fused
from planner.trace.nodes import source_of

if TYPE_CHECKING:
    from planner.trace.builder import Builder

Lowering = Callable[["Builder", torch.fx.Node], bool]


def _fresh(builder: Builder, node: torch.fx.Node) -> int:
    """The new tensor a node returns."""
    index = builder.add_value(node.name, node.meta["val"], Role.TEMPORARY, node)
    builder.refuse_overlap(index, node)
    builder.tensor_of[node] = index
    return index


def _copy(builder: Builder, node: torch.fx.Node) -> bool:
    source = _source(builder, node.args[0])
    builder.copy(node, source, _fresh(builder, node))
    return True


def _source(builder: Builder, item: Any) -> int:
    argument = builder.argument(item)
    return argument.tensor if isinstance(argument, TensorRef) else builder.index(item)


def _copy_into(builder: Builder, node: torch.fx.Node) -> bool:
    destination = builder.index(node.args[0])
    builder.copy(node, _source(builder, node.args[1]), destination)
    builder.tensor_of[node] = destination
    return True


def _copy_of(builder: Builder, node: torch.fx.Node) -> bool:
    """``aten::copy``: the second tensor's elements in the shape, dtype and strides of the first, which is not read."""
    builder.copy(node, _source(builder, node.args[1]), _fresh(builder, node))
    return True


def _bernoulli_into(builder: Builder, node: torch.fx.Node) -> bool:
    """``bernoulli_()``: the dispatcher leaves the default probability out; later passes find it written."""
    if len(node.args) != 1 or node.kwargs:
        return False
    destination = builder.index(node.args[0])
    builder.refuse_overlap(destination, node)
    builder.emit(node, "aten.bernoulli_.float", (TensorRef(destination), 0.5), (), (destination,))
    builder.tensor_of[node] = destination
    return True


def _empty(builder: Builder, node: torch.fx.Node) -> bool:
    _fresh(builder, node)
    return True


def _filled(position: int | None, value: float | int = 0) -> Lowering:
    """Lowering of a creation operator whose fill value is argument ``position``, or always ``value``."""

    def lowering(builder: Builder, node: torch.fx.Node) -> bool:
        filling = value if position is None else node.args[position]
        if not isinstance(filling, (bool, int, float)):
            return False
        builder.fill(node, _fresh(builder, node), filling)
        return True

    return lowering


def _fill_into(builder: Builder, node: torch.fx.Node) -> bool:
    filling = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(filling, (bool, int, float)):
        return False
    destination = builder.index(node.args[0])
    builder.refuse_overlap(destination, node)
    builder.fill(node, destination, filling)
    builder.tensor_of[node] = destination
    return True


def _concatenate(builder: Builder, node: torch.fx.Node) -> bool:
    pieces, axis = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(pieces, (list, tuple)) or not isinstance(axis, int):
        return False
    whole = _fresh(builder, node)
    rank = len(builder.tensors[whole].shape)
    axis %= max(rank, 1)
    start = 0
    for piece in pieces:
        source = _source(builder, piece)
        shape = builder.tensors[source].shape
        if len(shape) != rank:  # torch.cat accepts an empty 1-D tensor beside tensors of any rank
            continue
        if shape[axis]:
            builder.copy(node, source, slice_view(builder, whole, axis, start, shape[axis], 1))
        start += shape[axis]
    return True


def _stack(builder: Builder, node: torch.fx.Node) -> bool:
    pieces, axis = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(pieces, (list, tuple)) or not isinstance(axis, int):
        return False
    whole = _fresh(builder, node)
    axis %= len(builder.tensors[whole].shape)
    for position, piece in enumerate(pieces):
        builder.copy(node, _source(builder, piece), select_view(builder, whole, axis, position))
    return True


def _scatter(view: Callable[[Builder, int, torch.fx.Node, int], int], *, has_base: bool) -> Lowering:
    """Lowering of "a tensor with this view of it replaced": a copy (or zeros), then a copy into the view."""

    def lowering(builder: Builder, node: torch.fx.Node) -> bool:
        whole = _fresh(builder, node)
        if has_base:
            builder.copy(node, _source(builder, node.args[0]), whole)
            part = _source(builder, node.args[1])
        else:
            builder.fill(node, whole, 0)
            part = _source(builder, node.args[0])
        destination = view(builder, whole, node, 2)
        if builder.tensors[destination].numel:
            builder.copy(node, part, destination)
        return True

    return lowering


def slice_view(builder: Builder, index: int, axis: int, start: int, size: int, step: int) -> int:
    """The view ``tensor[..., start : start + size * step : step]`` along ``axis``."""
    tensor = builder.tensors[index]
    shape, strides = list(tensor.shape), list(tensor.strides)
    offset = tensor.offset + start * strides[axis] * tensor.itemsize
    shape[axis] = size
    strides[axis] *= step
    return builder.view(f"{tensor.name}.slice", tensor.storage, offset, shape, strides, tensor.dtype)


def select_view(builder: Builder, index: int, axis: int, position: int) -> int:
    """The view ``tensor[..., position]`` along ``axis``."""
    tensor = builder.tensors[index]
    offset = tensor.offset + position * tensor.strides[axis] * tensor.itemsize
    shape = tensor.shape[:axis] + tensor.shape[axis + 1 :]
    strides = tensor.strides[:axis] + tensor.strides[axis + 1 :]
    return builder.view(f"{tensor.name}.select", tensor.storage, offset, shape, strides, tensor.dtype)


def _number(node: torch.fx.Node, position: int, name: str, default: int) -> int:
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default if not isinstance(value, int) else value


def _slice_of(builder: Builder, whole: int, node: torch.fx.Node, first: int) -> int:
    shape = builder.tensors[whole].shape
    axis = _number(node, first, "dim", 0) % len(shape)
    size = shape[axis]
    start = _clamp(_number(node, first + 1, "start", 0), size)
    end = max(_clamp(_number(node, first + 2, "end", size), size), start)
    step = _number(node, first + 3, "step", 1)
    return slice_view(builder, whole, axis, start, -(-(end - start) // step), step)


def _clamp(position: int, size: int) -> int:
    return min(max(position + size if position < 0 else position, 0), size)


def _select_of(builder: Builder, whole: int, node: torch.fx.Node, first: int) -> int:
    shape = builder.tensors[whole].shape
    axis = _number(node, first, "dim", 0) % len(shape)
    return select_view(builder, whole, axis, _number(node, first + 1, "index", 0) % shape[axis])


def _diagonal_of(builder: Builder, whole: int, node: torch.fx.Node, first: int) -> int:
    tensor = builder.tensors[whole]
    rank = len(tensor.shape)
    offset = _number(node, first, "offset", 0)
    one, two = _number(node, first + 1, "dim1", 0) % rank, _number(node, first + 2, "dim2", 1) % rank
    size = max(min(tensor.shape[one] + min(offset, 0), tensor.shape[two] - max(offset, 0)), 0)
    begin = tensor.strides[two] * offset if offset > 0 else -tensor.strides[one] * offset
    kept = [axis for axis in range(rank) if axis not in (one, two)]
    shape = [tensor.shape[axis] for axis in kept] + [size]
    strides = [tensor.strides[axis] for axis in kept] + [tensor.strides[one] + tensor.strides[two]]
    byte = tensor.offset + (begin * tensor.itemsize if size else 0)
    return builder.view(f"{tensor.name}.diagonal", tensor.storage, byte, shape, strides, tensor.dtype)


def _as_strided_of(builder: Builder, whole: int, node: torch.fx.Node, first: int) -> int:
    tensor = builder.tensors[whole]
    shape, strides = (tuple(int(str(item)) for item in node.args[position]) for position in (first, first + 1))  # type: ignore[union-attr]
    byte = tensor.offset + _number(node, first + 2, "storage_offset", 0) * tensor.itemsize
    return builder.view(f"{tensor.name}.strided", tensor.storage, byte, shape, strides, tensor.dtype)


def _refused(cause: str, remedy: str) -> Lowering:
    def lowering(_: Builder, node: torch.fx.Node) -> bool:
        raise TraceError(str(node.target), cause, remedy, source_of(node))

    return lowering


_RESIZED = _refused("it changes the size of a storage", "allocate the final size instead")


def _pad(builder: Builder, node: torch.fx.Node) -> bool:
    """A fill, then a copy into the middle; negative padding cuts the source first."""
    source, padding = _source(builder, node.args[0]), node.args[1]
    value = node.args[2] if len(node.args) > 2 else 0
    if not isinstance(padding, (list, tuple)) or not isinstance(value, (bool, int, float)):
        return False
    whole = _fresh(builder, node)
    middle = whole
    rank = len(builder.tensors[whole].shape)
    pairs = [(int(str(padding[i])), int(str(padding[i + 1]))) for i in range(0, len(padding), 2)]
    for distance, (before, after) in enumerate(pairs):
        axis = rank - 1 - distance
        kept = builder.tensors[source].shape[axis] + min(before, 0) + min(after, 0)
        source = slice_view(builder, source, axis, max(-before, 0), max(kept, 0), 1)
        middle = slice_view(builder, middle, axis, max(before, 0), max(kept, 0), 1)
    if any(before > 0 or after > 0 for before, after in pairs):
        builder.fill(node, whole, _as_dtype(value, builder.tensors[whole].dtype))
    if builder.tensors[middle].numel:
        builder.copy(node, source, middle)
    return True


def _as_dtype(value: float, dtype: str) -> float | int | bool:
    return value if dtype.startswith(("float", "bfloat", "complex")) else bool(value) if dtype == "bool" else int(value)


def _repeat(builder: Builder, node: torch.fx.Node) -> bool:
    """One copy: every dimension of the result as (times, size), the source repeated over the first by stride zero."""
    source, times = _source(builder, node.args[0]), node.args[1]
    if not isinstance(times, (list, tuple)) or not all(isinstance(count, int) for count in times):
        return False
    whole = _fresh(builder, node)
    tensor, result = builder.tensors[source], builder.tensors[whole]
    lead = len(result.shape) - len(tensor.shape)
    sizes, strides = (1,) * lead + tensor.shape, (0,) * lead + tensor.strides
    shape = tuple(part for count, size in zip(times, sizes, strict=True) for part in (int(str(count)), size))
    if result.numel == 0:
        return True
    read = tuple(part for stride in strides for part in (0, stride))
    write = tuple(
        part
        for stride, size in zip(dense_strides(result.shape), sizes, strict=True)
        for part in (stride * size, stride)
    )
    repeated = builder.view(tensor.name, tensor.storage, tensor.offset, shape, read, tensor.dtype)
    builder.copy(node, repeated, builder.view(result.name, result.storage, result.offset, shape, write, result.dtype))
    return True


def _arange(builder: Builder, node: torch.fx.Node) -> bool:
    numbers = [item for item in node.args if isinstance(item, (int, float))]
    if len(numbers) != len(node.args):
        return False
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    builder.emit(node, ARANGE, (start, step), (), (_fresh(builder, node),))
    return True


TABLE: Mapping[str, Lowering] = MappingProxyType(
    {
        **dict.fromkeys(("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::lift_fresh_copy"), _copy),
        "aten::copy_": _copy_into,
        "aten::copy": _copy_of,
        "aten::bernoulli_.float": _bernoulli_into,
        **dict.fromkeys(
            (
                "aten::empty.memory_format",
                "aten::empty_strided",
                "aten::empty_like",
                "aten::new_empty",
                "aten::new_empty_strided",
                "aten::empty_permuted",
            ),
            _empty,
        ),
        **dict.fromkeys(
            ("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::_efficientzerotensor"), _filled(None, 0)
        ),
        **dict.fromkeys(("aten::ones", "aten::ones_like", "aten::new_ones"), _filled(None, 1)),
        "aten::full": _filled(1),
        "aten::full_like": _filled(1),
        "aten::new_full": _filled(2),
        "aten::scalar_tensor": _filled(0),
        "aten::fill_.Scalar": _fill_into,
        "aten::zero_": _fill_into,
        "aten::cat": _concatenate,
        "aten::stack": _stack,
        "aten::slice_scatter": _scatter(_slice_of, has_base=True),
        "aten::select_scatter": _scatter(_select_of, has_base=True),
        "aten::diagonal_scatter": _scatter(_diagonal_of, has_base=True),
        "aten::as_strided_scatter": _scatter(_as_strided_of, has_base=True),
        "aten::slice_backward": _scatter(_slice_of, has_base=False),
        "aten::select_backward": _scatter(_select_of, has_base=False),
        "aten::diagonal_backward": _scatter(_diagonal_of, has_base=False),
        "aten::constant_pad_nd": _pad,
        "aten::repeat": _repeat,
        "aten::fill_.Tensor": _copy_into,
        **dict.fromkeys(("aten::arange", "aten::arange.start", "aten::arange.start_step"), _arange),
        "arenaplan::attention": fused.lower_attention,
        "arenaplan::attention_backward": fused.lower_attention_backward,
        **compose.TABLE,
        "aten::resize_": _RESIZED,
        "aten::set_.source_Tensor": _RESIZED,
        "aten::set_.source_Storage": _RESIZED,
    }
)
