"""A kernel bound to its arguments, and the settings it may be launched with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

#: Whether kernels run in Triton's interpreter, which multiplies bfloat16 matrices wrongly unless they are cast first.
INTERPRETED: bool = triton.knobs.runtime.interpret
#: Elements of one tile of rows: enough work for four warps, few enough registers that none is spilled.
TILE_NUMEL = 1024
#: Columns a tile may have. Rows longer than the longest are read in chunks of it.
BLOCKS = (256, 1024, 2048, 4096)
LONGEST_ROW = BLOCKS[-1]


@dataclass(frozen=True, slots=True)
class Setting:
    """Compile-time constants of a kernel and how many warps and pipeline stages it runs with."""

    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {
            **self.constants,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: calling it puts the kernel on the current stream. Nothing is allocated.

    Attributes:
        kernel: the ``triton.jit`` function.
        grid: programs along each axis.
        arguments: run-time arguments in order, tensors as arena views.
        setting: of the kernel's static table.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    setting: Setting
    _options: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_options", self.setting.options())

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self._options)


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor`` rounded up."""
    return -(-number // divisor)


@dataclass(frozen=True, slots=True)
class RowTile:
    """How rows are cut into tiles: ``rows`` rows of ``block`` columns to a program."""

    rows: int
    block: int

    @property
    def num_warps(self) -> int:
        """A warp for every 256 elements, at most eight."""
        return min(max(self.rows * self.block // 256, 1), 8)

    def setting(self, **constants: Any) -> Setting:
        """The setting with this tile and further constants."""
        return Setting({**constants, "ROWS": self.rows, "BLOCK": self.block}, self.num_warps)


def row_tile(width: int, longest: int = LONGEST_ROW) -> RowTile:
    """The tile for rows of ``width`` elements; rows longer than ``longest`` are read in chunks of it."""
    block = next((block for block in BLOCKS if block >= min(width, longest)), longest)
    return RowTile(max(TILE_NUMEL // block, 1), block)


def row_tiles(longest: int = LONGEST_ROW) -> tuple[RowTile, ...]:
    """Every tile that `row_tile` may give."""
    return tuple(row_tile(block, longest) for block in BLOCKS if block <= longest)


def row_setting(width: int, **constants: int) -> Setting:
    """The setting for rows of ``width``, read whole or in chunks of the longest."""
    return row_tile(width).setting(**constants, WHOLE=int(width <= LONGEST_ROW))


def row_settings(names: tuple[str, ...], choices: tuple[tuple[int, ...], ...]) -> tuple[Setting, ...]:
    """All that `row_setting` may give: whole rows by every tile, and chunks, for each choice of the constants named."""
    found = []
    for choice in choices:
        constants = dict(zip(names, choice, strict=True))
        found += [tile.setting(**constants, WHOLE=1) for tile in row_tiles()]
        found.append(row_tile(LONGEST_ROW).setting(**constants, WHOLE=0))
    return tuple(found)


def common_stride(sizes: list[tuple[int, int]]) -> int | None:
    """The stride of ``(size, stride)`` dimensions, outermost first, walked as one; ``None`` where they are not one."""
    stride = expected = sizes[-1][1]
    for size, step in reversed(sizes):
        if step != expected:
            return None
        expected = step * size
    return stride


def as_rows(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """``(rows, width, row stride)`` of a tensor whose last dimension is dense and whose others are one, or ``None``.

    A matrix with a row stride of its own counts; so does any dense tensor.
    """
    if tensor.dim() == 0:
        return 1, 1, 1
    width = tensor.shape[-1]
    rows = tensor.numel() // max(width, 1)
    if width > 1 and tensor.stride(-1) != 1:
        return None
    lead = [(size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    if not lead:
        return rows, width, max(width, 1)
    stride = common_stride(lead)
    return None if stride is None else (rows, width, stride)
