"""The update on a GPU: one launch for each dtype, a program for each row of the table.

The formulas, their order and their roundings are those of `update_kernel`: parameter and gradient are decoded to FP32
registers, updated and encoded, all in one pass. Nothing here waits for the device: whether a gradient overflowed and
what gradients are multiplied by are read from device memory, and on overflow the rows are empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.triton.launch import Setting
from runtime.kernels.triton.registry import Configuration, Kernel, signature
from runtime.optimizer import codes

#: Blocks of 256 elements that one program updates.
BLOCKS = 4

# What kernels below may read of `codes`: Triton takes global numbers only as constants.
_FLOAT32, _FLOAT16 = tl.constexpr(codes.FLOAT32), tl.constexpr(codes.FLOAT16)
_MASTER, _SPLIT, _STOCHASTIC = tl.constexpr(codes.MASTER), tl.constexpr(codes.SPLIT), tl.constexpr(codes.STOCHASTIC)
_BYTES, _ADAM = tl.constexpr(codes.BYTES), tl.constexpr(codes.ADAM)
_TILE, _COLUMNS, _SETTINGS = tl.constexpr(codes.TILE), tl.constexpr(codes.COLUMNS), tl.constexpr(codes.SETTINGS)
_UP, _DOWN = tl.constexpr(2.0**codes.GRID_EXPONENT), tl.constexpr(2.0**-codes.GRID_EXPONENT)
_UNIT = tl.constexpr(codes.UNIT_EXPONENT)
_TINY = tl.constexpr(codes.TINY)
_LEAST = tl.constexpr(2.0**-1022)
_WHOLE = tl.constexpr(2.0**23)
_SIGNED_ZERO, _UNSIGNED_ZERO = tl.constexpr(codes.SIGNED.zero), tl.constexpr(codes.UNSIGNED.zero)
_SIGNED_VALUE, _UNSIGNED_VALUE = tl.constexpr(codes.SIGNED.to_value), tl.constexpr(codes.UNSIGNED.to_value)
_TO_SIGNED, _TO_UNSIGNED = tl.constexpr(codes.SIGNED.to_place), tl.constexpr(codes.UNSIGNED.to_place)
_SIGNED_BASE = tl.constexpr(codes.float32_bits(codes.SIGNED.base))
_UNSIGNED_BASE = tl.constexpr(codes.float32_bits(codes.UNSIGNED.base))
_SIGNED_SHIFT, _UNSIGNED_SHIFT = tl.constexpr(codes.SIGNED.fraction), tl.constexpr(codes.UNSIGNED.fraction)
_PLACE = tl.constexpr(codes.ZERO_PLACE)
_RANDOM_STEP, _RANDOM_FACTOR = tl.constexpr(codes.RANDOM_STEP), tl.constexpr(codes.RANDOM_FACTOR)
_MAGNITUDE, _INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)


@triton.jit
def mix(x):
    """`tile_kernel.mix` on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def bits_of(x):
    """FP32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(x):
    """int32 as FP32."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def half_to_float(x):
    """The FP32 of a float16 given as int16."""
    return x.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float_to_half(x):
    """FP32 rounded to float16, as int16."""
    return x.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def bfloat_to_float(x):
    """The FP32 of a bfloat16 given as int16."""
    return float_of(x.to(tl.int32) << 16)


