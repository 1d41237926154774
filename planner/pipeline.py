"""``plan()``: rewrite, schedule, lifetimes, colouring, verify, in that order, keeping the best at every choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from planner.attention import attention_formula
from planner.budget import parse_nbytes
from planner.colouring import colour
from planner.errors import CapacityError, ShapeError, StrategyError
from planner.graph import Graph
from planner.inplace import permanent_order
from planner.lifetimes import Span, chains, lifetimes, spans
from planner.operators import MATMUL, unplanned_nbytes
from planner.plan import Formula, Placement, Plan, Unplanned, padded
from planner.problem import Colouring, Problem
from planner.rewrite.batches import split_batches
from planner.rewrite.canonical import canonical
from planner.rewrite.casts import add_casts
from planner.rewrite.cross_entropy import fuse_cross_entropy
from planner.rewrite.dense import dense_operands
from planner.rewrite.dropout import mask_dropout
from planner.rewrite.elision import elide_copies, removable_copies
from planner.rewrite.recompute import recompute as recomputed
from planner.rewrite.slicing import default_slices, find_region, slice_graph
from planner.rewrite.workspaces import add_workspaces
from planner.schedule import schedules
from planner.verify import verify

STRATEGIES = ("auto", "materialized", "sliced", "traced")
#: Of strategies that need equally much, the one that saves most work.
_PREFERENCE = ("sliced", "materialized", "traced")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to run the graph: rewritten and ordered, its lifetimes known, not yet coloured."""

    strategy: str
    slices: int | None
    graph: Graph
    found: tuple[Span, ...]
    lower_bound_nbytes: int


def plan(
    graph: Graph,
    *,
    budget: str | int | None = None,
    alignment: int = 256,
    strategy: str = "auto",
    slices: int | None = None,
    donate: bool = True,
    recompute: bool = True,
    pins: Mapping[str, int] | None = None,
    time_limit: float = 10.0,
    progress: Progress | None = None,
) -> Plan:
    """Plan where every tensor of a traced graph lies.

    Args:
        graph: from `planner.trace`.
        budget: the arena may not be larger, bytes or ``"8GiB"``.
        alignment: every offset is a multiple of it, bytes, a power of two of at least 16.
        strategy: ``"materialized"``, ``"sliced"`` (the attention matrix a few slices at a time), ``"traced"`` (nothing
            rewritten or reordered), or ``"auto"``, the smallest arena of all.
        slices: (batch, head) slices in flight when sliced; by default as many as stay in cache.
        donate: whether saved activations, inputs and incoming gradients are free space once dead.
        recompute: whether cheap operators may run again in the backward, where that lowers the peak.
        pins: offsets, by name, of storages that already lie somewhere: what a forward left for its backward.
        time_limit: seconds the packing may take at most.
        progress: called with a line of text at each stage.

    Returns:
        A verified plan; the same graph and options give the same plan.

    Raises:
        StrategyError, ShapeError: an option cannot be used.
        CapacityError: nothing tried fits in the budget.
    """
    started = time.perf_counter()
    _check_options(alignment, strategy, slices)
    if not time_limit >= 0:
        raise ShapeError("time_limit", time_limit, "it must be a number of seconds, at least 0")
    say = progress or (lambda _: None)
    capacity = None if budget is None else parse_nbytes(budget)
    base = dense_operands(add_casts(canonical(graph)))
    variants = sorted(
        _variants(base, strategy, slices, alignment, donate, say, again=recompute),
        key=lambda variant: (
            variant.lower_bound_nbytes,
            _PREFERENCE.index(variant.strategy),
            len(variant.graph.operations),
        ),
    )
    best: tuple[_Variant, Colouring] | None = None
    for variant in variants:
        if best is not None and best[1].peak_nbytes <= variant.lower_bound_nbytes:
            break
        say(f"colouring {variant.strategy}: {len(variant.found)} storages")
        colouring = _coloured(
            variant, alignment, donate, pins or {}, max(started + time_limit - time.perf_counter(), 0.1), progress
        )
        if best is None or colouring.peak_nbytes < best[1].peak_nbytes:
            best = variant, colouring
    if best is None:
        raise StrategyError(strategy, "the graph has no operation it applies to")
    finished = _finish(graph, *best, alignment, attention_formula(base))
    if capacity is not None and finished.arena_nbytes > capacity:
        raise _over_budget(finished, capacity)
    verify(finished, graph)
    return replace(finished, plan_seconds=time.perf_counter() - started)


