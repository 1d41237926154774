"""``plan()``: rewrite, schedule, lifetimes, colouring, verify, in that order, keeping the best at every choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod

from planner.attention import attention_formula
from planner.budget import parse_nbytes
from planner.colouring import colour
from planner.errors import ShapeError, StrategyError
from planner.fitting import Fitting, moderate, smallest, within
from planner.flash import FUSED
from planner.graph import Graph
from planner.inplace import permanent_order
from planner.lifetimes import chains, lifetimes
from planner.operators import MATMUL, unplanned_nbytes
from planner.plan import Formula, Placement, Plan, Unplanned, padded
from planner.problem import Colouring, Problem
from planner.rewrite.batches import split_batches
from planner.rewrite.canonical import canonical
from planner.rewrite.casts import add_casts
from planner.rewrite.costs import cost
from planner.rewrite.cross_entropy import fuse_cross_entropy
from planner.rewrite.dense import dense_operands
from planner.rewrite.dropout import mask_dropout
from planner.rewrite.elision import elide_copies, removable_copies
from planner.rewrite.fusion import fuse_elementwise
from planner.rewrite.rms_norm import fuse_rms_norm
from planner.rewrite.slicing import default_slices, find_region, slice_graph
from planner.schedule import schedules
from planner.variants import Variant, measured
from planner.verify import verify

STRATEGIES = ("auto", "materialized", "sliced", "fused", "traced")
#: Slicing that is a stage of another strategy, and left out where there is nothing to slice.
_ALSO_SLICED = "also sliced"
#: What a strategy tries in turn to keep a budget; the others are one stage.
_STAGES = {"auto": ("materialized", _ALSO_SLICED)}
Progress = Callable[[str], None]


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
    device: str = "cpu",
    progress: Progress | None = None,
) -> Plan:
    """Plan where every tensor of a traced graph lies.

    Args:
        graph: from `planner.trace`.
        budget: the arena may not be larger, bytes or ``"8GiB"``. Tried in turn until it fits: in place and reordered,
            sliced, recomputed; of recomputed programs that fit, the one that computes least again.
        alignment: every offset is a multiple of it, bytes, a power of two of at least 16.
        strategy: ``"materialized"``, ``"sliced"`` (the attention matrix a few slices at a time), ``"fused"`` (none at
            all; the graph must be traced with ``attention="fused"``), ``"traced"`` (nothing rewritten or reordered),
            or ``"auto"``, the smallest arena of all.
        slices: (batch, head) slices in flight when sliced; by default as many as stay in cache.
        donate: whether saved activations, inputs and incoming gradients are free space once dead.
        recompute: whether operators other than random ones may run again: without a budget in a joint graph only, for
            at most a tenth more work; to keep a budget as many as it takes.
        pins: offsets, by name, of storages that already lie somewhere: what a forward left for its backward.
        time_limit: seconds the packing may take at most.
        device: where the plan is to run, ``"cpu"`` or ``"cuda"``: decides only what is listed as unplanned.
        progress: called with a line of text at each stage.

    Returns:
        A verified plan; the same graph and options give the same plan.

    Raises:
        StrategyError, ShapeError: an option cannot be used.
        BudgetError: nothing fits in the budget; it names the least arena reachable.
    """
    started = time.perf_counter()
    _check_options(alignment, strategy, slices)
    if not time_limit >= 0:
        raise ShapeError("time_limit", time_limit, "it must be a number of seconds, at least 0")
    say = progress or (lambda _: None)
    capacity = None if budget is None else parse_nbytes(budget)
    base = dense_operands(add_casts(canonical(graph)))
    fused = any(operation.operator in FUSED for operation in base.operations)
    label = "fused" if fused and strategy != "traced" else None
    if strategy == "fused":
        if not fused:
            raise StrategyError(strategy, 'the graph has no fused attention; trace it with attention="fused"')
        strategy = "materialized"  # nothing of an attention is left to materialise

    def coloured(variant: Variant, capacity: int | None) -> Colouring:
        say(f"colouring {variant.strategy}: {len(variant.found)} storages")
        remaining = max(started + time_limit - time.perf_counter(), 0.1)
        return _coloured(variant, alignment, donate, pins or {}, remaining, progress, capacity)

    def variants(stage: str) -> list[Variant]:
        return list(_variants(base, stage, slices, alignment, donate, say))

    if capacity is None:
        once = variants(strategy)
        repeated = recompute and graph.mode == "joint" and strategy in ("auto", "materialized") and once
        again = moderate(once, alignment, donate, _spared(base)) if repeated else ()
        best = smallest([*once, *again], coloured)
    else:
        fitting = Fitting(capacity, coloured, alignment, donate, say)
        stages = [partial(variants, stage) for stage in _STAGES.get(strategy, (strategy,))]
        best = within(fitting, stages, again=recompute and strategy != "traced")
    if best is None:
        raise StrategyError(strategy, "the graph has no operation it applies to")
    finished = _finish(graph, *best, alignment, attention_formula(base), on_cpu=device.partition(":")[0] == "cpu")
    if label is not None and finished.slices is None:
        finished = replace(finished, strategy=label)
    verify(finished, graph)
    return replace(finished, plan_seconds=time.perf_counter() - started)


def _spared(base: Graph) -> int:
    """Work that normalisations as one operator do not do, in the unit of `planner.rewrite.costs`."""
    fused = fuse_rms_norm(base)
    before, after = (sum(cost(item, graph.tensors) for item in graph.operations) for graph in (base, fused))
    return max(before - after, 0)


def _coloured(
    variant: Variant,
    alignment: int,
    donate: bool,
    pins: Mapping[str, int],
    time_limit: float,
    progress: Progress | None,
    capacity: int | None,
) -> Colouring:
    """Offsets for every chain: permanent storages first, in a row, as they are never out of anyone's way.

    Parameters come first, in the module's order, then their gradients in the same order: one contiguous workspace
    each, at offsets that do not depend on the shapes of the inputs. With a capacity the first packing within it will
    do; `CapacityError` where none is found.
    """
    everything = lifetimes(variant.graph, variant.found, alignment=alignment)
    groups = chains(variant.found)
    place = {chain[0]: position for position, chain in enumerate(groups)}
    offsets = [0] * len(groups)
    base = 0
    permanent = permanent_order(variant.graph, donate=donate)
    if pins:  # Above the parameters, pinned storages may lie anywhere; everything else goes round them.
        states = {
            variant.graph.tensors[port.tensor].storage for port in variant.graph.states if port.tensor is not None
        }
        permanent = tuple(storage for storage in permanent if storage in states)
    for storage in permanent:
        offsets[place[storage]] = base
        base += everything[place[storage]].nbytes
    placed = frozenset(permanent)
    rest = [position for position, chain in enumerate(groups) if chain[0] not in placed]
    free = (everything[position] for position in rest)
    problem = Problem(
        tuple(replace(item, offset=pins[item.name] - base) if item.name in pins else item for item in free),
        None if capacity is None else max(capacity - base, 0),
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
) -> Iterator[Variant]:
    if strategy in ("auto", "traced", "materialized"):
        yield measured("traced", None, base, alignment, donate)
    apart = fuse_cross_entropy(mask_dropout(base))
    base = fuse_rms_norm(apart)
    if strategy in ("auto", "materialized"):
        say("rewriting and scheduling")
        yield from _materialized(base, alignment, donate)
        if base.mode == "backward" and base is not apart:  # what is saved is given, so the norms' scratch may cost more
            yield from _materialized(apart, alignment, donate)
    if strategy in ("auto", "sliced", _ALSO_SLICED):
        elided = fuse_elementwise(split_batches(elide_copies(base)))
        region = find_region(elided)
        if region is None:
            if strategy == "sliced":
                raise StrategyError("sliced", "the graph has no batched products round a temporary to slice")
            return
        count = slices or default_slices(region)
        for schedule in schedules(elided, alignment=alignment, donate=donate):
            cut = slice_graph(schedule.apply(elided), count)
            if cut is not None:
                yield measured("sliced", min(count, prod(region.batch)), cut, alignment, donate)


def _materialized(base: Graph, alignment: int, donate: bool) -> Iterator[Variant]:
    """All copies elided; then copies put back while that lowers the peak."""
    kept: frozenset[str] = frozenset()
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


def _ordered(graph: Graph, alignment: int, donate: bool) -> Iterator[Variant]:
    graph = fuse_elementwise(graph)
    for schedule in schedules(graph, alignment=alignment, donate=donate):
        yield measured("materialized", None, schedule.apply(graph), alignment, donate)


def _finish(
    traced: Graph, variant: Variant, colouring: Colouring, alignment: int, formula: Formula | None, *, on_cpu: bool
) -> Plan:
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
        unplanned=_unplanned(variant.graph, on_cpu=on_cpu),
    )


def _unplanned(graph: Graph, *, on_cpu: bool) -> tuple[Unplanned, ...]:
    """What allocates outside the arena, by operator; a lane's products share their tiles, so the largest counts."""
    totals: dict[str, int] = {}
    tiles: dict[int | None, int] = {}
    for operation in graph.operations:
        nbytes = unplanned_nbytes(operation, graph.tensors, on_cpu=on_cpu)
        if nbytes and operation.operator == MATMUL:
            tiles[operation.lane] = max(tiles.get(operation.lane, 0), nbytes)
        elif nbytes:
            totals[operation.operator] = totals.get(operation.operator, 0) + nbytes
    if tiles:
        totals[MATMUL] = sum(tiles.values())
    return tuple(Unplanned(operator, nbytes) for operator, nbytes in sorted(totals.items()))
