"""Operators lowered to several simpler ones, whose temporaries the plan then places like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from planner.graph import Argument, Role, TensorRef, dense_strides
from planner.operators import ARANGE

if TYPE_CHECKING:
    from planner.trace.builder import Builder

Lowering = Callable[["Builder", torch.fx.Node], bool]

_NEGATIVE_INFINITY = float("-inf")


def _new(builder: Builder, node: torch.fx.Node) -> int:
    """The new tensor a node returns."""
    index = builder.add_value(node.name, node.meta["val"], Role.TEMPORARY, node)
    builder.tensor_of[node] = index
    return index


def _operand(builder: Builder, item: Any) -> int:
    argument = builder.argument(item)
    return argument.tensor if isinstance(argument, TensorRef) else builder.index(item)


def _temporary(builder: Builder, node: torch.fx.Node, suffix: str, shape: tuple[int, ...], dtype: str) -> int:
    return builder.fresh(f"{node.name}.{suffix}", shape, dense_strides(shape), dtype)


def _argument(node: torch.fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _flat(builder: Builder, node: torch.fx.Node, index: int, shape: tuple[int, ...], suffix: str) -> int:
    """A tensor's elements as a dense ``shape``; copied first if they do not lie so."""
    if not builder.tensors[index].is_contiguous:
        dense = _temporary(builder, node, suffix, builder.tensors[index].shape, builder.tensors[index].dtype)
        builder.copy(node, index, dense)
        index = dense
    tensor = builder.tensors[index]
    return builder.view(tensor.name, tensor.storage, tensor.offset, shape, dense_strides(shape), tensor.dtype)


def _safe_softmax(builder: Builder, node: torch.fx.Node) -> bool:
    """Softmax in which a row of nothing but −∞ gives zeros: rows whose maximum is −∞ are filled with 0 afterwards."""
    axis = node.args[1]
    if _argument(node, 2, "dtype") is not None or not isinstance(axis, int):
        return False
    source = _operand(builder, node.args[0])
    tensor = builder.tensors[source]
    rank = len(tensor.shape)
    axis = -1 if axis % max(rank, 1) == rank - 1 else axis
    result = _new(builder, node)
    if tensor.numel == 0:
        return True
    rows = tuple(1 if position == axis % rank else size for position, size in enumerate(tensor.shape))
    largest = _temporary(builder, node, "max", rows, tensor.dtype)
    empty = _temporary(builder, node, "empty", rows, "bool")
    builder.emit(node, "aten.amax.default", (TensorRef(source), (axis,), True), (), (largest,))
    builder.emit(node, "aten.eq.Scalar", (TensorRef(largest), _NEGATIVE_INFINITY), (), (empty,))
    builder.emit(node, "aten._softmax.default", (TensorRef(source), axis, False), (), (result,))
    filled = (TensorRef(result), TensorRef(empty), 0.0)
    builder.emit(node, "aten.masked_fill_.Scalar", filled, (), (result,))
    return True


def _native_dropout(builder: Builder, node: torch.fx.Node) -> bool:
    """A mask of kept elements is drawn; the input times 1/(1−p), with zero where it is not kept."""
    probability, training = node.args[1], _argument(node, 2, "train", default=True)
    if not training or not isinstance(probability, float) or not 0.0 < probability < 1.0:
        return False
    source = _operand(builder, node.args[0])
    result, mask = (
        builder.add_value(f"{node.name}.{position}", value, Role.TEMPORARY, node)
        for position, value in enumerate(node.meta["val"])
    )
    builder.tensor_of[node] = (result, mask)
    builder.emit(node, "aten.bernoulli_.float", (TensorRef(mask), 1.0 - probability), (), (mask,))
    _drop(builder, node, source, mask, 1.0 / (1.0 - probability), result)
    return True


def _native_dropout_backward(builder: Builder, node: torch.fx.Node) -> bool:
    """The gradient times the scale, with zero where the mask did not keep."""
    scale = node.args[2]
    if not isinstance(scale, float):
        return False
    gradient, mask = _operand(builder, node.args[0]), _operand(builder, node.args[1])
    _drop(builder, node, gradient, mask, scale, _new(builder, node))
    return True


