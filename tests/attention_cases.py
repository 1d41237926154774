"""The grid of attention shapes, and a plain account of what a plan may add."""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one self-attention block."""

    batch: int
    heads: int
    length: int
    hidden: int
    dtype: str = "float32"
    dropout: float = 0.1
    fused: bool = True
    causal: bool = False

    @property
    def activation(self) -> int:
        """X = B·L·H, elements."""
        return self.batch * self.length * self.hidden

    @property
    def scores(self) -> int:
        """S = B·N·L², elements."""
        return self.batch * self.heads * self.length**2

    @property
    def target_nbytes(self) -> int:
        """max(S, 3X), bytes."""
        return max(self.scores, 3 * self.activation) * ITEMSIZE[self.dtype]

    def is_aligned(self, alignment: int) -> bool:
        """Whether every size that matters is a multiple of the alignment."""
        item = ITEMSIZE[self.dtype]
        return all(count * item % alignment == 0 for count in (self.activation, self.scores, self.hidden)) and (
            not self.causal or self.length**2 % alignment == 0
        )
