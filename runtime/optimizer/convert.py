"""Masters, remainders and 8-bit codes as tensors, in plain ATen: for saving, loading and the update without numba."""

from __future__ import annotations

import torch

from runtime.optimizer import codes

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
    """The parameter (``value`` rounded to nearest) and the int16 remainder of an FP32 tensor."""
    if dtype is torch.float16:
        grid = to_grid(value, dtype)
        half = grid.to(torch.float16)
        difference = torch.where(half.isfinite(), grid - half.float(), 0.0)
        return half, (difference * _unit(half, 1)).to(torch.int16)
    top = value.to(torch.bfloat16)
    return top, torch.where(value.isnan(), 0, _bfloat_rest(value, top)).to(torch.int16)


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 tensor that `split` took apart."""
    if parameter.dtype is torch.float16:
        return parameter.float() + remainder.float() * _unit(parameter, -1)
    return ((_top_bits(parameter) << 16) + remainder.to(torch.int32)).view(torch.float32)


def encode(x: torch.Tensor, signed: bool, part: torch.Tensor | float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of a flat FP32 tensor and the FP32 scale of each block of 256.

    ``part`` in 0…1 decides between the code below and the one above: uniform random numbers make the mean right, 0.5
    takes the nearer one, so that decoded values get the codes they had.
    """
    levels = codes.SIGNED_LEVELS if signed else codes.UNSIGNED_LEVELS
    scales = block_scales(x)
    reciprocal = torch.where(scales != 0, 1 / scales, 0.0)
    size = x.abs() * _spread(reciprocal, x.numel())
    known = torch.where(size.isnan(), 0.0, size)
    below = (root(root(known)) * float(levels)).to(torch.int32).clamp_(max=levels - 1)
    low, high = _fourth_power(below, levels), _fourth_power(below + 1, levels)
    code = below + ((known - low) > part * (high - low)).to(torch.int32)
    if not signed:
        some = (x > 0) & (_spread(scales, x.numel()) != 0)
        return torch.maximum(code, some.to(torch.int32)).to(torch.uint8), scales
    return torch.where(x < 0, -code, code).to(torch.int8), scales


def decode(code: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The flat FP32 tensor of 8-bit codes."""
    levels = codes.SIGNED_LEVELS if signed else codes.UNSIGNED_LEVELS
    t = code.float() * _per_level(levels)
    return ((t * t.abs()) * (t * t)) * _spread(scales, code.numel())


def block_scales(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of 256, NaN if any is NaN, 0 where it is too small to divide by."""
    blocks = -(-x.numel() // codes.TILE)
    padded = torch.nn.functional.pad(x.abs(), (0, blocks * codes.TILE - x.numel())).view(blocks, codes.TILE)
    scales = padded.amax(1)
    return torch.where(scales < codes.TINY, 0.0, scales)


def root(x: torch.Tensor) -> torch.Tensor:
    """√x rounded to nearest, which ATen's own FP32 root is not on every processor."""
    return x.sqrt() if x.dtype is torch.float64 else x.double().sqrt_().float()


def _per_level(levels: int) -> float:
    """1/levels as FP32 has it."""
    return float(torch.tensor(1 / levels, dtype=torch.float32))


def _fourth_power(code: torch.Tensor, levels: int) -> torch.Tensor:
    t = code.float() * _per_level(levels)
    t = t * t
    return t * t


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
