"""How root mean square normalisations, and their backward, are written in a graph: the chains `rms_norm` replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from planner.graph import Operation, TensorRef
from planner.operators import base_name
from planner.rewrite.program import Program
from planner.rewrite.uses import Uses, tensors_of

_STATISTICS = frozenset({"float32", "float64"})


@dataclass(frozen=True, slots=True)
class Forward:
    """A recognised normalisation; tensors by index, operations by position.

    Attributes:
        x, rstd, normal: what is normalised, ``rsqrt(…)``, and their product.
        y, weight: the result, and what the product was multiplied with.
        axes: how many last dimensions are normalised.
        gone: the operations it consists of.
        root: the operation that gives the result.
    """

    x: int
    rstd: int
    normal: int
    y: int
    weight: int | None
    eps: float
    axes: int
    gone: frozenset[int]
    root: int


@dataclass(frozen=True, slots=True)
class Backward:
    """A recognised backward: the gradient ``dy`` of the result, and the gradient of x it gives.

    Attributes:
        dx: what the chain gives, or ``None`` where its two terms are added one by one to another gradient.
        added: that gradient, and ``last``, the operation that adds the second term.
        summed: the gradient of the weight, where it is part of the chain.
    """

    dy: int
    x: int
    rstd: int
    weight: int | None
    dx: int | None
    added: int | None
    last: int
    axes: int
    gone: frozenset[int]
    summed: int | None = None


class Chains:
    """Recognises the chains of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.uses = Uses(program)

    def forwards(self) -> Iterator[Forward]:
        for position, operation in enumerate(self.program.operations):
            if base_name(operation.operator) == "rsqrt" and operation.outputs[0] is not None:
                found = self._forward(position, operation)
                if found is not None:
                    yield found

    def _forward(self, position: int, operation: Operation) -> Forward | None:
        rstd = operation.outputs[0]
        sum_of = self._with_eps(operation.reads[0])
        if rstd is None or sum_of is None or self.uses.maker(rstd, "rsqrt") is None:
            return None
        mean, eps, gone = sum_of
        squares, axes = self._reduced(self.program.operations[mean])
        if squares is None or (power := self._power(squares, 2)) is None:
            return None
        x = power[1]
        gone |= {position, mean, power[0]}
        tensor, statistics = self.program.tensors[x], self.program.tensors[rstd]
        shape = (*tensor.shape[: len(tensor.shape) - axes], *[1] * axes)
        if statistics.shape != shape or statistics.dtype not in _STATISTICS or tensor.dtype != statistics.dtype:
            return None
        if not tensor.numel or not tensor.is_contiguous or not statistics.is_contiguous:
            return None
        products = [place for place in self.uses.readers(rstd) if self._product(place, x, rstd) is not None]
        normal = self.program.operations[products[0]].outputs[0] if len(products) == 1 else None
        if normal is None or self.uses.maker(normal, "mul") is None:
            return None
        gone.add(products[0])
        scaled = self._scaled(normal, axes)
        root, y, weight = products[0], normal, None
        if scaled is not None:
            root, y, weight, casts = scaled
            gone |= {root, *casts}
        y = self.uses.after_cast(y, root, gone)
        if not self.program.tensors[y].is_contiguous or self._wider(rstd, y, weight):
            return None
        return Forward(x, rstd, normal, y, weight, eps, axes, frozenset(gone), root)

    def _wider(self, rstd: int, *others: int | None) -> bool:
        """Whether any of these holds more than what is computed in."""
        tensors = self.program.tensors
        return any(tensors[item].itemsize > tensors[rstd].itemsize for item in others if item is not None)

    def _with_eps(self, index: int) -> tuple[int, float, set[int]] | None:
        """``mean + eps``: the position of the mean, eps, and the positions of the sum."""
        storage = self.program.storage_of(index)
        writers = self.uses.writing.get(storage, [])
        last = self.program.operations[writers[-1]] if writers else None
        if last is None or base_name(last.operator) != "add" or last.keywords or len(last.arguments) != 2:
            return None
        first, eps = last.arguments
        if not isinstance(first, TensorRef) or isinstance(eps, bool) or not isinstance(eps, (int, float)):
            return None
        if len(writers) == 2 and last.outputs == (first.tensor,) == (index,):  # in place on the mean
            mean = writers[0]
        elif len(writers) == 1 and last.outputs == (index,) and (made := self.uses.maker(first.tensor, "mean")):
            mean = made[0]
        else:
            return None
        return mean, float(eps), {writers[-1]}

    def _reduced(self, operation: Operation) -> tuple[int | None, int]:
        """What a mean or sum over the last dimensions, kept, reduces, and over how many."""
        name = base_name(operation.operator)
        if name not in ("mean", "sum") or operation.keywords or len(operation.arguments) != 3:
            return None, 0
        source, axes, kept = operation.arguments
        if not isinstance(source, TensorRef) or kept is not True or not isinstance(axes, tuple):
            return None, 0
        rank = len(self.program.tensors[source.tensor].shape)
        found = sorted(axis % rank for axis in axes if isinstance(axis, int)) if rank else []
        last = len(found) > 0 and found == list(range(rank - len(found), rank))
        return (source.tensor, len(found)) if last else (None, 0)

    def _power(self, index: int, exponent: float) -> tuple[int, int] | None:
        """The position of ``index = base ** exponent``, and the base."""
        made = self.uses.maker(index, "pow", "square")
        if made is None or len(made[1].reads) != 1:
            return None
        arguments = made[1].arguments
        found = 2 if base_name(made[1].operator) == "square" else arguments[1] if len(arguments) == 2 else None
        fits = isinstance(arguments[0], TensorRef) and not isinstance(found, bool) and found == exponent
        return (made[0], made[1].reads[0]) if fits else None

    def _product(self, position: int, *factors: int) -> int | None:
        """What an operation gives that multiplies just these two tensors."""
        operation = self.program.operations[position]
        if operation.operator != "aten.mul.Tensor" or operation.keywords or operation.lane is not None:
            return None
        return operation.outputs[0] if sorted(tensors_of(operation.arguments)) == sorted(factors) else None

    def _line(self, index: int, axes: int, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has one number for each place along the last dimensions of a shape."""
        tensor = self.program.tensors[index]
        same = tensor.shape[-axes:] == shape[-axes:] and tensor.numel == prod(shape[-axes:])
        return same and tensor.is_contiguous and len(tensor.shape) <= len(shape)

    def _scaled(self, normal: int, axes: int) -> tuple[int, int, int, frozenset[int]] | None:
        """The one product of the normalised x, or of a cast of it, with a line: position, result, line, casts."""
        found = []
        for index, casts in self.uses.casts_of(normal).items():
            for position in self.uses.readers(index):
                parts = self._times_line(position, index, axes)
                if parts is not None:
                    found.append((position, *parts, casts))
        return found[0] if len(found) == 1 else None

    def _times_line(self, position: int, index: int, axes: int) -> tuple[int, int] | None:
        """Result and line, where an operation multiplies a tensor with a line."""
        operation = self.program.operations[position]
        operands = tensors_of(operation.arguments)
        if operation.operator != "aten.mul.Tensor" or len(operands) != 2 or operands[0] == operands[1]:
            return None
        (line,) = (operand for operand in operands if operand != index)
        shape = self.program.tensors[index].shape
        result = operation.outputs[0]
        if result is None or not self._line(line, axes, shape) or self.program.tensors[result].shape != shape:
            return None
        alone = self.uses.maker(result, "mul") is not None and operation.lane is None
        return (result, line) if alone and self.program.tensors[line].shape != shape else None

    def backwards(self) -> Iterator[Backward]:
        for position, operation in enumerate(self.program.operations):
            if base_name(operation.operator) == "pow" and operation.arguments[1:] == (3,):
                found = self._backward(position, operation)
                if found is not None:
                    yield found

    def _backward(self, position: int, operation: Operation) -> Backward | None:
        """From ``rstd³`` on: ``g · rstd + expand(Σ(g · x) · −½ · rstd³) / D · (2 · x)``."""
        cube, rstd = operation.outputs[0], operation.reads[0]
        statistics = self.program.tensors[rstd]
        gone = {position}
        if cube is None or statistics.dtype not in _STATISTICS or not statistics.is_contiguous:
            return None
        product = self._next(cube, position, "mul", gone)
        if product is None:
            return None
        halves = [item for item in tensors_of(product[1].arguments) if item != cube]
        total = self._number(halves[0], "mul", -0.5, gone) if len(halves) == 1 else None
        summed = None if total is None else self.uses.maker(total, "sum")
        if summed is None:
            return None
        turned, axes = self._reduced(summed[1])
        made = None if turned is None else self.uses.maker(turned, "mul")
        if made is None or len(made[1].reads) != 2 or turned is None:
            return None
        gone |= {summed[0], made[0]}
        shape = self.program.tensors[turned].shape
        if not prod(shape):
            return None
        second = self._second(product, prod(shape[-axes:]), shape, gone)
        if second is None:
            return None
        x, term = second
        if x not in made[1].reads or self.program.tensors[x].shape != shape:
            return None
        (g,) = (index for index in made[1].reads if index != x)
        first = [place for place in self.uses.readers(rstd) if self._product(place, g, rstd) is not None]
        if len(first) != 1 or self.program.tensors[g].shape != shape or not self.program.tensors[x].is_contiguous:
            return None
        gone.add(first[0])
        ends = self._added(self.program.operations[first[0]].outputs[0], first[0], *term)
        if ends is None:
            return None
        dx, added, last, adds = ends
        gone |= adds
        if dx is not None:
            dx = self.uses.after_cast(dx, last, gone)
        dy, weight = self._unscaled(g, axes, gone)
        if self._wider(rstd, dy, weight, dx, added, x):
            return None
        return Backward(dy, x, rstd, weight, dx, added, last, axes, frozenset(gone))

    def _next(self, index: int, position: int, name: str, gone: set[int]) -> tuple[int, Operation] | None:
        """The one operation that reads what ``position`` made, if it has this name; it joins ``gone``."""
        reader = self.uses.alone(index, position)
        if reader is None or base_name(self.program.operations[reader].operator) != name:
            return None
        gone.add(reader)
        return reader, self.program.operations[reader]

    def _number(self, index: int, name: str, number: float, gone: set[int]) -> int | None:
        """What was multiplied with, or divided by, this number."""
        made = self.uses.maker(index, name)
        if made is None or made[1].keywords or len(made[1].arguments) != 2:
            return None
        source, factor = made[1].arguments
        if not isinstance(source, TensorRef) or isinstance(factor, bool) or factor != number:
            return None
        gone.add(made[0])
        return source.tensor

    def _second(
        self, product: tuple[int, Operation], count: int, shape: tuple[int, ...], gone: set[int]
    ) -> tuple[int, tuple[int, int]] | None:
        """The normalised x and ``(tensor, position)`` of the second term, from the number a row on."""
        number = product[1].outputs[0]
        if number is None or self.uses.maker(number, "mul") is None:
            return None
        storage = self.program.storage_of(number)
        others = [place for place in self.uses.touching[storage] if place != product[0]]
        if storage in self.program.border or len(others) != 1:
            return None
        division = self.program.operations[others[0]]
        repeated = self.program.tensors[division.reads[0]] if len(division.reads) == 1 else None
        spread = division.outputs[0]
        if base_name(division.operator) != "div" or repeated is None or spread is None or repeated.shape != shape:
            return None
        if self._number(spread, "div", count, gone) is None or not _repeats(self.program, number, division.reads[0]):
            return None
        term = self._next(spread, others[0], "mul", gone)
        if term is None or term[1].outputs[0] is None:
            return None
        twice = [index for index in tensors_of(term[1].arguments) if index != spread]
        same = None if len(twice) != 1 else self._number(twice[0], "mul", 2.0, gone)
        if same is None:
            return None
        power = self._power(same, 1.0)
        if power is not None:
            gone.add(power[0])
        return (same if power is None else power[1]), (term[1].outputs[0], term[0])

    def _added(
        self, one: int | None, first: int, two: int, second: int
    ) -> tuple[int | None, int | None, int, set[int]] | None:
        """Where both terms end: their sum, or the sum of another gradient with one and then the other."""
        if one is None or self.uses.maker(one, "mul") is None:
            return None
        ends = [self.uses.alone(one, first), self.uses.alone(two, second)]
        if None in ends or any(not _is_sum(self.program.operations[end or 0]) for end in ends):
            return None
        early, late = sorted(end for end in ends if end is not None)
        last = self.program.operations[late]
        if early == late:
            return (last.outputs[0], None, late, {late}) if self.uses.maker(last.outputs[0] or 0, "add") else None
        between = self.program.operations[early].outputs[0]
        if between is None or self.uses.alone(between, early) != late or self.uses.maker(between, "add") is None:
            return None
        others = [index for index in tensors_of(self.program.operations[early].arguments) if index not in (one, two)]
        alike = {self.program.tensors[index].dtype for index in (*others, between, one)}
        shapes = {self.program.tensors[index].shape for index in (*others, between, one)}
        if len(others) != 1 or len(alike) != 1 or len(shapes) != 1:
            return None
        kept = self.uses.writing.get(self.program.storage_of(others[0]), [])
        return None if any(early <= place <= late for place in kept) else (None, others[0], late, {early})

    def _unscaled(self, g: int, axes: int, gone: set[int]) -> tuple[int, int | None]:
        """``(dy, weight)`` of ``g = dy · weight``, or ``(g, None)``."""
        for index, casts in self.uses.origins(g):
            made = self.uses.maker(index, "mul")
            if made is None:
                continue
            inner = [index, *(self.program.operations[place].outputs[0] for place in casts)]
            if not all(item is not None and self.uses.inner(item, gone | casts | {made[0]}) for item in inner):
                continue
            for dy in tensors_of(made[1].arguments):
                parts = self._times_line(made[0], dy, axes)
                if parts is not None:
                    gone |= {made[0], *casts}
                    return dy, parts[1]
        return g, None

    def with_sums(self, forward: Forward, backward: Backward) -> Backward:
        """The backward with the gradient of the weight, ``Σ dy · normal`` over all but the last dimensions."""
        grads = dict(self.uses.origins(backward.dy))
        for index, casts in self.uses.casts_of(forward.normal).items():
            for position in self.uses.readers(index):
                operation = self.program.operations[position]
                others = [item for item in tensors_of(operation.arguments) if item != index]
                if len(others) != 1 or others[0] not in grads or self._product(position, index, others[0]) is None:
                    continue
                product = operation.outputs[0]
                gone: set[int] = {position, *casts, *grads[others[0]]}
                sums = None if product is None else self._next(product, position, "sum", gone)
                if sums is None or sums[1].outputs[0] is None or sums[1].keywords:
                    continue
                rank = len(self.program.tensors[index].shape)
                if sums[1].arguments[1:] != (tuple(range(rank - backward.axes)), True):
                    continue
                total = sums[1].outputs[0]
                if self.uses.maker(total, "sum") is not None and self.program.tensors[total].is_contiguous:
                    return replace(backward, summed=total, gone=backward.gone | gone)
        return backward


def _is_sum(operation: Operation) -> bool:
    plain = operation.operator == "aten.add.Tensor" and not operation.keywords and operation.lane is None
    return plain and len(tensors_of(operation.arguments)) == len(operation.arguments) == 2


def _repeats(program: Program, number: int, index: int) -> bool:
    """Whether a tensor repeats one of one number a row along its last dimensions."""
    one, two = program.tensors[number], program.tensors[index]
    if one.storage != two.storage or one.offset != two.offset or len(one.shape) != len(two.shape):
        return False
    pairs = zip(one.shape, two.shape, one.strides, two.strides, strict=True)
    return all((a == b and (a == 1 or s == t)) or (a == 1 and t == 0) for a, b, s, t in pairs)
