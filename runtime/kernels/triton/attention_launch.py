"""Launches of the fused attention's kernels, and the static table of the settings they run with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from runtime.kernels.triton import attention
from runtime.kernels.triton.launch import Launch, Setting, ceil_div
from runtime.kernels.triton.philox import counters_per_row, threshold
from runtime.kernels.triton.registry import FLOATS, Configuration, Kernel, describe, signature

#: Rows, columns and warps of a tile by the widest head it serves: for 16-bit operands, and for float32.
HALF_TILES = {64: (64, 32, 8), 128: (64, 32, 8)}
FULL_TILES = {64: (16, 32, 4), 128: (16, 32, 8)}
#: Heads and strides that are multiples of this many elements are read in vectors; others have tiles of their own.
UNIT = 8
LOOSE_TILE = (32, 32, 128, 8)
#: Bytes of registers one thread may spill. 16-bit operands read in vectors spill at most 24 on NVIDIA's chips; what
#: spills more is float32, loose strides, and gfx942, whose warps are twice as wide and leave half the registers.
SPILL_NBYTES = 1216
#: The row sums read whole rows.
DELTA_ROWS = 16
NO_MASK, BOOLEAN, ADDED = 0, 1, 2
#: Without mask and dropout, without a mask, and with everything, which then asks as it runs.
_VARIANTS = ((0, 0), (0, 1), (1, 1))


def _tile(width: int, *, half: bool) -> tuple[int, int, int, int] | None:
    """``(rows, columns, width, warps)`` for heads of ``width``; ``None`` if they are too wide."""
    for widest, chosen in (HALF_TILES if half else FULL_TILES).items():
        if width <= widest:
            return chosen[0], chosen[1], widest, chosen[2]
    return None


def _setting(
    tile: tuple[int, int, int, int], mask: int, drop: int, *, unit: int = UNIT, widen: bool = False
) -> Setting:
    rows, columns, width, warps = tile
    constants = {"MASK": mask, "DROP": drop, "WIDEN": int(widen), "UNIT": unit}
    constants |= {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_D": width}
    return Setting(constants, warps)


class _Operands:
    """What every launch of one attention has in common; ``setting`` is ``None`` where the kernels cannot take it."""

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
        seed: torch.Tensor | None,
        dropout: float,
        scale: float,
        causal: bool,
        kernel: Any,
    ) -> None:
        q, k, v, *_ = tensors
        self.batch, self.heads, self.rows, depth = q.shape
        self.key_heads, self.columns, width = k.shape[1], k.shape[2], v.shape[3]
        self.unit = _unit(*tensors)
        dropped = dropout > 0 and seed is not None
        kind = NO_MASK if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDED
        expanded = None if mask is None else mask.expand(self.batch, self.heads, self.rows, self.columns)
        self.setting = None
        if self.unit and _is_readable(expanded, q.dtype):
            widen = q.dtype == torch.bfloat16 and isinstance(kernel, InterpretedFunction)
            self.setting = _chosen(q.dtype, max(depth, width), kind, self.unit, dropped=dropped, widen=widen)
        #: A mask is handed over as bytes and read as what it is: one signature for every kind.
        self.mask = triton.reinterpret(q if mask is None else mask, tl.int8)
        self.seed = seed if seed is not None else torch.empty(0, dtype=torch.int64, device=q.device)
        self.numbers = (
            float(scale),
            1.0 / (1.0 - dropout) if dropped else 1.0,
            threshold(dropout) if dropped else 0,
            self.heads,
            self.heads // self.key_heads,
            self.rows,
            self.columns,
            depth // max(self.unit, 1),
            width // max(self.unit, 1),
            0 if causal else self.columns,
            counters_per_row(self.columns),
        )
        self.mask_places = (kind, 0, 0, 0) if expanded is None else (kind, *expanded.stride()[:3])

    def strides(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        """Strides of batch, head and row of each, in units."""
        return tuple(stride // self.unit for tensor in tensors for stride in tensor.stride()[:3])


def _unit(*tensors: torch.Tensor) -> int:
    """What divides every stride, head width and address, `UNIT` or 1; 0 if the elements of a row lie apart."""
    if any(tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in tensors):
        return 0
    numbers = [number for tensor in tensors for number in (*tensor.stride()[:3], tensor.shape[3])]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return UNIT if aligned and all(number % UNIT == 0 for number in numbers) else 1


def _is_readable(mask: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernels read a mask of the scores' shape: boolean or in the operands' dtype, its columns dense."""
    if mask is None:
        return True
    return mask.dtype in (torch.bool, dtype) and (mask.shape[3] == 1 or mask.stride(3) == 1)


def _chosen(dtype: torch.dtype, width: int, kind: int, unit: int, *, dropped: bool, widen: bool) -> Setting | None:
    half = dtype in (torch.float16, torch.bfloat16)
    if not half and dtype != torch.float32:
        return None
    tile = _tile(width, half=half) if unit == UNIT else LOOSE_TILE if width <= LOOSE_TILE[2] else None
    if tile is None:
        return None
    mask, drop = (int(kind != NO_MASK), int(dropped or kind != NO_MASK)) if unit == UNIT else (1, 1)
    return _setting(tile, mask, drop, unit=unit, widen=widen)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
) -> Launch | None:
    """Bind the forward; shapes as `runtime.kernels.attention`, ``lse`` dense float32, ``seed`` one int64.

    ``None`` if the elements of an operand's rows lie apart, heads are wider than 128, the dtype is float64, or a mask
    that is added has another dtype or its columns lie apart.
    """
    given = _Operands((q, k, v, out), mask, seed, dropout, scale, causal, attention.attention_kernel)
    if given.setting is None or not lse.is_contiguous():
        return None
    blocks = ceil_div(given.rows, given.setting.constants["BLOCK_M"])
    tensors = (q, k, v, out, lse, given.mask, given.seed)
    arguments = (*tensors, *given.numbers, *given.strides(q, k, v, out), *given.mask_places)
    return Launch(attention.attention_kernel, (given.batch * given.heads * blocks,), arguments, given.setting)


