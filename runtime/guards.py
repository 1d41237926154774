"""What a version of a compiled graph depends on: kinds and aliases of its inputs, numbers it reads, largest shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

#: By position: shape and strides of a tensor with dynamic dimensions, or a dynamic number, each at its maximum.
Shapes = dict[int, tuple[tuple[int, ...], tuple[int, ...]] | int]


def read_as_numbers(module: GraphModule) -> tuple[int, ...]:
    """Positions of the arguments that the graph reads a number out of: floats that Dynamo holds as 0-d tensors."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(position for position, node in enumerate(placeholders) if any(_is_item(user) for user in node.users))


def _is_item(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def with_numbers(module: GraphModule, numbers: Mapping[int, float]) -> GraphModule:
    """The graph with those numbers in the places where it reads them."""
    if not numbers:
        return module
    made = copy.deepcopy(module)
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    for position, number in numbers.items():
        for user in [user for user in placeholders[position].users if _is_item(user)]:
            for reader in list(user.users):
                put = partial(_number_for, user, number)
                reader.args, reader.kwargs = torch.fx.map_arg(reader.args, put), torch.fx.map_arg(reader.kwargs, put)
            made.graph.erase_node(user)
    made.recompile()
    return made


def _number_for(node: torch.fx.Node, number: float, argument: torch.fx.Node) -> torch.fx.Node | float:
    return number if argument is node else argument


def kind_of(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.stride(), argument.dtype, argument.requires_grad)
    return argument


def aliases(arguments: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """``(first, second, bytes between them)`` for arguments that share a storage: a graph is made for one pattern."""
    seen: dict[int, tuple[int, int]] = {}
    found = []
    for position, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            continue
        storage = argument.untyped_storage().data_ptr()
        if storage and storage in seen:
            first, pointer = seen[storage]
            found.append((first, position, argument.data_ptr() - pointer))
        seen.setdefault(storage, (position, argument.data_ptr()))
    return tuple(found)


def largest_shapes(module: GraphModule) -> Shapes | None:
    """The dynamic inputs at their maxima, ``None`` where there is none or one has no maximum."""
    found: Shapes = {}
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    for position, item in enumerate(node.meta.get("example_value") for node in placeholders):
        if isinstance(item, torch.SymInt):
            numbers = _maxima((item,))
            if numbers is None:
                return None
            found[position] = numbers[0]
        elif isinstance(item, torch.Tensor) and not all(type(size) is int for size in item.shape):
            shape, strides = _maxima(item.shape), _maxima(item.stride())
            if shape is None or strides is None:
                return None
            found[position] = shape, strides
    return found or None


def _maxima(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    found = []
    for size in sizes:
        upper: Any = size
        if isinstance(size, torch.SymInt):
            upper = size.node.shape_env.bound_sympy(size.node.expr).upper
            if not upper.is_Integer or int(upper) >= 2**31:  # an infinity is no Integer
                return None
        found.append(int(upper))
    return tuple(found)
