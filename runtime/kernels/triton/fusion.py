"""Chains of planned operations that run as one kernel: scale, mask, softmax, and dropout round it.

A plan says where every intermediate result lies; a chain that works in place on one buffer can as well leave the
intermediate results out. Found when a plan is bound, so that a plan is the same for every device:

* ``scale → (mask with −∞) → softmax`` becomes one softmax;
* ``scale by 1/keep → zero what was dropped → softmax backward → scale`` becomes one backward, in place.

What is left out must be read by the next link only, and the chain must work on the bytes it began with. A row whose
columns are all masked then gives zeros, where the separate operators give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from planner.graph import Graph, Operation, TensorRef
from planner.operators import POINTWISE, base_name
from planner.pointwise import decode
from runtime.kernels.triton import softmax
from runtime.kernels.triton.launch import Launch
from runtime.kernels.triton.table import same_floats

_SCALES = ("mul", "div")


@dataclass(slots=True)
class _Chain:
    """Links of a chain by position, and what they say."""

    positions: list[int] = field(default_factory=list)
    scale: float = 1.0
    after: float = 1.0
    mask: int | None = None


@dataclass(frozen=True, slots=True)
class Fusion:
    """A launch in the place of one operation, and the operations it leaves out."""

    launch: Launch
    position: int
    dropped: frozenset[int]


class _Program:
    """A graph with the look-ups that finding chains needs."""

    def __init__(self, graph: Graph, views: Sequence[torch.Tensor]) -> None:
        self.operations = graph.operations
        self.views = views
        border = {
            graph.tensors[port.tensor].storage for port in graph.results + graph.filled if port.tensor is not None
        }
        self.border = border
        self.storage = [tensor.storage for tensor in graph.tensors]
        self.touching: dict[int, list[int]] = {}
        self.writer: dict[int, int] = {}
        for position, operation in enumerate(graph.operations):
            for storage in {self.storage[index] for index in operation.reads + operation.writes}:
                self.touching.setdefault(storage, []).append(position)
            for index in operation.writes:
                self.writer[index] = position

    def between(self, index: int, consumer: int) -> int | None:
        """The operation that makes a tensor only ``consumer`` reads, if nothing else touches its storage."""
        producer = self.writer.get(index)
        storage = self.storage[index]
        if producer is None or storage in self.border or self.touching[storage] != [producer, consumer]:
            return None
        return producer

    def reader(self, index: int, producer: int) -> int | None:
        """The one operation that reads what ``producer`` wrote, if nothing else touches its storage."""
        storage = self.storage[index]
        touching = self.touching[storage]
        if storage in self.border or len(touching) != 2 or touching[0] != producer:
            return None
        return touching[1] if index in self.operations[touching[1]].reads else None

    def same_place(self, one: int, two: int) -> bool:
        """Whether two tensors are the same elements of memory."""
        a, b = self.views[one], self.views[two]
        return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)

    def kept(self, index: int, first: int, last: int) -> bool:
        """Whether operations in ``[first, last)`` leave a tensor's bytes alone."""
        region = _bytes_of(self.views[index])
        return not any(
            _overlap(region, _bytes_of(self.views[written]))
            for operation in self.operations[first:last]
            for written in operation.writes
        )


def _bytes_of(view: torch.Tensor) -> tuple[int, int]:
    extent = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    count = extent + 1 if view.numel() else 0
    return view.data_ptr(), view.data_ptr() + count * view.element_size()