def launch_delta(grad: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> Launch | None:
    """Bind the row sums of ``grad · out``; ``delta`` dense float32. ``None`` as in `launch`."""
    unit = _unit(grad, out)
    tile = None if out.dtype == torch.float64 else _tile(out.shape[3], half=True)
    if tile is None or not unit or not delta.is_contiguous():
        return None
    batch, heads, rows, width = out.shape
    grid = (batch * heads * ceil_div(rows, DELTA_ROWS),)
    strides = [stride // unit for tensor in (grad, out) for stride in tensor.stride()[:3]]
    arguments = (grad, out, delta, heads, rows, width // unit, *strides)
    return Launch(attention.attention_delta_kernel, grid, arguments, _delta_setting(tile[2], unit))


def _delta_setting(width: int, unit: int) -> Setting:
    return Setting({"UNIT": unit, "BLOCK_M": DELTA_ROWS, "BLOCK_D": width}, 4)


def launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
) -> tuple[Launch, Launch] | None:
    """Bind the gradients of the keys and values, then those of the queries. ``None`` as in `launch`."""
    tensors = (q, k, v, grad, *grads)
    given = _Operands(tensors, mask, seed, dropout, scale, causal, attention.attention_keys_kernel)
    setting = given.setting
    if setting is None or not (lse.is_contiguous() and delta.is_contiguous()):
        return None
    launches = []
    for kernel, targets, blocks in (
        (
            attention.attention_keys_kernel,
            grads[1:],
            given.key_heads * ceil_div(given.columns, setting.constants["BLOCK_N"]),
        ),
        (
            attention.attention_queries_kernel,
            grads[:1],
            given.heads * ceil_div(given.rows, setting.constants["BLOCK_M"]),
        ),
    ):
        operands = (grad, q, k, v, lse, delta, *targets, given.mask, given.seed)
        arguments = (*operands, *given.numbers, *given.strides(grad, q, k, v, *targets), *given.mask_places)
        launches.append(Launch(kernel, (given.batch * blocks,), arguments, setting))
    return launches[0], launches[1]


# -- what the compile tests go through --------------------------------------------------------------------------

_NUMBERS = (
    "scale:fp32 keep_scale:fp32 least:i32 heads:i32 groups:i32 rows:i32 columns:i32 depth:i32 width:i32 reach:i32 "
    "per_row:i32 "
)


def _places(names: str) -> str:
    """Strides of batch, head and row of each tensor named."""
    return " ".join(f"{name}_{axis}:i64" for name in names.split() for axis in ("batch", "head", "row"))


_MASK_PLACES = " kind:i32 mask_batch:i64 mask_head:i64 mask_row:i64"


def _configurations(spec: str) -> Iterator[Configuration]:
    for dtype in FLOATS:
        settings = [_setting(LOOSE_TILE, 1, 1, unit=1)]
        for widest in HALF_TILES:
            tile = _tile(widest, half=dtype != "fp32")
            settings += [_setting(tile, mask, drop) for mask, drop in _VARIANTS if tile is not None]
        for setting in settings:
            yield Configuration(f"{dtype} {describe(setting)}", signature(spec.replace("*T", f"*{dtype}")), setting)


def _delta_configurations(spec: str) -> Iterator[Configuration]:
    for dtype in FLOATS:
        for unit in (1, UNIT):
            for widest in HALF_TILES:
                setting = _delta_setting(widest, unit)
                yield Configuration(f"{dtype} {describe(setting)}", signature(spec.replace("*T", f"*{dtype}")), setting)


_INPUTS = "grad:*T q:*T k:*T v:*T lse:*fp32 delta:*fp32 "

KERNELS = (
    Kernel(
        "attention",
        attention.attention_kernel,
        tuple(
            _configurations(
                "q:*T k:*T v:*T out:*T lse:*fp32 mask:*i8 seeds:*i64 " + _NUMBERS + _places("q k v out") + _MASK_PLACES
            )
        ),
        matrix=True,
        spill_nbytes=SPILL_NBYTES,
    ),
    Kernel(
        "attention_delta",
        attention.attention_delta_kernel,
        tuple(
            _delta_configurations(
                "grad:*T out:*T delta:*fp32 heads:i32 rows:i32 width:i32 " + _places("grad out"),
            )
        ),
    ),
    Kernel(
        "attention_keys",
        attention.attention_keys_kernel,
        tuple(
            _configurations(
                _INPUTS
                + "grad_k:*T grad_v:*T mask:*i8 seeds:*i64 "
                + _NUMBERS
                + _places("grad q k v gk gv")
                + _MASK_PLACES
            )
        ),
        matrix=True,
        spill_nbytes=SPILL_NBYTES,
    ),
    Kernel(
        "attention_queries",
        attention.attention_queries_kernel,
        tuple(
            _configurations(
                _INPUTS + "grad_q:*T mask:*i8 seeds:*i64 " + _NUMBERS + _places("grad q k v gq") + _MASK_PLACES
            )
        ),
        matrix=True,
        spill_nbytes=SPILL_NBYTES,
    ),
)
