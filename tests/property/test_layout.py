"""Layout arithmetic against brute force over every element."""

from __future__ import annotations

import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.graph import Tensor, dense_strides
from planner.rewrite.layout import disjoint, remap


def positions(tensor: Tensor) -> list[int]:
    """Byte offset of every element, in row-major order."""
    return [
        tensor.offset + tensor.itemsize * sum(i * s for i, s in zip(index, tensor.strides, strict=True))
        for index in itertools.product(*(range(size) for size in tensor.shape))
    ]


def bytes_of(tensor: Tensor) -> set[int]:
    return {start + k for start in positions(tensor) for k in range(tensor.itemsize)}


@st.composite
def permuted_dense(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a dense tensor with its dimensions permuted."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(shape), tuple(strides)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with gaps that keep elements apart."""
    strides = []
    step = draw(st.integers(1, 3))
    for size in reversed(shape):
        strides.append(step)
        step = step * size + draw(st.integers(0, 5))
    return tuple(reversed(strides))


@st.composite
def relocation(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    shape, strides = draw(permuted_dense())
    source = Tensor("source", 0, 0, shape, strides, "float32")
    destination = Tensor("destination", 1, 4 * draw(st.integers(0, 9)), shape, draw(strided(shape)), "float32")
    total = math.prod(shape)
    kind = draw(st.sampled_from(("same", "flat", "reshaped", "slice")))
    if kind == "same":
        order = draw(st.permutations(range(len(shape))))
        view = Tensor("view", 0, 0, tuple(shape[a] for a in order), tuple(strides[a] for a in order), "float32")
    elif kind == "flat":
        view = Tensor("view", 0, 0, (total,), (1,), "float32")
    elif kind == "reshaped":
        divisors = [k for k in range(1, total + 1) if total % k == 0]
        first = draw(st.sampled_from(divisors))
        new = (first, total // first)
        view = Tensor("view", 0, 0, new, dense_strides(new), "float32")
    else:
        axis = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[axis] - 1))
        size = draw(st.integers(1, shape[axis] - start))
        cut = (*shape[:axis], size, *shape[axis + 1 :])
        view = Tensor("view", 0, 4 * start * strides[axis], cut, strides, "float32")
    return view, source, destination


@given(relocation())
@settings(max_examples=400, deadline=None)
def test_remap_puts_every_element_where_its_twin_lies(case: tuple[Tensor, Tensor, Tensor]) -> None:
    view, source, destination = case
    layout = remap(view, source, destination)
    if layout is None:
        # Refusing is always allowed, except for the plain permutations and slices the rewrites live on.
        assert view.name == "view"
        assert view.strides != source.strides or view.shape != source.shape
        return
    twin = dict(zip(positions(source), positions(destination), strict=True))
    expected = [twin[position] for position in positions(view)]
    shape = tuple(size for piece in layout.pieces for size, _ in piece)
    strides = tuple(stride for piece in layout.pieces for _, stride in piece)
    assert math.prod(shape) == view.numel
    assert positions(Tensor("moved", 1, layout.offset, shape, strides, "float32")) == expected


@st.composite
def any_view(draw: st.DrawFn) -> Tensor:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    strides = tuple(draw(st.integers(0, 24)) for _ in range(rank))
    return Tensor("view", 0, 4 * draw(st.integers(0, 40)), shape, strides, "float32")


@given(any_view(), any_view())
@settings(max_examples=600, deadline=None)
def test_disjoint_is_never_wrong(one: Tensor, two: Tensor) -> None:
    if disjoint(one, two):
        assert not bytes_of(one) & bytes_of(two)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(2, 4))
def test_disjoint_sees_the_pieces_of_a_concatenation(rows: int, columns: int, depth: int, pieces: int) -> None:
    assume(rows * columns * depth > 0)
    width = columns * pieces
    views = [
        Tensor("piece", 0, 4 * columns * k, (rows, depth, columns), (depth * width, width, 1), "float32")
        for k in range(pieces)
    ]
    for one, two in itertools.combinations(views, 2):
        assert disjoint(one, two)