@triton.jit
def bfloat_bits(bits):
    """FP32 bits rounded to bfloat16, to nearest, ties to even, as int32; NaN stays NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _MAGNITUDE) > _INFINITY, (bits >> 16) | 0x40, rounded)


@triton.jit
def half_unit(half, SIGN: tl.constexpr):
    """2^(SIGN · (40 − E)), E the exponent field of a float16, at least 1."""
    field = tl.maximum((half.to(tl.int32) >> 10) & 31, 1)
    return float_of(((field - _UNIT) * (-SIGN) + 127) << 23)


@triton.jit
def to_grid(x):
    """The nearest multiple of 2⁻³⁹: adding and subtracting 2²³ rounds to an integer, ties to even."""
    scaled = x * _UP
    size = float_of(bits_of(scaled) & _MAGNITUDE)
    whole = (size + _WHOLE) - _WHOLE
    whole = float_of(bits_of(whole) | (bits_of(scaled) & -0x80000000))
    return tl.where(size < _WHOLE, whole, scaled) * _DOWN


@triton.jit
def plus(value, factor, x):
    """``value + factor · x``; what is infinite times 0 is nothing here."""
    if factor != 0.0:
        value = value + factor * x
    return value


@triton.jit
def load_parameter(p, kept, KIND: tl.constexpr, MASTER: tl.constexpr):
    """The full-precision parameter of what was read: `tile_kernel.load_parameter`."""
    if KIND == _FLOAT32:
        return p
    if KIND == _FLOAT16:
        shown = half_to_float(p)
        if MASTER == _MASTER:
            return tl.where(float_to_half(kept) == p, kept, shown)
        if MASTER == _SPLIT:
            return shown - kept.to(tl.float32) * half_unit(p, -1)
        return shown
    shown = bfloat_to_float(p)
    if MASTER == _MASTER:
        return tl.where(bfloat_bits(bits_of(kept)).to(tl.int16) == p, kept, shown)
    if MASTER == _SPLIT:
        return float_of((p.to(tl.int32) << 16) + kept.to(tl.int32))
    return shown


@triton.jit
def random_half(w, random):
    """`tile_kernel.random_half`."""
    bits = bits_of(w)
    size = float_of(bits & _MAGNITUDE)
    normal = float_of((bits + (random & 0x1FFF).to(tl.int32)) & -0x2000)
    part = (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    count = tl.floor(size * 16777216.0 + part) * 5.9604644775390625e-08
    small = float_of(bits_of(count) | (bits & -0x80000000))
    return float_to_half(tl.where(size >= 6.103515625e-05, normal, small))


@triton.jit
def random_bfloat(w, random):
    """`tile_kernel.random_bfloat`."""
    bits = bits_of(w)
    moved = (bits + (random & 0xFFFF).to(tl.int32)) >> 16
    return tl.where((bits & _INFINITY) != _INFINITY, moved, bfloat_bits(bits)).to(tl.int16)


@triton.jit
def decode(code, factor, TO_VALUE: tl.constexpr, ZERO: tl.constexpr):
    """`byte_kernel.decode_signed` and `decode_unsigned`."""
    code = code.to(tl.int32)
    place = (tl.abs(code) + _PLACE).to(tl.float32)
    size = (float_of((bits_of(place) << 2) + TO_VALUE) - ZERO) * factor
    return tl.where(code < 0, -size, size)


@triton.jit
def encode(x, per, some, SIGNED: tl.constexpr):
    """`byte_kernel.encode_signed` and `encode_unsigned` as sums, ``some`` being the random bits below their point."""
    if SIGNED:
        size = (bits_of(tl.abs(x) * per + _SIGNED_ZERO) >> 2) & 0x3FFFFFFF
        place = float_of(size + _TO_SIGNED) - _PLACE
        place = float_of(bits_of(place) | (bits_of(x) & -0x80000000))
        return place + float_of(some.to(tl.int32) | _SIGNED_BASE)
    size = (bits_of(x * per + _UNSIGNED_ZERO) >> 2) & 0x3FFFFFFF
    return float_of(size + _TO_UNSIGNED) + float_of(some.to(tl.int32) | _UNSIGNED_BASE)


@triton.jit
def block_scale(x, inside, ZERO: tl.constexpr):
    """`byte_kernel.scaled` of each row of a tile."""
    largest = float_of(tl.max(tl.where(inside, bits_of(x) & _MAGNITUDE, 0), axis=1))
    scale = tl.where(largest < _TINY, 0.0, tl.div_rn(largest, 1.0 - ZERO))
    return scale, tl.where(largest < _TINY, 0.0, tl.div_rn(1.0 - ZERO, largest))[:, None]


@triton.jit
def one_minus_power(beta, step):
    """``1 − beta^step`` in float64, for beta from 0 up; 0 counts as the least normal number, whose powers vanish."""
    return 1.0 - tl.exp(tl.log(tl.maximum(beta, _LEAST)) * step)


@triton.jit(do_not_specialize=["seed_key"])
def update_kernel(
    parameters,
    gradients,
    kept,
    first_moment,
    second_moment,
    first_scales,
    second_scales,
    table,
    settings,
    steps,
    signal,
    seed_key,
    KIND: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENTS: tl.constexpr,
    RULE: tl.constexpr,
    BUFFER: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One row of the table: offsets of parameter, gradient and state in elements, length, step, group.

    ``signal``, float64 as ``settings``, holds whether a gradient overflowed, and what gradients are multiplied by.
    VECTOR: offsets of parameters and gradients are multiples of it.
    """
    row = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    at = tl.multiple_of(tl.load(row), VECTOR)
    gradient_at = tl.multiple_of(tl.load(row + 1), VECTOR)
    element = tl.multiple_of(tl.load(row + 2), 64)
    n = tl.load(row + 3)
    setting = settings + tl.load(row + 5) * _SETTINGS
    step = tl.load(steps + tl.load(row + 4)).to(tl.float64) + 1.0
    n = tl.where(tl.load(signal) != 0.0, 0, n)
    block = tl.arange(0, BLOCKS)
    within = block[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
    inside = within < n
    lr = tl.load(setting)
    decay = tl.load(setting + 4)
    factor = (tl.load(signal + 1) * tl.load(setting + 6)).to(tl.float32)

    raw = tl.load(gradients + gradient_at + within, mask=inside, other=0)
    if KIND == _FLOAT32:
        g = raw * factor
    elif KIND == _FLOAT16:
        g = half_to_float(raw) * factor
    else:
        g = bfloat_to_float(raw) * factor
    p = tl.load(parameters + at + within, mask=inside, other=0)
    if (MASTER == _MASTER) or (MASTER == _SPLIT):
        w = load_parameter(p, tl.load(kept + element + within, mask=inside, other=0), KIND, MASTER)
    else:
        w = load_parameter(p, p, KIND, MASTER)

    low = (element & 0xFFFFFFFF).to(tl.uint32)
    key = mix(mix(seed_key.to(tl.uint32) ^ step.to(tl.int64).to(tl.uint32)) ^ (element >> 32).to(tl.uint32))
    number = low + within.to(tl.uint32)
    scale_at = element // _TILE + block
    touched = block * _TILE < n

    if RULE == _ADAM:
        beta1 = tl.load(setting + 1)
        beta2 = tl.load(setting + 2)
        decoupled = tl.load(setting + 5)
        shrink = (lr * decay * decoupled).to(tl.float32)
        coupled = (decay * (1.0 - decoupled)).to(tl.float32)
        take1 = (1.0 - beta1).to(tl.float32)
        take2 = (1.0 - beta2).to(tl.float32)
        size = (lr / one_minus_power(beta1, step)).to(tl.float32)
        root = (1.0 / tl.sqrt(one_minus_power(beta2, step))).to(tl.float32)
        eps = tl.load(setting + 3).to(tl.float32)
        m = tl.load(first_moment + element + within, mask=inside, other=0)
        v = tl.load(second_moment + element + within, mask=inside, other=0)
        g = plus(g, coupled, w)
        if MOMENTS == _BYTES:
            scale = tl.load(first_scales + scale_at, mask=touched, other=0.0) * beta1.to(tl.float32)
            m = decode(m, scale[:, None], _SIGNED_VALUE, _SIGNED_ZERO) + g * take1
            scale = tl.load(second_scales + scale_at, mask=touched, other=0.0) * beta2.to(tl.float32)
            v = decode(v, scale[:, None], _UNSIGNED_VALUE, _UNSIGNED_ZERO) + (g * g) * take2
        else:
            m = m + (g - m) * take1
            v = v * beta2.to(tl.float32) + (g * g) * take2
        w = w - plus(size * tl.div_rn(m, tl.sqrt_rn(v) * root + eps), shrink, w)
        kept_elements = inside
        kept_blocks = touched
    else:
        momentum = tl.load(setting + 1)
        later = step > 1.0
        g = plus(g, decay.to(tl.float32), w)
        kept_elements = inside
        kept_blocks = touched
        if BUFFER:
            kept_elements = within < tl.where(momentum != 0.0, n, 0)
            kept_blocks = block * _TILE < tl.where(momentum != 0.0, n, 0)
            m = tl.load(first_moment + element + within, mask=inside, other=0)
            nesterov = tl.load(setting + 3) != 0.0
            keep = tl.where(later, momentum, 0.0).to(tl.float32)
            take = tl.where(later, 1.0 - tl.load(setting + 2), 1.0).to(tl.float32)
            ahead = tl.where(nesterov, momentum, 1.0).to(tl.float32)
            plain = tl.where(nesterov, 1.0, 0.0).to(tl.float32)
            if MOMENTS == _BYTES:
                scale = tl.load(first_scales + scale_at, mask=touched, other=0.0) * keep
                m = decode(m, scale[:, None], _SIGNED_VALUE, _SIGNED_ZERO) + g * take
            else:
                m = m * keep + g * take
            g = tl.where(momentum != 0.0, plus(m * ahead, plain, g), g)
        w = w - lr.to(tl.float32) * g

    if MOMENTS == _BYTES:
        start = mix((low + block.to(tl.uint32) * _TILE) ^ mix(key + 1))
        random = start[:, None] + tl.arange(0, _TILE).to(tl.uint32)[None, :] * _RANDOM_STEP
        random = (random ^ (random >> 15)) * _RANDOM_FACTOR
        if (RULE == _ADAM) or BUFFER:
            scale, per = block_scale(m, inside, _SIGNED_ZERO)
            code = bits_of(encode(m, per, random >> 18, True)) >> _SIGNED_SHIFT
            tl.store(first_moment + element + within, code.to(tl.int8), mask=kept_elements)
            tl.store(first_scales + scale_at, scale, mask=kept_blocks)
        if RULE == _ADAM:
            scale, per = block_scale(v, inside, _UNSIGNED_ZERO)
            total = encode(v, per, random & 0xFFFE, False)
            total = tl.where((v > 0.0) & (per != 0.0), tl.maximum(total, 257.0), total)
            code = (bits_of(total) >> _UNSIGNED_SHIFT) & 0xFF
            tl.store(second_moment + element + within, code.to(tl.uint8), mask=kept_elements)
            tl.store(second_scales + scale_at, scale, mask=kept_blocks)
    else:
        if (RULE == _ADAM) or BUFFER:
            tl.store(first_moment + element + within, m, mask=kept_elements)
        if RULE == _ADAM:
            tl.store(second_moment + element + within, v, mask=kept_elements)

    target = parameters + at + within
    if KIND == _FLOAT32:
        tl.store(target, w, mask=inside)
    elif KIND == _FLOAT16:
        if (MASTER == _MASTER) or (MASTER == _SPLIT):
            exact = to_grid(w)
            half = float_to_half(exact)
            tl.store(target, half, mask=inside)
            if MASTER == _MASTER:
                tl.store(kept + element + within, exact, mask=inside)
            else:
                finite = (half & 0x7C00) != 0x7C00
                rest = tl.where(finite, half_to_float(half) - exact, 0.0) * half_unit(half, 1)
                tl.store(kept + element + within, rest.to(tl.int16), mask=inside)
        elif MASTER == _STOCHASTIC:
            tl.store(target, random_half(w, mix(number ^ key)), mask=inside)
        else:
            tl.store(target, float_to_half(w), mask=inside)
    else:
        bits = bits_of(w)
        if (MASTER == _MASTER) or (MASTER == _SPLIT):
            top = bfloat_bits(bits)
            rest = tl.minimum(bits - (top << 16), 0x7FFF)
            nan = (bits & _MAGNITUDE) > _INFINITY
            tl.store(target, top.to(tl.int16), mask=inside)
            if MASTER == _MASTER:
                tl.store(kept + element + within, tl.where(nan, w, float_of((top << 16) + rest)), mask=inside)
            else:
                tl.store(kept + element + within, tl.where(nan, 0, rest).to(tl.int16), mask=inside)
        elif MASTER == _STOCHASTIC:
            tl.store(target, random_bfloat(w, mix(number ^ key)), mask=inside)
        else:
            tl.store(target, bfloat_bits(bits).to(tl.int16), mask=inside)


#: Triton's pointers by kind: 16-bit elements are handled as integers.
POINTER = {codes.FLOAT32: "*fp32", codes.FLOAT16: "*i16", codes.BFLOAT16: "*i16"}
KIND_NAMES = {codes.FLOAT32: "fp32", codes.FLOAT16: "fp16", codes.BFLOAT16: "bf16"}


def update_setting(kind: int, master: int, moments: int, rule: int, *, buffer: bool, vector: int) -> Setting:
    """The static choice for a workspace."""
    constants = {"KIND": kind, "MASTER": master, "MOMENTS": moments, "RULE": rule}
    return Setting({**constants, "BUFFER": int(buffer), "VECTOR": vector, "BLOCKS": BLOCKS}, num_warps=4)


def vector_of(kind: int) -> int:
    """Elements in the widest load, 16 bytes."""
    return 4 if kind == codes.FLOAT32 else 8


def _update_configurations() -> tuple[Configuration, ...]:
    # Without moments (plain SGD) there is but one form of them.
    rules = [("sgd", codes.SGD, False, codes.FULL)]
    for moments in (codes.FULL, codes.BYTES):
        rules += [("sgd with buffer", codes.SGD, True, moments), ("adam", codes.ADAM, True, moments)]
    masters = {"no master": codes.NONE, "master": codes.MASTER, "split": codes.SPLIT, "stochastic": codes.STOCHASTIC}
    return tuple(
        Configuration(
            f"{KIND_NAMES[kind]} {rule_name}, {master_name}, {('fp32', '8-bit')[moments]}",
            _update_signature(kind, master, moments),
            update_setting(kind, master, moments, rule, buffer=buffer, vector=vector_of(kind)),
        )
        for kind in POINTER
        for master_name, master in masters.items()
        if kind != codes.FLOAT32 or master == codes.NONE
        for rule_name, rule, buffer, moments in rules
    )


def _update_signature(kind: int, master: int, moments: int) -> dict[str, str]:
    pointer = POINTER[kind]
    kept = "*i16" if master == codes.SPLIT else "*fp32"
    first, second = ("*fp32", "*fp32") if moments == codes.FULL else ("*i8", "*u8")
    return signature(
        f"parameters:{pointer} gradients:{pointer} kept:{kept} first_moment:{first} second_moment:{second} "
        "first_scales:*fp32 second_scales:*fp32 table:*i64 settings:*fp64 steps:*fp32 signal:*fp64 seed_key:i64"
    )


KERNELS = (Kernel("optimizer_update", update_kernel, _update_configurations()),)