def _drop(builder: Builder, node: torch.fx.Node, source: int, mask: int, scale: float, result: int) -> None:
    kept = builder.tensors[mask]
    dropped = _temporary(builder, node, "dropped", kept.shape, "bool")
    builder.emit(node, "aten.logical_not.default", (TensorRef(mask),), (), (dropped,))
    builder.emit(node, "aten.mul.Tensor", (TensorRef(source), scale), (), (result,))
    filled = (TensorRef(result), TensorRef(dropped), 0)
    builder.emit(node, "aten.masked_fill_.Scalar", filled, (), (result,))


def _embedding(builder: Builder, node: torch.fx.Node) -> bool:
    """``weight[indices]`` as a selection of rows."""
    table, indices = _operand(builder, node.args[0]), _operand(builder, node.args[1])
    result = _new(builder, node)
    tensor = builder.tensors[result]
    count, width = builder.tensors[indices].numel, tensor.shape[-1]
    picked = _flat(builder, node, indices, (count,), "indices")
    rows = builder.view(tensor.name, tensor.storage, tensor.offset, (count, width), (width, 1), tensor.dtype)
    builder.emit(node, "aten.index_select.default", (TensorRef(table), 0, TensorRef(picked)), (), (rows,))
    return True


def _embedding_dense_backward(builder: Builder, node: torch.fx.Node) -> bool:
    """Zeros to which the gradient's rows are added in order; the row of the padding index stays zero."""
    gradient, indices = _operand(builder, node.args[0]), _operand(builder, node.args[1])
    padding, by_frequency = node.args[3], node.args[4]
    if by_frequency or not isinstance(padding, int):
        return False
    result = _new(builder, node)
    tensor = builder.tensors[result]
    count, width = builder.tensors[indices].numel, tensor.shape[-1]
    picked = _flat(builder, node, indices, (count,), "indices")
    added = _flat(builder, node, gradient, (count, width), "rows")
    builder.fill(node, result, 0)
    builder.emit(
        node,
        "aten.index_add_.default",
        (TensorRef(result), 0, TensorRef(picked), TensorRef(added)),
        (),
        (result,),
    )
    if padding >= 0:
        offset = tensor.offset + padding * tensor.strides[0] * tensor.itemsize
        row = builder.view(tensor.name, tensor.storage, offset, (width,), (tensor.strides[1],), tensor.dtype)
        builder.fill(node, row, 0)
    return True


def _mse_loss(builder: Builder, node: torch.fx.Node) -> bool:
    """The mean, sum or elements of (input − target)²."""
    left, right = _operand(builder, node.args[0]), _operand(builder, node.args[1])
    reduction = _argument(node, 2, "reduction", 1)
    shape = _broadcast(builder.tensors[left].shape, builder.tensors[right].shape)
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    result = _new(builder, node)
    difference = _temporary(builder, node, "difference", shape, dtype)
    squares = result if reduction == 0 else _temporary(builder, node, "squares", shape, dtype)
    builder.emit(node, "aten.sub.Tensor", (TensorRef(left), TensorRef(right)), (), (difference,))
    builder.emit(node, "aten.mul.Tensor", (TensorRef(difference), TensorRef(difference)), (), (squares,))
    if reduction:
        operator = "aten.mean.default" if reduction == 1 else "aten.sum.default"
        builder.emit(node, operator, (TensorRef(squares),), (), (result,))
    return True


def _flip(builder: Builder, node: torch.fx.Node) -> bool:
    """One selection by descending places for each flipped dimension."""
    dims = node.args[1]
    source = _operand(builder, node.args[0])
    shape = builder.tensors[source].shape
    if not isinstance(dims, (list, tuple)) or not dims:
        return False
    result = _new(builder, node)
    if 0 in shape:
        return True
    axes = [int(str(dim)) % len(shape) for dim in dims]
    for number, axis in enumerate(axes):
        last = number == len(axes) - 1
        target = result if last else _temporary(builder, node, f"flip{number}", shape, builder.tensors[source].dtype)
        places = _temporary(builder, node, f"places{number}", (shape[axis],), "int64")
        builder.emit(node, ARANGE, (shape[axis] - 1, -1), (), (places,))
        selected = (TensorRef(source), axis, TensorRef(places))
        builder.emit(node, "aten.index_select.default", selected, (), (target,))
        source = target
    return True