def _coloured(
    variant: _Variant,
    alignment: int,
    donate: bool,
    pins: Mapping[str, int],
    time_limit: float,
    progress: Progress | None,
) -> Colouring:
    """Offsets for every chain: permanent storages first, in a row, as they are never out of anyone's way.

    Parameters come first, in the module's order, then their gradients in the same order: one contiguous workspace
    each, at offsets that do not depend on the shapes of the inputs.
    """
    everything = lifetimes(variant.graph, variant.found, alignment=alignment)
    groups = chains(variant.found)
    place = {chain[0]: position for position, chain in enumerate(groups)}
    offsets = [0] * len(groups)
    base = 0
    permanent = permanent_order(variant.graph, donate=donate)
    for storage in permanent:
        offsets[place[storage]] = base
        base += everything[place[storage]].nbytes
    placed = frozenset(permanent)
    rest = [position for position, chain in enumerate(groups) if chain[0] not in placed]
    free = (everything[position] for position in rest)
    problem = Problem(
        tuple(replace(item, offset=pins[item.name] - base) if item.name in pins else item for item in free)
    )
    found = colour(problem, time_limit=time_limit, progress=progress)
    if found.interrupted:
        raise KeyboardInterrupt
    for position, offset in zip(rest, found.offsets, strict=True):
        offsets[position] = base + offset
    return replace(
        found,
        offsets=tuple(offsets),
        peak_nbytes=base + found.peak_nbytes,
        lower_bound_nbytes=base + found.lower_bound_nbytes,
    )


def _check_options(alignment: int, strategy: str, slices: int | None) -> None:
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 16 or alignment & (alignment - 1):
        raise ShapeError("alignment", alignment, "it must be a power of two of at least 16")
    if strategy == "fused":
        raise StrategyError(strategy, "it needs kernels that this version does not have; use sliced")
    if strategy not in STRATEGIES:
        raise StrategyError(strategy, f"it is unknown; use one of {', '.join(STRATEGIES)}")
    if slices is not None and (not isinstance(slices, int) or slices < 1):
        raise ShapeError("slices", slices, "it must be a positive number of slices")


def _variants(
    base: Graph,
    strategy: str,
    slices: int | None,
    alignment: int,
    donate: bool,
    say: Progress,
    *,
    again: bool,
) -> Iterator[_Variant]:
    if strategy in ("auto", "traced", "materialized"):
        yield _measured("traced", None, base, alignment, donate)
    base = fuse_cross_entropy(mask_dropout(base))
    if strategy in ("auto", "materialized"):
        say("rewriting and scheduling")
        yield from _materialized(base, alignment, donate, again=again)
    if strategy in ("auto", "sliced"):
        elided = split_batches(elide_copies(base))
        region = find_region(elided)
        if region is None:
            if strategy == "sliced":
                raise StrategyError("sliced", "the graph has no batched products round a temporary to slice")
            return
        count = slices or default_slices(region)
        for schedule in schedules(elided, alignment=alignment, donate=donate):
            cut = slice_graph(schedule.apply(elided), count)
            if cut is not None:
                yield _measured("sliced", min(count, prod(region.batch)), cut, alignment, donate)


def _materialized(base: Graph, alignment: int, donate: bool, *, again: bool) -> Iterator[_Variant]:
    """All copies elided, and cheap operators recomputed; then copies put back while that lowers the peak."""
    kept: frozenset[str] = frozenset()
    if again:
        elided = elide_copies(base)
        more = recomputed(elided)
        if len(more.operations) > len(elided.operations):
            yield from _ordered(more, alignment, donate)
    best = min(_ordered(elide_copies(base), alignment, donate), key=lambda variant: variant.lower_bound_nbytes)
    yield best
    yield from _ordered(base, alignment, donate)
    candidates = removable_copies(base, best.graph)
    for name in candidates if len(candidates) <= 16 else ():
        trial = min(
            _ordered(elide_copies(base, kept | {name}), alignment, donate),
            key=lambda variant: variant.lower_bound_nbytes,
        )
        if trial.lower_bound_nbytes < best.lower_bound_nbytes:
            best, kept = trial, kept | {name}
            yield best


