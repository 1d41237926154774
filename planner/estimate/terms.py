"""What an estimate consists of: terms with their formulas, the moments of a step, and how it is printed as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.estimate.devices import GPUS, Gpu

SCHEMA = "arenaplan/estimate/1"

#: What no estimate contains; every report repeats it.
NOT_COVERED = (
    "the device's context (CUDA takes several hundred MiB before the first tensor)",
    "what the caching allocator reserves beyond what is alive (rounding, fragmentation)",
    "workspaces that libraries keep to themselves (cuBLAS, cuDNN, oneDNN)",
)
#: What a distributed run needs besides.
NOT_COVERED_DISTRIBUTED = ("communication buffers and buckets (NCCL, gradient buckets, prefetched parameters)",)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of an estimate.

    Attributes:
        name: what the bytes hold.
        formula: how they were computed, in the letters of `docs/estimate.md`.
        nbytes: the result.
    """

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment of a step and everything that is alive then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total_nbytes(self) -> int:
        """The sum of the terms."""
        return sum(term.nbytes for term in self.terms)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one device during training or inference.

    Attributes:
        kind: ``"training"`` or ``"inference"``.
        subject: the model.
        parameters: how many, each once (tied weights count once).
        settings: what was assumed, ``(name, value)``.
        phases: the moments that can be the peak, in the order of a step.
        published: weights, gradients and optimizer state at the published bytes per parameter.
        own_update: the same with this project's fused update, one line for each way to keep full precision.
        eager: of a traced program, the same moments as eager PyTorch would have them; ``phases`` then are the plan's.
        not_covered: what comes on top.
    """

    kind: str
    subject: str
    parameters: int
    settings: tuple[tuple[str, str | int], ...]
    phases: tuple[Phase, ...]
    published: tuple[Term, ...] = ()
    own_update: tuple[Term, ...] = ()
    eager: tuple[Phase, ...] = ()
    not_covered: tuple[str, ...] = NOT_COVERED

    @property
    def peak(self) -> Phase:
        """The moment with the largest total; the first of several."""
        return max(self.phases, key=lambda phase: phase.total_nbytes)

    @property
    def terms(self) -> tuple[Term, ...]:
        """What is alive at the peak."""
        return self.peak.terms

    @property
    def total_nbytes(self) -> int:
        """The sum of the terms at the peak."""
        return self.peak.total_nbytes

    @property
    def eager_nbytes(self) -> int | None:
        """The largest total of eager PyTorch's moments, ``None`` where no program was traced."""
        return max((phase.total_nbytes for phase in self.eager), default=None)

    @property
    def fits(self) -> tuple[Gpu, ...]:
        """The common GPUs whose memory is not smaller than the total, smallest first."""
        return tuple(gpu for gpu in GPUS if gpu.nbytes >= self.total_nbytes)

    def term(self, name: str) -> Term | None:
        """The term of that name at the peak."""
        return next((term for term in self.terms if term.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """The fields of ``--json``; all memory in bytes."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "model": self.subject,
            "parameters": self.parameters,
            "settings": dict(self.settings),
            "total_bytes": self.total_nbytes,
            "peak": self.peak.name,
            "terms": [_term_json(term) for term in self.terms],
            "phases": [_phase_json(phase) for phase in self.phases],
            "eager_total_bytes": self.eager_nbytes,
            "eager": [_phase_json(phase) for phase in self.eager],
            "published": [_term_json(term) for term in self.published],
            "own_update": [_term_json(term) for term in self.own_update],
            "not_covered": list(self.not_covered),
            "fits": [{"gpu": gpu.name, "memory_bytes": gpu.nbytes} for gpu in self.fits],
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    terms = [_term_json(term) for term in phase.terms]
    return {"name": phase.name, "total_bytes": phase.total_nbytes, "terms": terms}


def _term_json(term: Term) -> dict[str, Any]:
    return {"name": term.name, "formula": term.formula, "bytes": term.nbytes}


def nonzero(*terms: Term) -> tuple[Term, ...]:
    """The terms that hold anything."""
    return tuple(term for term in terms if term.nbytes)
