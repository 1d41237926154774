"""One way to run a graph, rewritten and ordered, and what is known of its memory before it is coloured."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import Graph
from planner.lifetimes import Span, spans
from planner.plan import padded
from planner.rewrite.costs import cost
from planner.rewrite.workspaces import add_workspaces

#: Of strategies that need equally much, the one that saves most work.
_PREFERENCE = ("sliced", "materialized", "traced")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the graph: rewritten and ordered, its lifetimes known, not yet coloured.

    Attributes:
        strategy, slices: as in `planner.plan.Plan`.
        graph: with its scratch storages.
        found: a span for each of its storages.
        lower_bound_nbytes: its peak live bytes.
    """

    strategy: str
    slices: int | None
    graph: Graph
    found: tuple[Span, ...]
    lower_bound_nbytes: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """The least bound first, then the strategy that saves most work, then the fewest operations."""
        return self.lower_bound_nbytes, _PREFERENCE.index(self.strategy), len(self.graph.operations)

    @property
    def work(self) -> int:
        """The cost of all its operations, as `planner.rewrite.costs`."""
        return sum(cost(operation, self.graph.tensors) for operation in self.graph.operations)


def measured(strategy: str, slices: int | None, graph: Graph, alignment: int, donate: bool) -> Variant:
    """The variant of a graph in the order it stands in."""
    graph = add_workspaces(graph)
    found = spans(graph, alignment=alignment, donate=donate)
    return Variant(strategy, slices, graph, found, live_peak(graph, found, alignment))


def live_peak(graph: Graph, found: tuple[Span, ...], alignment: int) -> int:
    """Peak live bytes; a storage that takes over another's bytes counts from the step after."""
    live = live_nbytes(graph, found, alignment)
    return max(live, default=0)


def live_nbytes(graph: Graph, found: tuple[Span, ...], alignment: int) -> list[int]:
    """Live bytes at every step."""
    steps = max(len(graph.operations), 1)
    change = [0] * (steps + 1)
    for storage, span in zip(graph.storages, found, strict=True):
        size = padded(storage.nbytes, alignment)
        change[min(span.birth + (span.in_place_of is not None), steps)] += size
        change[span.death] -= size
    live = 0
    found_nbytes = []
    for step in change[:-1]:
        live += step
        found_nbytes.append(live)
    return found_nbytes
