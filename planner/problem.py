"""The dynamic storage allocation problem: sizes and lifetimes in, offsets out."""

from __future__ import annotations

from dataclasses import dataclass


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
            problem order, or ``None``.
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
