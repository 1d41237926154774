"""Masters, remainders and 8-bit codes as tensors, in plain ATen: for saving, loading and the update without numba."""

from __future__ import annotations

import torch

from runtime.optimizer import codes

#: Random bits that are half-way: the nearer code is taken.
NEAREST = 0x80008000

_UP, _DOWN = 2.0**codes.GRID_EXPONENT, 2.0**-codes.GRID_EXPONENT


def to_grid(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The FP32 value that a parameter of this dtype and 16 more bits can hold, nearest to ``value``.

    bfloat16: ``value``, except that where it lies half-way above an even parameter its last bit becomes one less.
    float16: ``value`` rounded to a multiple of 2⁻³⁹, which changes it only below 2⁻¹⁶.
    """
    if dtype is torch.float16:
        return (value * _UP).round_().mul_(_DOWN)
    top = value.to(torch.bfloat16)
    rest = _bfloat_rest(value, top)
    return torch.where(value.isnan(), value, ((_top_bits(top) << 16) + rest).view(torch.float32))


def split(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter (``value`` rounded to nearest) and the int16 remainder of an FP32 tensor.

    A float16 remainder counts by how much the parameter is too large, a bfloat16 one by how much it is too small.
    """
    if dtype is torch.float16:
        grid = to_grid(value, dtype)
        half = grid.to(torch.float16)
        difference = torch.where(half.isfinite(), half.float() - grid, 0.0)
        return half, (difference * _unit(half, 1)).to(torch.int16)
    top = value.to(torch.bfloat16)
    return top, torch.where(value.isnan(), 0, _bfloat_rest(value, top)).to(torch.int16)


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 tensor that `split` took apart."""
    if parameter.dtype is torch.float16:
        return parameter.float() - remainder.float() * _unit(parameter, -1)  # +0 would lose the sign of −0
    return ((_top_bits(parameter) << 16) + remainder.to(torch.int32)).view(torch.float32)


def encode(x: torch.Tensor, signed: bool, random: torch.Tensor | int = NEAREST) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of a flat FP32 tensor and the FP32 scale of each block of 256.

    32 random bits, as int64, decide between the codes on either side so that the mean is right, for signed codes the
    upper ones, for others the lower; `NEAREST` takes the nearer code, so that decoded values get the codes they had.
    """
    form = codes.SIGNED if signed else codes.UNSIGNED
    scales, per = block_scales(x, signed)
    spread = _spread(per, x.numel())
    bits = (x.abs() * spread + form.zero).view(torch.int32)
    place = (((bits >> 2) & 0x3FFFFFFF) + form.to_place).view(torch.float32)
    if signed:
        place = torch.copysign(place - codes.ZERO_PLACE, x)
    some = torch.as_tensor(random >> 18 if signed else random & 0xFFFE)
    total = place + (some | codes.float32_bits(form.base)).to(torch.int32).view(torch.float32)
    if not signed:
        total = torch.where((x > 0) & (spread != 0), total.clamp(min=257), total)
    return (total.view(torch.int32) >> form.fraction).to(torch.int8 if signed else torch.uint8), scales


def decode(code: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The flat FP32 tensor of 8-bit codes."""
    form = codes.SIGNED if signed else codes.UNSIGNED
    whole = code.to(torch.int32)
    place = (whole.abs() + codes.ZERO_PLACE).float()
    bits = (place.view(torch.int32) << 2) + form.to_value
    value = (bits.view(torch.float32) - form.zero) * _spread(scales, code.numel())
    return torch.where(whole < 0, -value, value)


def block_scales(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each block of 256, and what its elements are multiplied by.

    Of the largest magnitude (NaN if any is NaN) the scale is what makes the top code stand for it, to an FP32 rounding
    that encoding and decoding again do not repeat. Both are 0 where it is too small to divide by.
    """
    blocks = -(-x.numel() // codes.TILE)
    padded = torch.nn.functional.pad(x.abs(), (0, blocks * codes.TILE - x.numel())).view(blocks, codes.TILE)
    largest = padded.amax(1)
    whole = 1.0 - (codes.SIGNED if signed else codes.UNSIGNED).zero
    small = largest < codes.TINY
    return torch.where(small, 0.0, largest / whole), torch.where(small, 0.0, whole / largest)


def root(x: torch.Tensor) -> torch.Tensor:
    """√x rounded to nearest, which ATen's own FP32 root is not on every processor."""
    return x.sqrt() if x.dtype is torch.float64 else x.double().sqrt_().float()


def _spread(scales: torch.Tensor, length: int) -> torch.Tensor:
    return scales.repeat_interleave(codes.TILE)[:length]


def _top_bits(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.view(torch.int16).to(torch.int32)


def _bfloat_rest(value: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return (value.view(torch.int32) - (_top_bits(top) << 16)).clamp_(max=0x7FFF)


def _unit(half: torch.Tensor, sign: int) -> torch.Tensor:
    """2^(sign · (40 − E)), E the exponent field, at least 1."""
    field = ((half.view(torch.int16).to(torch.int32) >> 10) & 31).clamp_(min=1)
    return ((127 + sign * (codes.UNIT_EXPONENT - field)) << 23).view(torch.float32)
