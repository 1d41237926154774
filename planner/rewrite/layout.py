"""Where the elements of a tensor lie once its storage is replaced by a view of another one."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from planner.graph import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor's geometry in the new storage; a dimension may have split into several.

    Attributes:
        offset: bytes.
        pieces: for each dimension of the tensor the ``(size, stride)`` pairs it consists of, outermost first.
    """

    offset: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def is_plain(self) -> bool:
        """Whether no dimension has split."""
        return all(len(piece) == 1 for piece in self.pieces)

    @property
    def strides(self) -> tuple[int, ...]:
        """One stride per dimension, of a plain layout."""
        return tuple(piece[0][1] for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class _Digit:
    """One digit of the mixed-radix number that an element's position in the old storage is."""

    weight: int
    size: int
    stride: int


def remap(tensor: Tensor, source: Tensor, destination: Tensor) -> Layout | None:
    """Layout of ``tensor`` when the storage that ``source`` fills is replaced by ``destination``.

    ``source`` and ``destination`` have equal shapes, and element ``i`` of one becomes element ``i`` of the other.
    Returns ``None`` where ``source`` does not fill its storage densely, or where the result is no strided view.
    """
    if tensor.dtype != source.dtype or source.dtype != destination.dtype or source.shape != destination.shape:
        return None
    digits = _digits(source, destination)
    if digits is None:
        return None
    first = (tensor.offset - source.offset) // tensor.itemsize
    if first < 0 or tensor.end > source.end or tensor.numel == 0:
        return None
    used = [0] * len(digits)
    offset = destination.offset
    rest = first
    for position, digit in enumerate(digits):
        start, rest = divmod(rest, digit.weight)
        used[position] = start
        offset += start * digit.stride * tensor.itemsize
    pieces = []
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        piece = _piece(size, stride, digits, used)
        if piece is None:
            return None
        pieces.append(piece)
    if any(reach >= digit.size for reach, digit in zip(used, digits, strict=True)):
        return None
    return Layout(offset, tuple(pieces))


def _digits(source: Tensor, destination: Tensor) -> list[_Digit] | None:
    """Digits, most significant first; ``None`` unless ``source`` is a permuted dense tensor."""
    digits = [
        _Digit(weight, size, stride)
        for size, weight, stride in zip(source.shape, source.strides, destination.strides, strict=True)
        if size != 1
    ]
    digits.sort(key=lambda digit: -digit.weight)
    expected = 1
    for digit in reversed(digits):
        if digit.weight != expected:
            return None
        expected *= digit.size
    return digits


def _piece(size: int, stride: int, digits: list[_Digit], used: list[int]) -> tuple[tuple[int, int], ...] | None:
    """One dimension in terms of the digits; notes in ``used`` the largest value each digit takes."""
    if size == 1 or stride == 0:
        return ((size, 0),)
    position = next((i for i, digit in enumerate(digits) if digit.weight <= stride), None)
    if position is None:
        return None
    found: list[tuple[int, int]] = []
    while size > 1:
        if position < 0 or stride % digits[position].weight:
            return None
        digit = digits[position]
        step = stride // digit.weight
        if step * (size - 1) + used[position] < digit.size:
            used[position] += step * (size - 1)
            found.append((size, step * digit.stride))
            break
        span = digit.size // step
        if digit.size % step or size % span:
            return None
        used[position] += digit.size - step
        found.append((span, step * digit.stride))
        size //= span
        stride = digit.weight * digit.size
        position -= 1
    return _merged(list(reversed(found)))


def _merged(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring pieces that one stride can walk are one piece."""
    result: list[tuple[int, int]] = []
    for size, stride in pieces:
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def disjoint(one: Tensor, two: Tensor) -> bool:
    """Whether two views of one storage certainly share no byte (``False`` when in doubt)."""
    if one.numel == 0 or two.numel == 0 or one.end <= two.offset or two.end <= one.offset:
        return True
    periods = {s * t.itemsize for t in (one, two) for s, n in zip(t.strides, t.shape, strict=True) if n > 1 and s}
    for width in sorted(periods, reverse=True):
        spans = [_span(tensor, width) for tensor in (one, two)]
        if spans[0] is None or spans[1] is None:
            continue
        (low, high), (other_low, other_high) = spans[0], spans[1]
        if high <= other_low or other_high <= low:
            return True
    return False


def _span(tensor: Tensor, width: int) -> tuple[int, int] | None:
    """Bytes ``[low, high)`` a tensor touches modulo ``width``, if it never wraps round."""
    low = tensor.offset % width
    high = low + tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        step = stride * tensor.itemsize
        if size == 1 or step % width == 0:
            continue
        if gcd(step, width) == step or step < width:
            high += (size - 1) * step
        else:
            return None
    return (low, high) if high <= width else None
