"""The update as loops over the rows of a table, compiled by numba: every byte of memory is read and written once.

A tile's gradient and full-precision parameter lie in two small FP32 buffers (`tile_kernel`). Formulas, their order and
their roundings are those of `runtime.optimizer.aten`, so that both give the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from runtime.optimizer import words
from runtime.optimizer.bits import (
    THREAD_COUNT,
    THREAD_NUMBER,
    carray,
    compile_function,
    compile_loop,
    double,
    float_bits,
    inline_element,
    pointer_f32,
    pointer_f64,
    pointer_i64,
)
from runtime.optimizer.byte_kernel import adam_blocks, encode_blocks, load_signed, store_signed
from runtime.optimizer.codes import (
    BETA1,
    BETA2,
    BYTES,
    COLUMNS,
    DAMPENING,
    DECOUPLED,
    EPS,
    FLOAT16,
    FLOAT32,
    GRADIENT,
    GROUP,
    LENGTH,
    LONG_TILE,
    LR,
    MASTER,
    MOMENTUM,
    NESTEROV,
    PARAMETER,
    SETTINGS,
    SIGN,
    STATE,
    STEP,
    TILE,
    WEIGHT_DECAY,
)
from runtime.optimizer.tile_kernel import (
    elements,
    full_precision,
    gradient_value,
    kept_elements,
    mix,
    plus,
    store_parameter,
    stream_key,
)


@inline_element
def adam(x: Any, given: Any, first: Any, second: Any, c: Any) -> Any:
    """Adam's formulas (Kingma and Ba 2015, algorithm 1; decay as in Loshchilov and Hutter 2019, algorithm 2).

    Decay is subtracted with the update: ``w · (1 − lr · decay)`` would lose digits of ``lr · decay``, the same way at
    every step. ``c`` are the numbers of `adam_constants`; returned are parameter and moments.
    """
    shrink, coupled, take1, beta2, take2, size, root, eps = c
    gradient = plus(given, coupled, x)
    first = first + (gradient - first) * take1
    second = second * beta2 + (gradient * gradient) * take2
    return x - plus(size * (first / (np.sqrt(second) * root + eps)), shrink, x), first, second


@inline_element
def member(given: Any) -> Any:
    """Which share of the rows these words ask for."""
    return np.int64(THREAD_NUMBER()) if given[words.MEMBER] < 0 else given[words.MEMBER]


@inline_element
def results(given: Any) -> Any:
    """Where members leave what they found."""
    return carray(pointer_f64(given[words.RESULTS]), (given[words.MEMBERS],))


@inline_element
def numbers(given: Any) -> Any:
    """The settings of groups, the steps of parameters, and what gradients are multiplied by."""
    settings = carray(pointer_f64(given[words.SETTINGS]), (given[words.GROUPS], SETTINGS))
    return settings, carray(pointer_f32(given[words.STEPS]), (given[words.PARAMETERS],)), double(given[words.SCALE])


@compile_loop
def own_rows(given: Any) -> Any:
    """The table, and the first and last of the rows to work on: each member's have about as many elements."""
    table = carray(pointer_i64(given[words.TABLE]), (given[words.ROWS], COLUMNS))
    members = np.int64(THREAD_COUNT()) if given[words.MEMBER] < 0 else given[words.MEMBERS]
    total, before, mine = table[:, LENGTH].sum(), 0, member(given)
    begin, end = 0, 0
    for row in range(table.shape[0]):
        if before < total * mine // members:
            begin = row + 1
        if before < total * (mine + 1) // members:
            end = row + 1
        before += table[row, LENGTH]
    return table, begin, end


@compile_loop
def momentum_tile(g: Any, w: Any, m: Any, n: Any, c: Any, keep: Any) -> None:
    """SGD with momentum, Nesterov's where ``ahead`` is the momentum and not 0 (Sutskever et al. 2013)."""
    lr, coupled, take, ahead, plain = c[0], c[1], c[3], c[4], c[5]
    for i in range(n):
        gradient = plus(g[i], coupled, w[i])
        buffer = m[i] * keep + gradient * take
        m[i] = buffer
        w[i] -= lr * plus(buffer * ahead, plain, gradient)


@compile_loop
def plain_tile(g: Any, w: Any, n: Any, c: Any) -> None:
    """SGD without momentum."""
    lr, coupled = c[0], c[1]
    for i in range(n):
        w[i] -= lr * plus(g[i], coupled, w[i])


