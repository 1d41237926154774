"""The look over all gradients on a GPU, what follows from it, and the count of steps: kernels round the update itself.

A scan of each dtype leaves partial results, one for each program; one program of `decide_kernel` adds them up and
writes the control block (`planner.update`), from which the update reads whether to do anything and what to multiply
gradients by. The host is told nothing and decides nothing, so the launches may be captured and replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from planner import update as control
from runtime.kernels.triton.launch import Setting
from runtime.kernels.triton.registry import Configuration, Kernel, signature
from runtime.optimizer import codes
from runtime.optimizer.triton_kernel import (
    BLOCKS,
    KIND_NAMES,
    POINTER,
    bfloat_to_float,
    bits_of,
    half_to_float,
    vector_of,
)

#: Programs of a scan at most: each goes through every so many-th row of the table and leaves one partial result.
PROGRAMS = 1024
#: Partial results that are added up: those of three dtypes at most.
PARTS = 4 * PROGRAMS
#: Parameters whose steps one program counts.
COUNTED = 1024

_FLOAT32, _FLOAT16 = tl.constexpr(codes.FLOAT32), tl.constexpr(codes.FLOAT16)
_TILE, _COLUMNS = tl.constexpr(codes.TILE), tl.constexpr(codes.COLUMNS)
_INFINITY = tl.constexpr(0x7F800000)
_FOUND, _FACTOR, _NORM = tl.constexpr(control.FOUND), tl.constexpr(control.FACTOR), tl.constexpr(control.NORM)
_SKIPPED, _SCALE, _GOOD = tl.constexpr(control.SKIPPED), tl.constexpr(control.SCALE), tl.constexpr(control.GOOD_STEPS)
_IN_A_ROW, _FLOORED = tl.constexpr(control.IN_A_ROW), tl.constexpr(control.FLOORED)
_CHECKED, _MAX_NORM = tl.constexpr(control.CHECKED), tl.constexpr(control.MAX_NORM)
_GROWTH, _BACKOFF = tl.constexpr(control.GROWTH), tl.constexpr(control.BACKOFF)
_INTERVAL, _MIN_SCALE, _MAX_SCALE = (
    tl.constexpr(control.INTERVAL),
    tl.constexpr(control.MIN_SCALE),
    tl.constexpr(control.MAX_SCALE),
)


@triton.jit(do_not_specialize=["rows"])
def scan_kernel(
    gradients,
    table,
    rows,
    overflows,
    squares,
    told,
    KIND: tl.constexpr,
    TOLD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Of every so many-th row: whether a gradient is infinite or NaN (0 or 1), and Σ gradient², both in float64.

    With TOLD, ``told`` is the control block, and nothing is read where neither is asked for.
    """
    first = tl.program_id(0)
    if TOLD:
        wanted = (tl.load(told + _CHECKED) != 0.0) | (tl.load(told + _MAX_NORM) < float("inf"))
        rows = tl.where(wanted, rows, 0)
    within = tl.arange(0, BLOCKS * _TILE)
    bad = tl.zeros([BLOCKS * _TILE], tl.int32)
    total = tl.zeros([BLOCKS * _TILE], tl.float64)
    for row in range(first, rows, tl.num_programs(0)):
        line = table + row * _COLUMNS  # of 2³¹ / 6 rows, which is 3.6 · 10¹¹ elements
        at = tl.multiple_of(tl.load(line + 1), VECTOR)
        raw = tl.load(gradients + at + within, mask=within < tl.load(line + 3), other=0)
        if KIND == _FLOAT32:
            g = raw
        elif KIND == _FLOAT16:
            g = half_to_float(raw)
        else:
            g = bfloat_to_float(raw)
        bad = bad | ((bits_of(g) & _INFINITY) == _INFINITY).to(tl.int32)
        wide = g.to(tl.float64)
        total += wide * wide
    tl.store(overflows + first, tl.max(bad, axis=0).to(tl.float64))
    tl.store(squares + first, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["parts"])
