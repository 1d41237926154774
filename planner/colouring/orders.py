"""Orders in which first fit places items: what is hard to place goes first."""

from __future__ import annotations

from collections.abc import Iterator

from planner.colouring.instance import Instance


def orders(instance: Instance) -> Iterator[tuple[str, list[int]]]:
    """Yield named orders of an instance's items, the given one first, no order twice."""
    seen: set[tuple[int, ...]] = set()
    for name, order in _named(instance):
        key = tuple(order)
        if key not in seen:
            seen.add(key)
            yield name, order


def _named(instance: Instance) -> Iterator[tuple[str, list[int]]]:
    """Yield every order, equal ones too. Ties alone can decide the peak, so each comes with several tie-breaks."""
    items = range(len(instance))
    size, start, end = instance.size, instance.start, instance.end
    span = [end[item] - start[item] for item in items]
    yield "given order", list(items)
    yield "size", sorted(items, key=lambda item: (-size[item], -span[item], start[item]))
    yield "duration", sorted(items, key=lambda item: (-span[item], -size[item], start[item]))
    yield "area", sorted(items, key=lambda item: (-size[item] * span[item], -size[item], start[item]))
    yield "birth", sorted(items, key=lambda item: (start[item], -end[item], -size[item]))
    yield "death", sorted(items, key=lambda item: (-end[item], start[item], -size[item]))
    crowd = heaviest_moments(instance)
    yield "crowd", sorted(items, key=lambda item: (-crowd[item], -span[item], -size[item]))
    yield "crowd, size", sorted(items, key=lambda item: (-crowd[item], -size[item], -span[item]))
    yield "crowd, area", sorted(items, key=lambda item: (-crowd[item], -size[item] * span[item], start[item]))
    degree = conflict_counts(instance)
    yield "conflicts x size", sorted(items, key=lambda item: (-degree[item] * size[item], -size[item], start[item]))
    yield "conflicts", sorted(items, key=lambda item: (-degree[item], -size[item], start[item]))
    yield "size, birth", sorted(items, key=lambda item: (-size[item], start[item], -span[item]))
    yield "size, late birth", sorted(items, key=lambda item: (-size[item], -start[item], -span[item]))
    yield "size, conflicts", sorted(items, key=lambda item: (-size[item], -degree[item], start[item]))
    yield "duration, birth", sorted(items, key=lambda item: (-span[item], start[item], -size[item]))
    yield "duration, late birth", sorted(items, key=lambda item: (-span[item], -start[item], -size[item]))
    yield "late birth", sorted(items, key=lambda item: (-start[item], -end[item], -size[item]))
    yield "early death", sorted(items, key=lambda item: (end[item], start[item], -size[item]))


def conflict_counts(instance: Instance) -> list[int]:
    """Return for each item how many others are alive with it, by counting births and deaths."""
    steps = max(instance.end, default=0) + 1
    born = [0] * (steps + 1)
    died = [0] * (steps + 1)
    for start, end in zip(instance.start, instance.end, strict=True):
        born[start + 1] += 1
        died[end + 1] += 1
    for step in range(1, steps + 1):
        born[step] += born[step - 1]
        died[step] += died[step - 1]
    return [born[end] - died[start + 1] - 1 for start, end in zip(instance.start, instance.end, strict=True)]


def heaviest_moments(instance: Instance) -> list[int]:
    """Return for each item the most units alive at any step of its life (its hull's, for ragged groups)."""
    steps = max(instance.end, default=0) + 1
    change = [0] * steps
    for size, start, end in zip(instance.size, instance.start, instance.end, strict=True):
        change[start] += size
        change[end] -= size
    level = 0
    live = []
    for delta in change:
        level += delta
        live.append(level)
    tables = [live]  # sparse table: tables[k][i] is the most over 2**k steps from i
    while 2 * (width := 1 << (len(tables) - 1)) <= steps:
        last = tables[-1]
        tables.append([max(last[i], last[i + width]) for i in range(len(last) - width)])
    heaviest = []
    for start, end in zip(instance.start, instance.end, strict=True):
        power = (end - start).bit_length() - 1
        heaviest.append(max(tables[power][start], tables[power][end - (1 << power)]))
    return heaviest