@compile_loop
def adam_constants(setting: Any, step: Any) -> Any:
    """FP32 constants of a chunk, computed in float64 from its group and its step, counted from 1."""
    lr, beta1, beta2, decay = setting[LR], setting[BETA1], setting[BETA2], setting[WEIGHT_DECAY]
    decoupled = setting[DECOUPLED] != 0.0
    return (
        np.float32(lr * decay if decoupled else 0.0),
        np.float32(0.0 if decoupled else decay),
        np.float32(1.0 - beta1),
        np.float32(beta2),
        np.float32(1.0 - beta2),
        np.float32(lr / (1.0 - beta1**step)),
        np.float32(1.0 / np.sqrt(1.0 - beta2**step)),
        np.float32(setting[EPS]),
    )


@compile_loop
def sgd_constants(setting: Any, step: Any, c: Any) -> None:
    """FP32 constants of a chunk; the first step fills the buffer with the gradient, as torch.optim.SGD does."""
    momentum = setting[MOMENTUM]
    nesterov = setting[NESTEROV] != 0.0
    c[0] = setting[LR]
    c[1] = setting[WEIGHT_DECAY]
    c[2] = momentum if step > 1 else 0.0
    c[3] = 1.0 - setting[DAMPENING] if step > 1 else 1.0
    c[4] = momentum if nesterov else 1.0
    c[5] = 1.0 if nesterov else 0.0


