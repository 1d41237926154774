"""Schedules against every topological order of small graphs."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph import Graph, Operation, Port, Role, Storage, Tensor, TensorRef
from planner.lifetimes import spans
from planner.schedule import schedules
from planner.schedule.dependencies import dependencies
from planner.variants import live_peak


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> Graph:
    """Small programs of elementwise and opaque operations over storages of a few sizes, some rewritten in place."""
    storages = [Storage("x", 4 * 64 * draw(st.integers(1, 4)), Role.INPUT)]
    tensors = [Tensor("x.t", 0, 0, (storages[0].nbytes // 4,), (1,), "float32")]
    operations: list[Operation] = []
    for step in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=2))
        in_place = draw(st.integers(0, 5)) == 0
        if in_place:
            output = reads[0]
            operator = "aten.relu_.default"
        else:
            nbytes = draw(st.sampled_from([storages[tensors[reads[0]].storage].nbytes, 256, 1024]))
            storages.append(Storage(f"s{step}", nbytes, Role.TEMPORARY))
            tensors.append(Tensor(f"t{step}", len(storages) - 1, 0, (nbytes // 4,), (1,), "float32"))
            output = len(tensors) - 1
            operator = draw(st.sampled_from(["aten.add.Tensor", "aten.cumsum.default"]))
        operations.append(Operation(f"o{step}", operator, tuple(TensorRef(i) for i in reads), (), (output,)))
    results = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=2, unique=True))
    return Graph(
        mode="forward",
        storages=tuple(storages),
        tensors=tuple(tensors),
        operations=tuple(operations),
        inputs=(Port("x", 0),),
        outputs=tuple(Port(f"out{i}", i) for i in results),
    )


def naive_conflicts(graph: Graph, one: Operation, two: Operation) -> bool:
    """Whether swapping two operations could change a result: any shared storage that either writes."""

    def storages(indices: tuple[int, ...]) -> set[int]:
        return {graph.tensors[i].storage for i in indices}

    return bool(storages(one.writes) & storages(two.reads + two.writes) or storages(two.writes) & storages(one.reads))


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_dependencies_hold_every_conflict(graph: Graph) -> None:
    before = dependencies(graph)
    closed: list[set[int]] = []
    for needed in before:
        closed.append(set(needed).union(*(closed[item] for item in needed)))
    for early, late in itertools.combinations(range(len(graph.operations)), 2):
        if naive_conflicts(graph, graph.operations[early], graph.operations[late]):
            assert early in closed[late]


@given(graphs(most=5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_exact_schedule_is_the_best_of_all(graph: Graph, donate: bool) -> None:
    found = {schedule.name: schedule for schedule in schedules(graph, donate=donate)}
    before = dependencies(graph)
    count = len(graph.operations)
    orders = [
        order
        for order in itertools.permutations(range(count))
        if all(order.index(item) < order.index(position) for position in range(count) for item in before[position])
    ]
    assert found["traced"].order == tuple(range(count))
    peaks = {}
    for order in orders:
        ordered = type(found["traced"])("any", order, 0).apply(graph)
        peaks[order] = live_peak(ordered, spans(ordered, donate=donate), 256)
    for schedule in found.values():
        assert schedule.order in peaks
        assert schedule.peak_nbytes == peaks[schedule.order]
    assert found["least peak"].peak_nbytes == min(peaks.values())
