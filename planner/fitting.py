"""A plan within a budget: the stages one after the other, each only if those before it do not fit.

First in place and reordered, then sliced, then recomputed: a generous budget does not pay for a second computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from planner.errors import BudgetError, CapacityError
from planner.plan import padded
from planner.problem import Colouring
from planner.rewrite.evict import Evictor
from planner.rewrite.fusion import fuse_elementwise
from planner.rewrite.workspaces import without_workspaces
from planner.variants import Variant, live_nbytes, measured

#: Limits tried on the way to the least that is reachable: each halves the interval it is known to lie in.
HALVINGS = 10
#: Limits tried below the budget where a recomputed program is within it and its packing is not.
TRIES = 3
#: Recomputation that is worth its time where no budget asks for it, as a share of the work of computing all once.
MODERATE_WORK = 0.1
#: Limits tried on the way to the least peak that moderate recomputation reaches.
MODERATE_TRIES = 7
#: Names in the message of a budget that cannot be kept.
MOST_NAMES = 5

Coloured = Callable[[Variant, int | None], Colouring]
Found = tuple[Variant, Colouring]


@dataclass(frozen=True, slots=True)
class Fitting:
    """What fitting needs to know.

    Attributes:
        capacity_nbytes: the budget.
        coloured: packs a variant; with a capacity it raises `CapacityError` where it finds nothing that fits.
        alignment, donate: as `planner.plan`.
        say: called with a line of text at each stage.
    """

    capacity_nbytes: int
    coloured: Coloured
    alignment: int
    donate: bool
    say: Callable[[str], None]

    def fits(self, colouring: Colouring) -> bool:
        """Whether the arena of a packing is within the budget."""
        return padded(colouring.peak_nbytes, self.alignment) <= self.capacity_nbytes


def smallest(variants: Iterable[Variant], coloured: Coloured) -> Found | None:
    """The variant of the smallest arena."""
    best: Found | None = None
    for variant in sorted(variants, key=lambda item: item.rank):
        if best is not None and best[1].peak_nbytes <= variant.lower_bound_nbytes:
            break
        colouring = coloured(variant, None)
        if best is None or colouring.peak_nbytes < best[1].peak_nbytes:
            best = variant, colouring
    return best


def within(fitting: Fitting, stages: Iterable[Callable[[], list[Variant]]], *, again: bool) -> Found | None:
    """The first stage's plan that is within the budget, else the one of least recomputation; `None` without variants.

    Args:
        fitting: the budget, and how to pack.
        stages: variants that compute everything once; each stage is asked only if the one before does not fit.
        again: whether operations may run a second time.

    Raises:
        BudgetError: nothing fits; it names the least arena reachable, which does not depend on the budget.
    """
    once: list[Variant] = []
    best: Found | None = None
    for stage in stages:
        variants = stage()
        once += variants
        found = smallest(variants, fitting.coloured)
        if found is not None and (best is None or found[1].peak_nbytes < best[1].peak_nbytes):
            best = found
        if best is not None and fitting.fits(best[1]):
            return best
    if best is None:
        return None
    if not again:
        raise budget_error(fitting, best)
    bases = [_Base(variant, fitting.alignment, fitting.donate) for variant in _bases(once)]
    reachable = list(_reach(fitting, bases))
    least = smallest(reachable, fitting.coloured)
    if least is not None and least[1].peak_nbytes < best[1].peak_nbytes:
        best = least
    if not fitting.fits(best[1]):
        raise budget_error(fitting, best)
    return _cheapest(fitting, bases, reachable) or best


def moderate(once: list[Variant], alignment: int, donate: bool, spared: int = 0) -> Iterator[Variant]:
    """Of the programs near the least peak the one of least work, recomputed for no more than `MODERATE_WORK` more.

    ``spared`` is work that operators of our own took out of the program: what it would be without them is the measure.

    The limits halve the interval between what is certainly too low and the lowest that could be kept.
    """
    least = min(variant.lower_bound_nbytes for variant in once)
    near = [variant for variant in once if variant.lower_bound_nbytes <= (1 + MODERATE_WORK) * least]
    base = _Base(min(near, key=lambda variant: (variant.work, variant.rank)), alignment, donate)
    low, high = base.least_possible_nbytes, base.variant.lower_bound_nbytes
    most = (1 + MODERATE_WORK) * (base.variant.work + spared)
    for _ in range(MODERATE_TRIES):
        if high - low < alignment:
            return
        middle = (low + high) // 2
        made = base.within(middle)
        if made is None or made.work > most:
            low = middle
        else:
            high = made.lower_bound_nbytes
            yield made


def _bases(once: list[Variant]) -> list[Variant]:
    """The programs to recompute parts of: of each strategy the first, least changed, and that of the least peak."""
    found: dict[int, Variant] = {}
    strategies = dict.fromkeys(variant.strategy for variant in once)
    if len(strategies) > 1:
        strategies.pop("traced", None)  # the same as materialized, with less done about it
    for strategy in strategies:
        same = [variant for variant in once if variant.strategy == strategy]
        for variant in (same[0], min(same, key=lambda item: item.rank)):
            found.setdefault(id(variant), variant)
    return list(found.values())


class _Base:
    """A program that computes everything once, to recompute parts of."""

    def __init__(self, variant: Variant, alignment: int, donate: bool) -> None:
        self.variant = variant
        self._options = alignment, donate
        self._evictor = Evictor(without_workspaces(variant.graph), alignment=alignment, donate=donate)
        self.least_possible_nbytes = self._evictor.least_possible_nbytes

    def within(self, limit_nbytes: int) -> Variant | None:
        """The program recomputed so that its peak is within a limit, if that is found."""
        graph = self._evictor.within(limit_nbytes)
        if graph is None:
            return None
        made = measured(self.variant.strategy, self.variant.slices, fuse_elementwise(graph), *self._options)
        return made if made.lower_bound_nbytes <= limit_nbytes else None


def _reach(fitting: Fitting, bases: list[_Base]) -> Iterator[Variant]:
    """Recomputed programs on the way to the lowest limit that can be kept, for every base."""
    for base in bases:
        low, high = base.least_possible_nbytes, base.variant.lower_bound_nbytes
        fitting.say(f"recomputing {base.variant.strategy}: peak {high} bytes, never below {low}")
        for _ in range(HALVINGS):
            if high - low < fitting.alignment:
                break
            middle = (low + high) // 2
            made = base.within(middle)
            if made is None:
                low = middle
            else:
                high = made.lower_bound_nbytes
                yield made


def _cheapest(fitting: Fitting, bases: list[_Base], reachable: list[Variant]) -> Found | None:
    """Of the programs that fit, the one that computes least again."""
    found: list[Found] = []
    for base in bases:
        limit = fitting.capacity_nbytes
        for _ in range(TRIES):
            made = base.within(limit)
            if made is None:
                break
            packed, excess = _packed(fitting, made)
            if packed is not None:
                found.append(packed)
                break
            limit -= max(excess, fitting.alignment)
    if found:
        return min(found, key=lambda item: item[0].work)
    for variant in sorted(reachable, key=lambda item: item.work):
        if variant.lower_bound_nbytes <= fitting.capacity_nbytes:
            packed, _ = _packed(fitting, variant)
            if packed is not None:
                return packed
    return None


def _packed(fitting: Fitting, variant: Variant) -> tuple[Found | None, int]:
    """The variant's packing within the budget, or by how many bytes the best one found exceeds it."""
    try:
        colouring = fitting.coloured(variant, fitting.capacity_nbytes)
    except CapacityError as error:
        return None, error.needed_nbytes - error.capacity_nbytes
    if fitting.fits(colouring):
        return (variant, colouring), 0
    return None, fitting.alignment


def budget_error(fitting: Fitting, best: Found) -> BudgetError:
    """The error that names the least arena, the step where most is alive, and what is alive there."""
    variant, colouring = best
    graph = variant.graph
    live = live_nbytes(graph, variant.found, fitting.alignment)
    step = max(range(len(live)), key=lambda position: (live[position], -position))
    alive = [
        (-padded(storage.nbytes, fitting.alignment), storage.name)
        for storage, span in zip(graph.storages, variant.found, strict=True)
        if span.birth + (span.in_place_of is not None) <= step < span.death and storage.nbytes
    ]
    operation = graph.operations[step] if graph.operations else None
    return BudgetError(
        fitting.capacity_nbytes,
        padded(colouring.peak_nbytes, fitting.alignment),
        step,
        "" if operation is None else f"{operation.operator} ({operation.name})",
        "" if operation is None else operation.source,
        tuple((name, -nbytes) for nbytes, name in sorted(alive)[:MOST_NAMES]),
    )
