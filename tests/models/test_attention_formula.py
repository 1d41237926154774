"""The formula: what the planned attention backward adds is at most max(S, 3X), over a grid of shapes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import plan, trace, verify
from planner.plan import Plan
from tests.attention_cases import ITEMSIZE, Shape

ALIGNMENT = 256
SIZES = [
    (batch, heads, length, hidden)
    for batch, heads, length, hidden in itertools.product((1, 8, 32), (1, 4, 16), (8, 128, 2048), (64, 1024))
]
VARIANTS = [
    ("float32", 0.1, True, False),
    ("float16", 0.0, True, True),
    ("bfloat16", 0.1, False, True),
    ("float16", 0.1, True, False),
    ("float32", 0.0, False, False),
    ("bfloat16", 0.0, True, False),
    ("float32", 0.1, True, True),
]


def planned(shape: Shape, strategy: str, slices: int | None = None) -> Plan:
    module, x = shape.build(device="meta")
    graph = trace(module, (x,))
    made = plan(graph, strategy=strategy, slices=slices)
    verify(made, graph)
    return made


def allowance(shape: Shape, made: Plan) -> int:
    """Nothing where sizes are aligned, else one alignment unit per tensor."""
    return 0 if shape.is_aligned(ALIGNMENT) else ALIGNMENT * len(made.graph.storages)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_materialized_adds_at_most_the_formula(index: int) -> None:
    dtype, dropout, fused, causal = VARIANTS[index % len(VARIANTS)]
    shape = Shape(*SIZES[index], dtype=dtype, dropout=dropout, fused=fused, causal=causal)
    made = planned(shape, "materialized")
    fields = made.summary()
    assert fields["extra_bytes"] <= shape.target_nbytes + allowance(shape, made)
    assert fields["arena_bytes"] == fields["lower_bound_bytes"]
    assert fields["formula_bytes"] == {
        "target": shape.target_nbytes,
        "lightseq2": (3 * shape.activation + max(3 * shape.activation, shape.scores)) * ITEMSIZE[shape.dtype],
    }


@given(
    batch=st.integers(1, 32),
    heads=st.sampled_from((1, 2, 3, 8, 16)),
    length=st.integers(8, 2048),
    depth=st.integers(4, 64),
    variant=st.sampled_from(VARIANTS),
)
@settings(max_examples=25, deadline=None)
def test_materialized_adds_at_most_the_formula_for_any_shape(
    batch: int, heads: int, length: int, depth: int, variant: tuple[str, float, bool, bool]
) -> None:
    dtype, dropout, fused, causal = variant
    shape = Shape(batch, heads, length, heads * depth, dtype=dtype, dropout=dropout, fused=fused, causal=causal)
    made = planned(shape, "materialized")
    assert made.extra_nbytes <= shape.target_nbytes + allowance(shape, made)
    assert made.arena_nbytes - made.lower_bound_nbytes == made.summary()["gap_bytes"]


@pytest.mark.parametrize("slices", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 8, 128, 256),
        Shape(4, 8, 128, 256, dropout=0.0, causal=True),
        Shape(1, 16, 256, 256, dtype="float16", fused=False),
        Shape(8, 1, 64, 256, dropout=0.0),
        Shape(1, 1, 256, 64, dropout=0.0),
        Shape(3, 5, 47, 35),
    ],
)
def test_sliced_adds_at_most_its_slices_and_3x(shape: Shape, slices: int) -> None:
    made = planned(shape, "sliced", slices)
    in_flight = min(slices, shape.batch * shape.heads)
    bound = (in_flight * shape.length**2 + 3 * shape.activation) * ITEMSIZE[shape.dtype]
    assert made.strategy == "sliced"
    assert made.slices == in_flight
    assert made.extra_nbytes <= bound + (0 if shape.is_aligned(ALIGNMENT) else ALIGNMENT * 16)


def test_the_planner_chooses_the_slices() -> None:
    made = planned(Shape(4, 8, 512, 512), "sliced")
    assert made.slices is not None
    assert 1 <= made.slices < 32
    assert made.slices * 512 * 512 * 4 <= 8 * 2**20