def decide_kernel(overflows, squares, control, scale, parts, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """``factor = min(1, max_norm / (norm + 10⁻⁶)) / scale`` with ``norm = √Σ gradient² / scale``; float64 throughout.

    With SCALED the loss scale, one float32, is adapted for the next step: what was multiplied by it is read before.
    """
    part = tl.arange(0, BLOCK)
    inside = part < parts
    bad = tl.sum(tl.load(overflows + part, mask=inside, other=0.0), axis=0)
    square = tl.sum(tl.load(squares + part, mask=inside, other=0.0), axis=0)
    limit = tl.load(control + _MAX_NORM)
    found = tl.where((bad > 0.0) & (tl.load(control + _CHECKED) != 0.0), 1.0, 0.0)
    if SCALED:
        factor = 1.0 / tl.load(scale).to(tl.float64)
    else:
        factor = tl.full([], 1.0, tl.float64)
    norm = tl.sqrt(square) * factor
    clips = (limit < float("inf")) & (found == 0.0)
    ratio = limit / (norm + 1e-6)
    tl.store(control + _FOUND, found)
    tl.store(control + _FACTOR, factor * tl.where(clips & (ratio < 1.0), ratio, 1.0))
    tl.store(control + _NORM, tl.where(clips, norm, float("nan")))
    tl.store(control + _SKIPPED, tl.load(control + _SKIPPED) + found)
    if SCALED:
        now = tl.load(control + _SCALE)
        lowest = tl.load(control + _MIN_SCALE)
        good = tl.where(found == 0.0, tl.load(control + _GOOD) + 1.0, 0.0)
        grows = good >= tl.load(control + _INTERVAL)
        larger = tl.minimum(now * tl.load(control + _GROWTH), tl.load(control + _MAX_SCALE))
        smaller = tl.maximum(now * tl.load(control + _BACKOFF), lowest)
        later = tl.where(found == 0.0, tl.where(grows, larger, now), smaller)
        floored = tl.where((found != 0.0) & (now <= lowest), 1.0, tl.load(control + _FLOORED))
        tl.store(control + _SCALE, later)
        tl.store(control + _GOOD, tl.where(grows, 0.0, good))
        tl.store(control + _IN_A_ROW, tl.where(found == 0.0, 0.0, tl.load(control + _IN_A_ROW) + 1.0))
        tl.store(control + _FLOORED, floored)
        tl.store(scale, later.to(tl.float32))


@triton.jit(do_not_specialize=["count"])
def advance_kernel(steps, taking, signal, count, BLOCK: tl.constexpr):
    """One more step for every parameter that takes part (1 or 0), unless an overflow was found."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    done = tl.where(tl.load(signal) != 0.0, 0.0, 1.0).to(tl.float32)
    before = tl.load(steps + place, mask=inside, other=0.0)
    tl.store(steps + place, before + tl.load(taking + place, mask=inside, other=0.0) * done, mask=inside)


def scan_setting(kind: int, vector: int, *, told: bool) -> Setting:
    """The static choice for a look over the gradients."""
    return Setting({"KIND": kind, "TOLD": int(told), "VECTOR": vector, "BLOCKS": BLOCKS}, num_warps=4)


def decide_setting(*, scaled: bool) -> Setting:
    """The static choice for what follows from it."""
    return Setting({"SCALED": int(scaled), "BLOCK": PARTS}, num_warps=8)


def advance_setting() -> Setting:
    """The static choice for counting steps."""
    return Setting({"BLOCK": COUNTED}, num_warps=4)


KERNELS = (
    Kernel(
        "optimizer_scan",
        scan_kernel,
        tuple(
            Configuration(
                f"{KIND_NAMES[kind]} {'told' if told else 'always'}",
                signature(f"gradients:{pointer} table:*i64 rows:i32 overflows:*fp64 squares:*fp64 told:*fp64"),
                scan_setting(kind, vector_of(kind), told=told),
            )
            for kind, pointer in POINTER.items()
            for told in (False, True)
        ),
    ),
    Kernel(
        "optimizer_decide",
        decide_kernel,
        tuple(
            Configuration(
                f"fp64 {'scaled' if scaled else 'unscaled'}",
                signature(f"overflows:*fp64 squares:*fp64 control:*fp64 scale:{('*fp64', '*fp32')[scaled]} parts:i32"),
                decide_setting(scaled=scaled),
            )
            for scaled in (False, True)
        ),
    ),
    Kernel(
        "optimizer_advance",
        advance_kernel,
        (Configuration("fp32", signature("steps:*fp32 taking:*fp32 signal:*fp64 count:i32"), advance_setting()),),
    ),
)
