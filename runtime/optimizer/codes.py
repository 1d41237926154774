"""Numbers every form of the update agrees on: kinds, block sizes, the grid of a split float16, the random hash."""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: Kinds of elements.
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
#: Where the full-precision parameter is kept: in the parameter itself, in an FP32 copy, in a 16-bit remainder; or the
#: result is rounded at random.
NONE, MASTER, SPLIT, STOCHASTIC = 0, 1, 2, 3
#: How moments are kept.
FULL, BYTES = 0, 1
#: Rules.
ADAM, SGD = 0, 1
#: Their names in a plan.
RULES = {"adam": ADAM, "sgd": SGD}

#: Elements worked on at once in a core's first cache, and elements that share a scale where moments are 8-bit.
TILE = 256
#: Elements worked on at once where moments are FP32: three arrays more stream through, so that longer runs pay.
LONG_TILE = 1024
#: Elements of a row of the table: what one thread, or one program of a GPU, is handed at a time.
CPU_CHUNK = 2**16

#: The place of code 0 (`Code`).
ZERO_PLACE = 4
#: Random bits of a block's elements: steps of this from a hash of the block, then an xor-shift and this factor.
RANDOM_STEP, RANDOM_FACTOR = 0x7FEB352D, 0x846CA68B
#: Blocks whose largest magnitude is below this are kept as zero: its reciprocal would overflow.
TINY = 1e-37

#: The full-precision value of a float16 parameter is a multiple of 2⁻³⁹: below 2⁻¹⁶ FP32 would be finer.
GRID_EXPONENT = 39
#: The remainder of a float16 parameter with exponent field E counts units of 2^(E − 40).
UNIT_EXPONENT = 40

#: Columns of the table of chunks, all int64: addresses in bytes, state offset and length in elements.
PARAMETER, GRADIENT, STATE, LENGTH, STEP, GROUP = range(6)
COLUMNS = 6

#: Columns of the table of groups, all float64. Adam's are followed by nothing else; SGD reads its own meaning.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, SIGN = range(7)
MOMENTUM, DAMPENING, NESTEROV = 1, 2, 3
SETTINGS = 7


def float32_bits(value: float) -> int:
    """The bits of an FP32 number, as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _wrapped(bits: int) -> int:
    """The int32 that is ``bits`` modulo 2³²."""
    return (bits + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, slots=True)
class Code:
    """8-bit codes: code c stands for ``scale · (F(|c| + 4) − F(4))`` with its sign.

    F(p) of a place p from 4 to the top is 1 at the top, ½ at ⅞ of it, ¼ at ¾, ⅛ at ⅝, 1/16 at a half, and so on: from
    2^k to 2^(k − 1) it halves four times, and it is linear in between. At powers of two that is (p / top)⁴. The FP32
    bits of F(p) are four times those of p, but for a constant.

    A place is rounded at random by adding a number that has as many random bits below its point as FP32 keeps of the
    sum; the sum's whole part ends in the code.

    Attributes:
        top: the place of the scale.
        base: what is added to a place, random bits aside.
        fraction: bits below the point of the sum.
    """

    top: int
    base: int
    fraction: int

    @property
    def zero(self) -> float:
        """F at the place of code 0: a power of two."""
        return float((ZERO_PLACE / self.top) ** 4)

    @property
    def to_value(self) -> int:
        """What to add to four times the bits of a place, for the bits of its value."""
        return _wrapped(float32_bits(1.0) - 4 * float32_bits(self.top))

    @property
    def to_place(self) -> int:
        """What to add to a quarter of the bits of a value, for the bits of its place."""
        return float32_bits(self.top) - float32_bits(1.0) // 4


#: Codes of the first moment, sums from 512 up (4 is subtracted from the place before), and of the second, from 256 up.
SIGNED, UNSIGNED = Code(128, 768, 14), Code(256, 256 - ZERO_PLACE, 15)