def _is_not_a_number(builder: Builder, node: torch.fx.Node) -> bool:
    source = TensorRef(_operand(builder, node.args[0]))
    builder.emit(node, "aten.ne.Tensor", (source, source), (), (_new(builder, node),))
    return True


def _is_infinite(builder: Builder, node: torch.fx.Node) -> bool:
    source = _operand(builder, node.args[0])
    tensor = builder.tensors[source]
    if not tensor.dtype.startswith(("float", "bfloat")):
        return False
    size = _temporary(builder, node, "size", tensor.shape, tensor.dtype)
    builder.emit(node, "aten.abs.default", (TensorRef(source),), (), (size,))
    builder.emit(node, "aten.eq.Scalar", (TensorRef(size), -_NEGATIVE_INFINITY), (), (_new(builder, node),))
    return True


def _extreme(operator: str) -> Lowering:
    """Lowering of ``any`` and ``all`` of booleans: their largest or smallest."""

    def lowering(builder: Builder, node: torch.fx.Node) -> bool:
        source = _operand(builder, node.args[0])
        if builder.tensors[source].dtype != "bool" or builder.tensors[source].numel == 0:
            return False
        dim = _argument(node, 1, "dim")
        dims: tuple[Argument, ...] = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        keep = bool(_argument(node, 2, "keepdim", False))
        builder.emit(node, operator, (TensorRef(source), dims, keep), (), (_new(builder, node),))
        return True

    return lowering


def _broadcast(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    """The shape two tensors are broadcast to."""
    rank = max(len(one), len(two))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(two)) + two, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


def _copied_then(operator: str) -> Lowering:
    """Lowering of the functional form of an operator that works in place: a copy, then the operator on it."""

    def lowering(builder: Builder, node: torch.fx.Node) -> bool:
        source = _operand(builder, node.args[0])
        others: tuple[Argument, ...] = tuple(builder.argument(item) for item in node.args[1:])
        keywords = tuple((name, builder.argument(item)) for name, item in sorted(node.kwargs.items()))
        result = _new(builder, node)
        builder.copy(node, source, result)
        builder.emit(node, operator, (TensorRef(result), *others), keywords, (result,))
        return True

    return lowering


def _drawn(operator: str) -> Lowering:
    """Lowering of ``rand_like`` and its kin: the result drawn in place."""

    def lowering(builder: Builder, node: torch.fx.Node) -> bool:
        result = _new(builder, node)
        builder.emit(node, operator, (TensorRef(result),), (), (result,))
        return True

    return lowering


_IN_PLACE = (
    "index_put",
    "index_add",
    "index_copy",
    "index_fill.int_Scalar",
    "scatter.src",
    "scatter.value",
    "scatter_add",
    "scatter_reduce.two",
    "masked_scatter",
)


def _in_place(operator: str) -> str:
    name, _, overload = operator.partition(".")
    return f"aten.{name}_.{overload or 'default'}"


TABLE: Mapping[str, Lowering] = MappingProxyType(
    {
        "aten::_safe_softmax": _safe_softmax,
        "aten::native_dropout": _native_dropout,
        "aten::native_dropout_backward": _native_dropout_backward,
        "aten::embedding": _embedding,
        "aten::embedding_dense_backward": _embedding_dense_backward,
        "aten::mse_loss": _mse_loss,
        "aten::flip": _flip,
        "aten::isnan": _is_not_a_number,
        "aten::isinf": _is_infinite,
        **dict.fromkeys(("aten::any", "aten::any.dim", "aten::any.dims"), _extreme("aten.amax.default")),
        **dict.fromkeys(("aten::all", "aten::all.dim", "aten::all.dims"), _extreme("aten.amin.default")),
        **{f"aten::{operator}": _copied_then(_in_place(operator)) for operator in _IN_PLACE},
        **dict.fromkeys(("aten::rand_like", "aten::rand"), _drawn("aten.uniform_.default")),
        "aten::random": _drawn("aten.random_.default"),
        **dict.fromkeys(("aten::randn_like", "aten::randn"), _drawn("aten.normal_.default")),
    }
)
