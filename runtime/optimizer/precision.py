"""What an optimizer keeps besides a 16-bit parameter, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.errors import OptimizerError
from runtime.optimizer import codes

MASTERS = {"none": codes.NONE, "fp32": codes.MASTER, "split": codes.SPLIT, "stochastic": codes.STOCHASTIC}
STATES = {"fp32": codes.FULL, "8bit": codes.BYTES}
KINDS = {torch.float32: codes.FLOAT32, torch.float16: codes.FLOAT16, torch.bfloat16: codes.BFLOAT16}
_KEPT_NBYTES = {codes.NONE: 0, codes.MASTER: 4, codes.SPLIT: 2, codes.STOCHASTIC: 0}


@dataclass(frozen=True, slots=True)
class Precision:
    """How full-precision values and moments are kept.

    Attributes:
        master: ``"fp32"``, an FP32 copy of each 16-bit parameter; ``"split"``, the 16 bits that the parameter lacks of
            that copy, which gives the same results; ``"stochastic"``, nothing, and results rounded at random so that
            their mean is right; ``"none"``, nothing, and results rounded to nearest, so that small updates are lost.
            FP32 and FP64 parameters are their own master.
        states: moments in ``"fp32"``, or ``"8bit"``: one byte each and an FP32 scale for each block of 256.

    Raises:
        OptimizerError: no such choice.
    """

    master: str = "split"
    states: str = "fp32"

    def __post_init__(self) -> None:
        for name, value, known in (("master", self.master, MASTERS), ("states", self.states, STATES)):
            if value not in known:
                raise OptimizerError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")

    def master_of(self, dtype: torch.dtype) -> int:
        """The code of the master kept for parameters of a dtype."""
        return MASTERS[self.master] if dtype.itemsize == 2 else codes.NONE

    def states_of(self, dtype: torch.dtype) -> int:
        """The code of the states kept for parameters of a dtype; FP64 parameters have FP64 moments."""
        return codes.FULL if dtype is torch.float64 else STATES[self.states]

    def bytes_per_parameter(self, dtype: torch.dtype, moments: int) -> float:
        """Bytes for each element: parameter, gradient, what is kept of the master, and moments."""
        kept = _KEPT_NBYTES[self.master_of(dtype)]
        full = 8.0 if dtype is torch.float64 else 4.0
        moment = full if self.states_of(dtype) == codes.FULL else 1.0 + 4.0 / codes.TILE
        return 2 * dtype.itemsize + kept + moments * moment
