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
HALF_TILES = {64: (64, 64, 4), 128: (64, 32, 4)}
FULL_TILES = {64: (32, 32, 4), 128: (16, 32, 4)}
#: The row sums read whole rows.
DELTA_ROWS = 16
NO_MASK, BOOLEAN, ADDED = 0, 1, 2
#: Kinds of mask, each without and with dropout; a masked kernel has both and asks as it runs.
_VARIANTS = ((NO_MASK, 0), (NO_MASK, 1), (BOOLEAN, 1), (ADDED, 1))


def _tile(width: int, *, half: bool) -> tuple[int, int, int, int] | None:
    """``(rows, columns, width, warps)`` for heads of ``width``; ``None`` if they are too wide."""
    for widest, chosen in (HALF_TILES if half else FULL_TILES).items():
        if width <= widest:
            return chosen[0], chosen[1], widest, chosen[2]
    return None


def _setting(tile: tuple[int, int, int, int], mask: int, drop: int, *, widen: bool = False) -> Setting:
    rows, columns, width, warps = tile
    constants = {"MASK": mask, "DROP": drop, "WIDEN": int(widen), "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_D": width}
    return Setting(constants, warps)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Strides of batch, head and row, if the elements of a row lie one behind the other."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


class _Operands:
    """What every launch of one attention has in common, or ``None`` where the kernels cannot take it."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        seed: torch.Tensor | None,
        dropout: float,
        scale: float,
        causal: bool,
        kernel: Any,
    ) -> None:
        self.batch, self.heads, self.rows, depth = q.shape
        self.key_heads, self.columns, width = k.shape[1], k.shape[2], v.shape[3]
        dropped = dropout > 0 and seed is not None
        half = q.dtype in (torch.float16, torch.bfloat16)
        widen = q.dtype == torch.bfloat16 and isinstance(kernel, InterpretedFunction)
        tile = None if q.dtype == torch.float64 else _tile(max(depth, width), half=half)
        kind = NO_MASK if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDED
        self.setting = None
        if tile is not None and (kind != ADDED or (mask is not None and mask.dtype == q.dtype)):
            self.setting = _setting(tile, kind, int(dropped or kind != NO_MASK), widen=widen)
        shared = mask if mask is not None else q
        #: A mask is handed over as bytes and read as what it is: one signature for every kind.
        self.mask = triton.reinterpret(shared, tl.int8)
        self.seed = seed if seed is not None else torch.empty(0, dtype=torch.int64, device=q.device)
        reach = 0 if causal else self.columns
        self.numbers = (
            float(scale),
            1.0 / (1.0 - dropout) if dropped else 1.0,
            threshold(dropout) if dropped else 0,
            self.heads,
            self.heads // self.key_heads,
            self.rows,
            self.columns,
            depth,
            width,
            reach,
            counters_per_row(self.columns),
        )
        expanded = None if mask is None else mask.expand(self.batch, self.heads, self.rows, self.columns)
        self.mask_strides = (0, 0, 0, 0) if expanded is None else expanded.stride()


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

    ``None`` if an operand's rows are not dense, heads are wider than 128, the dtype is float64, or a mask that is added
    has another dtype.
    """
    given = _Operands(q, k, v, mask, seed, dropout, scale, causal, attention.attention_kernel)
    places = [_strides(tensor) for tensor in (q, k, v, out)]
    if given.setting is None or None in places or not lse.is_contiguous():
        return None
    blocks = ceil_div(given.rows, given.setting.constants["BLOCK_M"])
    tensors = (q, k, v, out, lse, given.mask, given.seed)
    strides = [stride for place in places for stride in place or ()]
    arguments = (*tensors, *given.numbers, *strides, *given.mask_strides)
    return Launch(attention.attention_kernel, (given.batch * given.heads * blocks,), arguments, given.setting)


def launch_delta(grad: torch.Tensor, out: torch.Tensor, delta: torch.Tensor) -> Launch | None:
    """Bind the row sums of ``grad · out``; ``delta`` dense float32. ``None`` as in `launch`."""
    places = [_strides(tensor) for tensor in (grad, out)]
    tile = None if out.dtype == torch.float64 else _tile(out.shape[3], half=True)
    if tile is None or None in places or not delta.is_contiguous():
        return None
    batch, heads, rows, width = out.shape
    grid = (batch * heads * ceil_div(rows, DELTA_ROWS),)
    strides = [stride for place in places for stride in place or ()]
    arguments = (grad, out, delta, heads, rows, width, *strides)
    return Launch(attention.attention_delta_kernel, grid, arguments, _delta_setting(tile[2]))


def _delta_setting(width: int) -> Setting:
    return Setting({"BLOCK_M": DELTA_ROWS, "BLOCK_D": width}, 4)


def launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
) -> tuple[Launch, ...] | None:
    """Bind the gradients of q, k and v, those of the keys and values together. ``None`` as in `launch`."""
    given = _Operands(q, k, v, mask, seed, dropout, scale, causal, attention.attention_keys_kernel)
    grad_q, grad_k, grad_v = grads
    if (grad_k is None) != (grad_v is None):
        return None
    wanted = [tensor for tensor in (grad, q, k, v, *grads) if tensor is not None]
    if given.setting is None or not (lse.is_contiguous() and delta.is_contiguous()):
        return None
    if any(_strides(tensor) is None for tensor in wanted):
        return None
    shared = [stride for tensor in (grad, q, k, v) for stride in _strides(tensor) or ()]
    setting = given.setting
    rows, columns = setting.constants["BLOCK_M"], setting.constants["BLOCK_N"]
    launches = []
    for kernel, targets, blocks in (
        (attention.attention_keys_kernel, (grad_k, grad_v), given.key_heads * ceil_div(given.columns, columns)),
        (attention.attention_queries_kernel, (grad_q,), given.heads * ceil_div(given.rows, rows)),
    ):
        present = [tensor for tensor in targets if tensor is not None]
        if not present:
            continue
        own = [stride for tensor in present for stride in _strides(tensor) or ()]
        tensors = (grad, q, k, v, lse, delta, *present, given.mask, given.seed)
        arguments = (*tensors, *given.numbers, *shared, *own, *given.mask_strides)
        launches.append(Launch(kernel, (given.batch * blocks,), arguments, setting))
    return tuple(launches)


# -- what the compile tests go through --------------------------------------------------------------------------

_NUMBERS = (
    "scale:fp32 keep_scale:fp32 least:i32 heads:i32 groups:i32 rows:i32 columns:i32 depth:i32 width:i32 reach:i32 "
    "per_row:i32 "
)


def _places(names: str) -> str:
    """Strides of batch, head and row of each tensor named."""
    return " ".join(f"{name}_{axis}:i64" for name in names.split() for axis in ("batch", "head", "row"))


_MASK_PLACES = " mask_batch:i64 mask_head:i64 mask_row:i64 mask_column:i64"


def _configurations(spec: str) -> Iterator[Configuration]:
    for dtype in FLOATS:
        for widest in HALF_TILES:
            tile = _tile(widest, half=dtype != "fp32")
            if tile is None:
                continue
            for mask, drop in _VARIANTS:
                setting = _setting(tile, mask, drop)
                yield Configuration(f"{dtype} {describe(setting)}", signature(spec.replace("*T", f"*{dtype}")), setting)


def _delta_configurations(spec: str) -> Iterator[Configuration]:
    for dtype in FLOATS:
        for widest in HALF_TILES:
            setting = _delta_setting(widest)
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
    ),
)