def _ordered(graph: Graph, alignment: int, donate: bool) -> Iterator[_Variant]:
    for schedule in schedules(graph, alignment=alignment, donate=donate):
        yield _measured("materialized", None, schedule.apply(graph), alignment, donate)


def _measured(strategy: str, slices: int | None, graph: Graph, alignment: int, donate: bool) -> _Variant:
    graph = add_workspaces(graph)
    found = spans(graph, alignment=alignment, donate=donate)
    return _Variant(strategy, slices, graph, found, live_peak(graph, found, alignment))


def live_peak(graph: Graph, found: tuple[Span, ...], alignment: int) -> int:
    """Peak live bytes; a storage that takes over another's bytes counts from the step after."""
    change: dict[int, int] = {}
    for storage, span in zip(graph.storages, found, strict=True):
        size = padded(storage.nbytes, alignment)
        birth = span.birth + (span.in_place_of is not None)
        change[birth] = change.get(birth, 0) + size
        change[span.death] = change.get(span.death, 0) - size
    live = peak = 0
    for step in sorted(change):
        live += change[step]
        peak = max(peak, live)
    return peak


def _finish(traced: Graph, variant: _Variant, colouring: Colouring, alignment: int, formula: Formula | None) -> Plan:
    placements: list[Placement | None] = [None] * len(variant.found)
    for chain, offset in zip(chains(variant.found), colouring.offsets, strict=True):
        for index in chain:
            span = variant.found[index]
            placements[index] = Placement(offset, span.birth, span.death, span.in_place_of)
    arena = padded(colouring.peak_nbytes, alignment)
    return Plan(
        graph=variant.graph,
        placements=tuple(placement for placement in placements if placement is not None),
        alignment=alignment,
        arena_nbytes=arena,
        lower_bound_nbytes=variant.lower_bound_nbytes,
        naive_nbytes=sum(padded(storage.nbytes, alignment) for storage in traced.storages),
        strategy=variant.strategy,
        slices=variant.slices,
        algorithm=colouring.algorithm,
        proved_optimal=colouring.proved_optimal or arena == variant.lower_bound_nbytes,
        formula=formula,
        unplanned=_unplanned(variant.graph),
    )


def _unplanned(graph: Graph) -> tuple[Unplanned, ...]:
    """What allocates outside the arena, by operator; a lane's products share their tiles, so the largest counts."""
    totals: dict[str, int] = {}
    tiles: dict[int | None, int] = {}
    for operation in graph.operations:
        nbytes = unplanned_nbytes(operation, graph.tensors)
        if nbytes and operation.operator == MATMUL:
            tiles[operation.lane] = max(tiles.get(operation.lane, 0), nbytes)
        elif nbytes:
            totals[operation.operator] = totals.get(operation.operator, 0) + nbytes
    if tiles:
        totals[MATMUL] = sum(tiles.values())
    return tuple(Unplanned(operator, nbytes) for operator, nbytes in sorted(totals.items()))


def _over_budget(plan: Plan, capacity: int) -> CapacityError:
    """The error that says by how much and which storages are the bottleneck."""
    live: list[tuple[int, int]] = []
    for step in range(plan.steps):
        alive = sum(
            padded(storage.nbytes, plan.alignment)
            for storage, placement in zip(plan.graph.storages, plan.placements, strict=True)
            if placement.birth + (placement.in_place_of is not None) <= step < placement.death
        )
        live.append((alive, -step))
    step = -max(live)[1]
    largest = sorted(
        (
            (-storage.nbytes, storage.name)
            for storage, placement in zip(plan.graph.storages, plan.placements, strict=True)
            if placement.birth <= step < placement.death
        )
    )[:5]
    return CapacityError(capacity, plan.arena_nbytes, step, tuple(name for _, name in largest), proved=False)