def _overlap(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def _scale(operation: Operation) -> float | None:
    """The number an operation multiplies its one tensor with."""
    if base_name(operation.operator) not in _SCALES or operation.keywords or len(operation.arguments) != 2:
        return None
    tensor, number = operation.arguments
    if not isinstance(tensor, TensorRef) or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if base_name(operation.operator) == "mul":
        return float(number)
    return 1.0 / number if number else None


def _fill(operation: Operation, value: float) -> tuple[int, int] | None:
    """``(tensor, mask)`` of an operation that fills what a mask names with ``value``."""
    if base_name(operation.operator) != "masked_fill" or len(operation.arguments) != 3:
        return None
    tensor, mask, number = operation.arguments
    if not isinstance(tensor, TensorRef) or not isinstance(mask, TensorRef) or number != value:
        return None
    return tensor.tensor, mask.tensor


def fusions(graph: Graph, views: Sequence[torch.Tensor]) -> list[Fusion]:
    """Every chain of a graph's operations that one kernel does, none in a lane."""
    program = _Program(graph, views)
    found = []
    for position, operation in enumerate(graph.operations):
        if operation.lane is not None or operation.outputs[:1] == (None,) or not operation.outputs:
            continue
        name = base_name(operation.operator)
        fusion = None
        if name == "_softmax":
            fusion = _softmax(program, position, operation)
        elif name == "_softmax_backward_data":
            fusion = _backward(program, position, operation)
        if fusion is not None:
            found.append(fusion)
    return found


@dataclass(frozen=True, slots=True)
class _Link:
    """An operation as ``fill(scale · tensor)`` where a mask says so; either may be missing."""

    tensor: int
    scale: float = 1.0
    mask: int | None = None


def _link(operation: Operation, filling: float) -> _Link | None:
    """What a link of a chain does: a scale, a fill, or, as one program, both."""
    scale = _scale(operation)
    if scale is not None:
        return _Link(operation.reads[0], scale)
    filled = _fill(operation, filling)
    if filled is not None:
        return _Link(filled[0], 1.0, filled[1])
    return _program_link(operation, filling) if operation.operator == POINTWISE else None


def _program_link(operation: Operation, filling: float) -> _Link | None:
    """``where(mask, filling, x · number)`` or a part of it, among the programs on elements."""
    instructions = decode(operation.arguments)
    operands = operation.arguments[1:]
    place = len(operands) + len(instructions) - 1
    mask, scale = None, 1.0
    name, used = instructions[-1]
    if name == "where":
        flags, value, place = used
        number = operands[value] if value < len(operands) else None
        kept = operands[flags] if flags < len(operands) else None
        if not isinstance(number, (int, float)) or number != filling or not isinstance(kept, TensorRef):
            return None
        mask = kept.tensor
    if place >= len(operands):
        name, used = instructions[place - len(operands)]
        tensor, factor = (
            (operands[item] if item < len(operands) else None for item in used[:2]) if len(used) == 2 else (None, None)
        )
        if name == "mul" and not isinstance(tensor, TensorRef):
            tensor, factor = factor, tensor
        if name not in _SCALES or not isinstance(factor, (int, float)) or (name == "div" and not factor):
            return None
        scale = float(factor) if name == "mul" else 1.0 / factor
    else:
        tensor = operands[place]
    whole = len(instructions) == (mask is not None) + (place >= len(operands))
    return _Link(tensor.tensor, scale, mask) if whole and isinstance(tensor, TensorRef) else None


def _source(program: _Program, index: int, consumer: int, filling: float) -> tuple[int, _Chain]:
    """Where a chain that ends in tensor ``index`` begins: scaled, then filled by a mask, either left out."""
    chain = _Chain()
    while len(chain.positions) < 2:
        place = program.between(index, consumer)
        link = None if place is None else _link(program.operations[place], filling)
        if place is None or link is None or not program.same_place(link.tensor, index):
            break
        if link.mask is not None:
            masked = chain.mask is not None or chain.scale != 1.0  # a fill before the scale is another function
            if masked or program.views[link.mask].dtype != torch.bool or not program.kept(link.mask, place, consumer):
                break
            chain.mask = link.mask
        elif chain.positions and chain.mask is None:
            break
        chain.scale *= link.scale
        chain.positions.append(place)
        index, consumer = link.tensor, place
    return index, chain


def _softmax(program: _Program, position: int, operation: Operation) -> Fusion | None:
    x, axis = operation.arguments[:2]
    out = operation.outputs[0]
    if not isinstance(x, TensorRef) or out is None or not isinstance(axis, int):
        return None
    source, chain = _source(program, x.tensor, position, float("-inf"))
    views = program.views
    last = axis % max(views[out].dim(), 1) == views[out].dim() - 1
    if not chain.positions or not last or not _ordered(program, chain, source, position):
        return None
    if not same_floats(views[source], views[out]) or not _apart(program, out, source, chain.mask):
        return None
    mask = None if chain.mask is None else views[chain.mask]
    launch = softmax.launch(views[source], views[out], scale=chain.scale, mask=mask, safe=mask is not None)
    return None if launch is None else Fusion(launch, position, frozenset(chain.positions))


def _backward(program: _Program, position: int, operation: Operation) -> Fusion | None:
    grad, probs, axis = operation.arguments[:3]
    out = operation.outputs[0]
    if not isinstance(grad, TensorRef) or not isinstance(probs, TensorRef) or out is None or not isinstance(axis, int):
        return None
    source, chain = _source(program, grad.tensor, position, 0)
    views = program.views
    if chain.positions and chain.mask is None:  # a scale that belongs to no dropout: leave it
        source, chain = grad.tensor, _Chain()
    following = program.reader(out, position)
    if following is not None:
        after = _scale(program.operations[following])
        (final,) = program.operations[following].outputs[:1]
        if after is not None and final is not None and program.same_place(final, out):
            chain.after = after
            chain.positions.append(following)
    last = axis % max(views[out].dim(), 1) == views[out].dim() - 1
    if not chain.positions or not last or not _ordered(program, chain, source, position):
        return None
    if not same_floats(views[source], views[probs.tensor], views[out]):
        return None
    if not _apart(program, out, source, chain.mask) or not _apart(program, out, probs.tensor, None):
        return None
    dropped = None if chain.mask is None else views[chain.mask]
    if dropped is not None and dropped.shape != views[source].shape:
        return None
    launch = softmax.launch_backward(
        views[source],
        views[probs.tensor],
        views[out],
        scale=chain.after,
        dropped=dropped,
        keep_scale=chain.scale,
        safe=dropped is not None,
    )
    return None if launch is None else Fusion(launch, position, frozenset(chain.positions))


def _ordered(program: _Program, chain: _Chain, source: int, position: int) -> bool:
    """Whether nothing but the links left out writes on the source before the kernel runs, and no lane is crossed."""
    before = [place for place in chain.positions if place < position]
    if any(program.operations[place].lane is not None for place in chain.positions):
        return False
    if not before:
        return True
    region = _bytes_of(program.views[source])
    return not any(
        _overlap(region, _bytes_of(program.views[written]))
        for place in range(min(before), position)
        if place not in before
        for written in program.operations[place].writes
    )


def _apart(program: _Program, out: int, source: int, mask: int | None) -> bool:
    """Whether the result lies exactly on what is read, or apart from it, and apart from the mask."""
    region = _bytes_of(program.views[out])
    if not program.same_place(out, source) and _overlap(region, _bytes_of(program.views[source])):
        return False
    return mask is None or not _overlap(region, _bytes_of(program.views[mask]))
