"""The best packing of one component so far."""

from __future__ import annotations

from dataclasses import dataclass

from planner.colouring.instance import Instance


@dataclass(slots=True)
class Best:
    """A packing of an instance, replaced whenever a better one is offered.

    Attributes:
        floor: units that no search can go below: the bound, raised by what was refuted (for ragged groups, of their
            hulls only).
    """

    instance: Instance
    offsets: list[int]
    algorithm: str
    peak: int = 0
    floor: int = 0

    def __post_init__(self) -> None:
        self.peak = self.instance.peak(self.offsets)
        self.floor = self.instance.bound

    @property
    def peak_nbytes(self) -> int:
        """The peak in bytes."""
        return self.peak * self.instance.unit

    @property
    def proved_floor(self) -> int:
        """Units that no packing can go below."""
        return self.instance.bound if self.instance.ragged else self.floor

    def done(self, goal_nbytes: int) -> bool:
        """Whether nothing lower is wanted or possible."""
        return self.peak_nbytes <= goal_nbytes or self.peak <= self.floor

    def offer(self, offsets: list[int], algorithm: str) -> None:
        """Take a packing if it is better."""
        peak = self.instance.peak(offsets)
        if peak < self.peak:
            self.offsets, self.peak, self.algorithm = offsets, peak, algorithm
