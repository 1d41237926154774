"""Numbers every form of the update agrees on: kinds, block sizes, the grid of a split float16, the random hash."""

from __future__ import annotations

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

#: 8-bit codes: code c stands for ``scale · (F(|c| + 4) − F(4))`` with its sign. F(p) of a place p from 4 to the top
#: is 1 at the top, ½ at ⅞ of it, ¼ at ¾, ⅛ at ⅝, 1/16 at a half, and so on: from 2^k to 2^(k − 1) it halves four times,
#: and it is linear in between. At powers of two that is (p / top)⁴, and F's FP32 bits are four times those of p, but for
#: a constant.
SIGNED_TOP, UNSIGNED_TOP, ZERO_PLACE = 128, 256, 4
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
