"""Allocation problems to measure packing on: training steps in the large, and random ones."""

from __future__ import annotations

import random

from planner.problem import Lifetime, Problem

ALIGNMENT = 512
"""Sizes are multiples of it, as the sizes a caching allocator records are."""


def training_step(buffers: int, seed: int = 0) -> Problem:
    """Return about ``buffers`` lifetimes shaped like one step of a deep model: forward, backward, update.

    Blocks of a few kinds repeat. In a block's forward pass each operation makes an output and temporaries nested
    in it; some outputs are saved until the same operation's backward, the rest die a few operations later. The
    backward pass makes gradients of activations, short-lived, and of weights, which live until the update. Sizes
    come from a few classes a kind, some ragged; state lives throughout.
    """
    draw = random.Random(seed)
    kinds = [_kind(draw) for _ in range(4)]
    lifetimes: list[tuple[int, int, int]] = []
    saved: list[tuple[list[tuple[int, int, int | None]], list[int]]] = []
    step = 0
    blocks = max(1, buffers // (2 * 36))
    for block in range(blocks):
        operations = kinds[draw.choice((0, 0, 0, 1, 2, 3)) if block % 12 else 3]
        open_saves: list[tuple[int, int, int | None]] = []
        for size, temporaries, keep, spread in operations:
            born = step
            _nest(lifetimes, draw, step, temporaries)
            step += 1 + len(temporaries)
            if keep:
                open_saves.append((size, born, None))
            else:
                lifetimes.append((size, born, step + spread))
        saved.append((open_saves, [size for size, _, keep, _ in operations if not keep]))
    weight_gradients: list[tuple[int, int]] = []
    for block in reversed(range(blocks)):
        open_saves, passing = saved[block]
        for size, born, _ in reversed(open_saves):
            gradient = draw.choice(passing) if passing and draw.random() < 0.4 else size
            _nest(lifetimes, draw, step, [size] if draw.random() < 0.5 else [])
            lifetimes.append((gradient, step, step + draw.randint(2, 6)))
            if draw.random() < 0.3:
                weight_gradients.append((draw.choice((4, 16, 16, 64)) * ALIGNMENT * 32, step))
            step += 2
            lifetimes.append((size, born, step))
    for size, born in weight_gradients:
        lifetimes.append((size, born, step + 2))
        step += 1
    while len(lifetimes) < buffers:
        born = draw.randrange(step)
        lifetimes.append((ALIGNMENT * draw.randint(1, 64), born, min(step + 1, born + draw.randint(1, 5))))
    lifetimes += [(ALIGNMENT * draw.choice((8, 64, 512)), 0, step + 2) for _ in range(buffers // 100)]
    draw.shuffle(lifetimes)
    return _problem(lifetimes[:buffers])


def random_lifetimes(buffers: int, seed: int = 0) -> Problem:
    """Return lifetimes that start anywhere and last a random while, about a hundred alive at once."""
    draw = random.Random(seed)
    lifetimes = []
    for _ in range(buffers):
        born = draw.randrange(10 * buffers)
        lifetimes.append((draw.randint(1, 4096) * ALIGNMENT, born, born + 1 + int(draw.expovariate(1 / 1000))))
    return _problem(lifetimes)


def _kind(draw: random.Random) -> list[tuple[int, list[int], bool, int]]:
    """Return the operations of one kind of block: output size, sizes of nested temporaries, saved or not, life."""
    activation = draw.choice((256, 384, 512, 768)) * ALIGNMENT
    classes = [activation, activation, 3 * activation, 4 * activation, activation // 4 + ALIGNMENT, 2 * ALIGNMENT]
    operations = []
    for _ in range(draw.randint(10, 16)):
        size = draw.choice(classes)
        temporaries = [draw.choice(classes) for _ in range(draw.choice((0, 0, 1, 1, 2, 3)))]
        operations.append((size, temporaries, draw.random() < 0.55, draw.randint(1, 8)))
    return operations


def _nest(lifetimes: list[tuple[int, int, int]], draw: random.Random, step: int, sizes: list[int]) -> None:
    """Add temporaries one inside the other."""
    for depth, size in enumerate(sizes):
        lifetimes.append((size, step + depth, step + 2 * len(sizes) - depth + draw.randint(0, 1)))


def _problem(lifetimes: list[tuple[int, int, int]]) -> Problem:
    """Name lifetimes by their place."""
    return Problem(tuple(Lifetime(str(index), *lifetime) for index, lifetime in enumerate(lifetimes)))