@cache
def update_adam(kind: int, master: int) -> int:
    """Adam over a share of the table's rows: the address of a C function, for one kind of parameters and of masters.

    It takes the words of `words`. With FP32 moments a tile is read and its moments written in one loop. With 8-bit ones
    that is three (`byte_kernel`): codes can only be formed when the largest moment of a block is known.
    """
    size = 4 if kind == FLOAT32 else 2
    kept_size = 4 if master == MASTER else 2

    def update(arguments: Any) -> None:
        given = carray(arguments, (words.COUNT,))
        table, begin, end = own_rows(given)
        settings, steps, scale = numbers(given)
        moments, seed, kept = given[words.MOMENTS], given[words.SEED], given[words.KEPT]
        first_moment, second_moment = given[words.FIRST], given[words.SECOND]
        first_scales, second_scales = given[words.FIRST_SCALES], given[words.SECOND_SCALES]
        g = np.empty(LONG_TILE, np.float32)
        w = np.empty(LONG_TILE, np.float32)
        m = np.empty(LONG_TILE, np.float32)
        v = np.empty(LONG_TILE, np.float32)
        largest = np.empty(2 * (LONG_TILE // TILE), np.float32)
        for row in range(begin, end):
            setting = settings[table[row, GROUP]]
            step = steps[table[row, STEP]] + 1.0
            c = adam_constants(setting, step)
            factor = np.float32(scale * setting[SIGN])
            for start in range(0, table[row, LENGTH], LONG_TILE):
                n = min(LONG_TILE, table[row, LENGTH] - start)
                element = table[row, STATE] + start
                low, high = element & 0xFFFFFFFF, element >> 32
                key = stream_key(seed, np.int64(step), high)
                parameter, extra = table[row, PARAMETER] + size * start, kept + kept_size * element
                p, gradients = elements(kind, parameter, n), elements(kind, table[row, GRADIENT] + size * start, n)
                k = kept_elements(master, extra, p, n)
                if moments == BYTES:
                    blocks = (n + TILE - 1) // TILE  # states take up whole blocks, and the last is worked on whole
                    for i in range(n):
                        w[i] = full_precision(kind, master, p[i], k[i])
                        g[i] = plus(gradient_value(kind, gradients[i]) * factor, c[1], w[i])
                    w[n : blocks * TILE] = g[n : blocks * TILE] = np.float32(0)
                    codes = (first_moment + element, second_moment + element)
                    scales = (first_scales + 4 * (element // TILE), second_scales + 4 * (element // TILE))
                    adam_blocks(g, w, codes, scales, m, v, blocks, c, np.float32(setting[BETA1]), largest)
                    other = mix(np.uint32(key + np.uint32(1)))
                    encode_blocks(codes, scales, m, v, blocks, largest, other, low)
                else:
                    first = carray(pointer_f32(first_moment + 4 * element), (n,))
                    second = carray(pointer_f32(second_moment + 4 * element), (n,))
                    for i in range(n):
                        x, gradient = (
                            full_precision(kind, master, p[i], k[i]),
                            gradient_value(kind, gradients[i]) * factor,
                        )
                        w[i], first[i], second[i] = adam(x, gradient, first[i], second[i], c)
                store_parameter(kind, master, parameter, extra, n, w, key, np.uint32(low))

    return compile_function(update)


@cache
def update_sgd(kind: int, master: int) -> int:
    """The same for SGD; without momentum the first moment's address is 0."""
    size = 4 if kind == FLOAT32 else 2
    kept_size = 4 if master == MASTER else 2

    def update(arguments: Any) -> None:
        given = carray(arguments, (words.COUNT,))
        table, begin, end = own_rows(given)
        settings, steps, scale = numbers(given)
        moments, seed, kept = given[words.MOMENTS], given[words.SEED], given[words.KEPT]
        first_moment, first_scales = given[words.FIRST], given[words.FIRST_SCALES]
        g = np.empty(TILE, np.float32)
        w = np.empty(TILE, np.float32)
        m = np.empty(TILE, np.float32)
        c = np.empty(8, np.float32)
        for row in range(begin, end):
            setting = settings[table[row, GROUP]]
            step = steps[table[row, STEP]] + 1.0
            sgd_constants(setting, step, c)
            factor = np.float32(scale * setting[SIGN])
            for start in range(0, table[row, LENGTH], TILE):
                n = min(TILE, table[row, LENGTH] - start)
                element = table[row, STATE] + start
                low, high = element & 0xFFFFFFFF, element >> 32
                key = stream_key(seed, np.int64(step), high)
                parameter, extra = table[row, PARAMETER] + size * start, kept + kept_size * element
                p, gradients = elements(kind, parameter, n), elements(kind, table[row, GRADIENT] + size * start, n)
                k = kept_elements(master, extra, p, n)
                for i in range(n):
                    g[i] = gradient_value(kind, gradients[i]) * factor
                    w[i] = full_precision(kind, master, p[i], k[i])
                if setting[MOMENTUM] == 0.0 or first_moment == 0:
                    plain_tile(g, w, n, c)
                elif moments == BYTES:
                    at = first_scales + 4 * (element // TILE)
                    load_signed(first_moment + element, at, c[2], n, m)
                    momentum_tile(g, w, m, n, c, np.float32(1))
                    store_signed(first_moment + element, at, n, m, mix(np.uint32(key + np.uint32(1))), low)
                else:
                    in_place = carray(pointer_f32(first_moment + 4 * element), (n,))
                    momentum_tile(g, w, in_place, n, c, c[2])
                store_parameter(kind, master, parameter, extra, n, w, key, np.uint32(low))

    return compile_function(update)


@cache
def overflowed(kind: int) -> int:
    """Whether any gradient is infinite or NaN, that is, its exponent field all ones: result 1, else 0."""
    mask = 0x7C00 if kind == FLOAT16 else 0x7F80

    def find(arguments: Any) -> None:
        given = carray(arguments, (words.COUNT,))
        table, begin, end = own_rows(given)
        found = False
        for row in range(begin, end):
            n = table[row, LENGTH]
            gradients = elements(kind, table[row, GRADIENT], n)
            if kind == FLOAT32:
                worst = np.int32(0)
                for i in range(n):
                    worst = max(worst, np.int32(float_bits(gradients[i]) & np.int32(0x7F800000)))
                found = found or worst == np.int32(0x7F800000)
            else:
                most = np.uint16(0)
                for i in range(n):
                    most = max(most, np.uint16(gradients[i] & np.uint16(mask)))
                found = found or most == np.uint16(mask)
            if found:
                break
        results(given)[member(given)] = 1.0 if found else 0.0

    return compile_function(find)


@cache
def sum_of_squares(kind: int) -> int:
    """Σ gradient², in float64."""
    size = 4 if kind == FLOAT32 else 2

    def squares(arguments: Any) -> None:
        given = carray(arguments, (words.COUNT,))
        table, begin, end = own_rows(given)
        g = np.empty(TILE, np.float32)
        lanes = np.empty(8, np.float64)
        lanes[:] = 0.0
        for row in range(begin, end):
            for start in range(0, table[row, LENGTH], TILE):
                n = min(TILE, table[row, LENGTH] - start)
                gradients = elements(kind, table[row, GRADIENT] + size * start, n)
                for i in range(n):
                    g[i] = gradient_value(kind, gradients[i])
                whole = n - n % 8
                for i in range(0, whole, 8):
                    for lane in range(8):
                        x = np.float64(g[i + lane])
                        lanes[lane] += x * x
                for i in range(whole, n):
                    x = np.float64(g[i])
                    lanes[0] += x * x
        results(given)[member(given)] = lanes.sum()

    return compile_function(squares)


@cache
def touched() -> int:
    """Read and write FP32 parameters in place and read gradients: what the memory allows, for measurements."""

    def touch(arguments: Any) -> None:
        given = carray(arguments, (words.COUNT,))
        table, begin, end = own_rows(given)
        worst = np.int32(0)
        for row in range(begin, end):
            n = table[row, LENGTH]
            block = carray(pointer_f32(table[row, PARAMETER]), (n,))
            if table[row, GRADIENT] == 0:
                for i in range(n):
                    block[i] += np.float32(1)
            else:
                for i in range(n):
                    worst = max(worst, float_bits(block[i]))
        results(given)[member(given)] = worst

    return compile_function(touch)
