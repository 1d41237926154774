"""The dynamic storage allocation problem: sizes and lifetimes in, offsets out."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import ProblemError

LARGEST_NBYTES = 2**63 - 1
"""Sizes, steps and offsets are 64-bit signed integers in every file and framework we exchange them with."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One storage as the colouring sees it: a size alive during the half-open steps ``[birth, death)``.

    Attributes:
        name: unique within a problem.
        nbytes: size in bytes, zero allowed (a zero-byte storage conflicts with nothing).
        birth: first step at which the bytes are needed.
        death: first step at which they are needed no longer; greater than ``birth``.
        alignment: the offset must be a multiple of it (bytes, at least 1).
        offset: the offset it is pinned to, or ``None`` if free.
        group: members of one named group lie one directly behind the other (each at its own alignment), in
            problem order, or ``None``. A group no member of which is pinned starts at a multiple of all its
            members' alignments.
    """

    name: str
    nbytes: int
    birth: int
    death: int
    alignment: int = 1
    offset: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Lifetimes to pack, and the capacity they should fit in (bytes), or ``None`` to minimise the peak."""

    lifetimes: tuple[Lifetime, ...]
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Colouring:
    """Offsets for a problem.

    Attributes:
        offsets: bytes, in the problem's order.
        peak_nbytes: the largest ``offset + nbytes``.
        lower_bound_nbytes: no packing can have a smaller peak.
        algorithm: which algorithm found it.
        proved_optimal: the peak equals the lower bound, or an exact search finished.
        interrupted: the search was stopped by the user; the offsets are the best found until then.
    """

    offsets: tuple[int, ...]
    peak_nbytes: int
    lower_bound_nbytes: int
    algorithm: str
    proved_optimal: bool
    interrupted: bool = False


def check_problem(problem: Problem, source: str = "problem") -> None:
    """Raise ``ProblemError`` for the first lifetime that breaks a rule of ``Lifetime``, or an unusable capacity."""
    if problem.capacity is not None and problem.capacity < 0:
        raise ProblemError(source, f"capacity {problem.capacity} is negative")
    names: set[str] = set()
    for lifetime in problem.lifetimes:
        cause = _fault(lifetime)
        if cause is None and lifetime.name in names:
            cause = "its name is used twice; names must be unique"
        if cause is not None:
            raise ProblemError(source, f"lifetime {lifetime.name!r}: {cause}")
        names.add(lifetime.name)


def _fault(lifetime: Lifetime) -> str | None:
    """What is wrong with one lifetime on its own, or ``None``."""
    if lifetime.nbytes < 0:
        return f"size {lifetime.nbytes} is negative"
    if lifetime.nbytes > LARGEST_NBYTES:
        return f"size {lifetime.nbytes} is larger than {LARGEST_NBYTES}"
    if lifetime.death <= lifetime.birth:
        return f"it dies at step {lifetime.death}, not after its birth at step {lifetime.birth}"
    if lifetime.alignment < 1:
        return f"alignment {lifetime.alignment} is less than 1"
    if lifetime.offset is not None:
        if lifetime.offset < 0:
            return f"pinned offset {lifetime.offset} is negative"
        if lifetime.offset > LARGEST_NBYTES:
            return f"pinned offset {lifetime.offset} is larger than {LARGEST_NBYTES}"
        if lifetime.offset % lifetime.alignment:
            return f"pinned offset {lifetime.offset} is not a multiple of its alignment {lifetime.alignment}"
    return None
