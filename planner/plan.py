"""The plan: a graph in its final order, an offset for every storage, and what is known about the packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.graph import RESIDENT_ROLES, Graph

SCHEMA = "arenaplan/plan/1"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one storage lies and when.

    Attributes:
        offset: bytes from the start of the arena.
        birth: first step (an index into the plan's operations) at which it holds anything.
        death: first step at which nobody needs it any more; at least ``birth + 1``.
        in_place_of: index of the storage whose bytes it takes over during step ``birth``, or ``None``.
    """

    offset: int
    birth: int
    death: int
    in_place_of: int | None = None


@dataclass(frozen=True, slots=True)
class Unplanned:
    """An operator that allocates outside the arena, and how many bytes per step."""

    operator: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Formula:
    """Closed-form extra memory of a self-attention backward, in bytes (X = B·L·H, S = B·N·L²).

    Attributes:
        target: ``max(S, 3X) · itemsize``.
        lightseq2: ``(3X + max(3X, S)) · itemsize``, LightSeq2 (Wang et al., SC 2022), as its layer's source states.
    """

    target: int
    lightseq2: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order, every storage with its offset, and the proof status of the packing.

    Attributes:
        graph: the program as it will run; step ``i`` is ``graph.operations[i]``.
        placements: one for each of ``graph.storages``.
        alignment: every offset and the arena size are multiples of it, bytes.
        arena_nbytes: size of the one allocation.
        lower_bound_nbytes: peak live bytes of this schedule; no packing of it can be smaller.
        naive_nbytes: a buffer for every storage of the graph as it was traced, none shared.
        strategy: ``"materialized"`` or ``"sliced"`` (and ``"traced"`` where nothing was rewritten).
        slices: batch slices in flight, or ``None``.
        algorithm: the colouring algorithm that won.
        proved_optimal: the arena equals the lower bound, or an exact search finished.
        formula: the closed forms it is held against, for an attention backward.
        unplanned: what still allocates outside the arena.
        plan_seconds: how long planning took; ``None`` for a loaded plan. Never compared, never saved.
    """

    graph: Graph
    placements: tuple[Placement, ...]
    alignment: int
    arena_nbytes: int
    lower_bound_nbytes: int
    naive_nbytes: int
    strategy: str
    slices: int | None
    algorithm: str
    proved_optimal: bool
    formula: Formula | None = None
    unplanned: tuple[Unplanned, ...] = ()
    plan_seconds: float | None = field(default=None, compare=False)

    @property
    def steps(self) -> int:
        """Number of steps; results stay alive until this one."""
        return max(len(self.graph.operations), 1)

    @property
    def resident_nbytes(self) -> int:
        """Bytes that must be there before the pass starts, each storage padded to the alignment."""
        return sum(
            padded(storage.nbytes, self.alignment) for storage in self.graph.storages if storage.role in RESIDENT_ROLES
        )

    @property
    def extra_nbytes(self) -> int:
        """What the pass adds to the resident bytes."""
        return self.arena_nbytes - self.resident_nbytes

    def summary(self) -> dict[str, Any]:
        """The JSON fields of every planning command; all memory in bytes."""
        formula = None
        if self.formula is not None:
            formula = {"target": self.formula.target, "lightseq2": self.formula.lightseq2}
        return {
            "schema": SCHEMA,
            "mode": self.graph.mode,
            "strategy": self.strategy,
            "slices": self.slices,
            "alignment": self.alignment,
            "arena_bytes": self.arena_nbytes,
            "lower_bound_bytes": self.lower_bound_nbytes,
            "gap_bytes": self.arena_nbytes - self.lower_bound_nbytes,
            "resident_bytes": self.resident_nbytes,
            "extra_bytes": self.extra_nbytes,
            "naive_bytes": self.naive_nbytes,
            "eager_peak_bytes": None,
            "formula_bytes": formula,
            "unplanned": [{"operator": entry.operator, "bytes": entry.nbytes} for entry in self.unplanned],
            "algorithm": self.algorithm,
            "proved_optimal": self.proved_optimal,
            "plan_seconds": self.plan_seconds,
            "tensors": len(self.graph.tensors),
            "storages": len(self.graph.storages),
            "operations": len(self.graph.operations),
        }

    def offset_map(self) -> str:
        """What lies where, and when, as text for a terminal."""
        from planner.report.text import offset_map

        return offset_map(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file is replaced whole or not at all."""
        from planner.plan_file import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read and re-verify a plan; raise `PlanFileError` or `VerificationError` if it cannot be trusted."""
        from planner.plan_file import load_plan

        return load_plan(Path(path))


def padded(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment
