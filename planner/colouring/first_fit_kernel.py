"""First fit for many items: plain loops over integers, so numba can compile them.

What is placed lies in blocks, in order of offset. A block of which nothing is alive with the item is skipped; so is one
that is alive with it as a whole and has no gap large enough. In a training step most blocks are one or the other,
since what lies at neighbouring offsets lives for nested spans. An item with few conflicts looks only at those, found
among the items of each class of duration (within a factor of two) by where their births lie.
"""

from __future__ import annotations

from typing import Any

BLOCK = 64
"""Entries in a block: splitting, inserting and summing up a block cost about as much as stepping over the others."""

SPARSE = 12
"""Looking an item's conflicts up and sorting them costs about this much more for each than a step of the scan."""

BLOCKS, HIGHEST, STEPS = 0, 1, 2
COUNTS = 3


def place(
    order: Any, position: int, stop: int, limit: int, items: Any, classes: Any, blocks: Any, scratch: Any, counts: Any
) -> int:
    """Place ``order[position:stop]`` and return where it ended: sooner if an item would end above ``limit``."""
    size, birth, death, alignment, conflicts, offsets = items
    class_at, class_items, class_birth = classes
    chain, fill, earliest, latest, last_birth, first_death, top, gap, low, high, since, until = blocks
    near_low, near_high = scratch
    used = counts[BLOCKS]
    highest = counts[HIGHEST]
    work = counts[STEPS]
    while position < stop:
        item = order[position]
        need, start, end, unit = size[item], birth[item], death[item], alignment[item]
        at = offsets[item]
        if at < 0:
            at = 0
            if conflicts[item] * SPARSE < position:
                count = 0
                for group in range(len(class_at) - 1):
                    left, right = class_at[group], class_at[group + 1]
                    after = start - (2 << group)  # no duration in the class is longer
                    last = right
                    while left < last:
                        middle = (left + last) // 2
                        if class_birth[middle] < after:
                            left = middle + 1
                        else:
                            last = middle
                    while left < right and class_birth[left] < end:
                        other = class_items[left]
                        left += 1
                        if offsets[other] >= 0 and other != item and death[other] > start:
                            near_low[count] = offsets[other]
                            near_high[count] = offsets[other] + size[other]
                            count += 1
                work += count * SPARSE
                step = 1
                while step < count // 3:
                    step = 3 * step + 1
                while step > 0:  # Shell's sort, by Knuth's steps
                    for index in range(step, count):
                        key, value = near_low[index], near_high[index]
                        slot = index
                        while slot >= step and near_low[slot - step] > key:
                            near_low[slot] = near_low[slot - step]
                            near_high[slot] = near_high[slot - step]
                            slot -= step
                        near_low[slot] = key
                        near_high[slot] = value
                    step //= 3
                for index in range(count):
                    if near_low[index] - at >= need:
                        break
                    if near_high[index] > at:
                        at = near_high[index]
                        if unit > 1:
                            at += -at % unit
            else:
                found = False
                for link in range(used):
                    block = chain[link]
                    base = block * BLOCK
                    work += 1
                    if low[base] - at >= need:
                        break
                    if top[block] <= at or earliest[block] >= end or latest[block] <= start:
                        continue
                    if last_birth[block] < end and first_death[block] > start and gap[block] < need:
                        at = top[block]
                        if unit > 1:
                            at += -at % unit
                        continue
                    work += fill[block]
                    for entry in range(base, base + fill[block]):
                        if (high[entry] > at) & (since[entry] < end) & (until[entry] > start):
                            if low[entry] - at >= need:
                                found = True
                                break
                            at = high[entry]
                            if unit > 1:
                                at += -at % unit
                    if found:
                        break
            if at + need > limit:
                break
            offsets[item] = at
        if at + need > highest:
            highest = at + need
        # Into the last block that begins at or below the offset.
        left, right = 0, used
        while left < right:
            middle = (left + right) // 2
            if low[chain[middle] * BLOCK] <= at:
                left = middle + 1
            else:
                right = middle
        link = left - 1 if left > 0 else 0
        if used == 0:
            chain[0] = 0
            fill[0] = 0
            used = 1
        block = chain[link]
        if fill[block] == BLOCK:
            for later in range(used, link + 1, -1):
                chain[later] = chain[later - 1]
            half = BLOCK // 2
            chain[link + 1] = used
            for entry in range(half):
                low[used * BLOCK + entry] = low[block * BLOCK + half + entry]
                high[used * BLOCK + entry] = high[block * BLOCK + half + entry]
                since[used * BLOCK + entry] = since[block * BLOCK + half + entry]
                until[used * BLOCK + entry] = until[block * BLOCK + half + entry]
            fill[block] = half
            fill[used] = half
            used += 1
            if low[chain[link + 1] * BLOCK] <= at:
                link += 1
            first, beyond = link, link + 1
            if block == chain[link]:
                beyond = link + 2
            else:
                first = link - 1
        else:
            first, beyond = link, link + 1
        block = chain[link]
        entry = block * BLOCK + fill[block]
        while entry > block * BLOCK and low[entry - 1] > at:
            low[entry] = low[entry - 1]
            high[entry] = high[entry - 1]
            since[entry] = since[entry - 1]
            until[entry] = until[entry - 1]
            entry -= 1
        low[entry] = at
        high[entry] = at + need
        since[entry] = start
        until[entry] = end
        fill[block] += 1
        for link in range(first, beyond):
            block = chain[link]
            base = block * BLOCK
            earliest[block] = last_birth[block] = since[base]
            latest[block] = first_death[block] = until[base]
            top[block] = high[base]
            gap[block] = 0
            for entry in range(base + 1, base + fill[block]):
                gap[block] = max(gap[block], low[entry] - top[block])
                top[block] = max(top[block], high[entry])
                earliest[block] = min(earliest[block], since[entry])
                last_birth[block] = max(last_birth[block], since[entry])
                latest[block] = max(latest[block], until[entry])
                first_death[block] = min(first_death[block], until[entry])
        work += BLOCK
        position += 1
    counts[BLOCKS] = used
    counts[HIGHEST] = highest
    counts[STEPS] = work
    return position
