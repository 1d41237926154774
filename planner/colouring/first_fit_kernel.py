"""First fit for many items: plain loops over integers, so numba can compile them.

Time is cut into buckets. Each keeps two lists of disjoint ranges of offsets, in order and joined where they touch: what
is taken at any moment of the bucket, and what is taken by items that live through all of it. Packings are tight, so
the lists are short. An item meets the first list of every bucket it lives through; in the at most two others it meets
the second list, and one by one the items that begin or end there.

On a large problem even these lists grow with it. They only ever fill up, though: below the first gap that held some
size, no gap will hold that size or a larger one. So each list keeps a hint for each of a few sizes, the offset
below which no gap holds that size, and the next item starts from there.
"""

from __future__ import annotations

from typing import Any

HIGHEST, STEPS, OVERFLOW = 0, 1, 2
COUNTS = 3


def place(
    order: Any, position: int, stop: int, limit: int, items: Any, buckets: Any, ranges: Any, scratch: Any, counts: Any
) -> int:
    """Place ``order[position:stop]`` and return where it ended.

    It ends early if an item would end above ``limit``, or if a bucket's list is full (``counts[OVERFLOW]`` is set).
    """
    size, birth, death, alignment, smaller, larger, offsets = items
    edge, first_bucket, last_bucket, partial_at, partial = buckets
    low, high, length, hints = ranges
    near_low, near_high, slots, cursor = scratch
    room = len(low) // len(length)
    kinds = len(hints) // len(length)
    highest = counts[HIGHEST]
    steps = counts[STEPS]
    while position < stop:
        item = order[position]
        need, start, end, unit = size[item], birth[item], death[item], alignment[item]
        at = offsets[item]
        if at < 0:
            at = 0
            lists = 0
            near = 0
            for bucket in range(first_bucket[item], last_bucket[item] + 1):
                slot = 2 * bucket
                if start > edge[bucket] or end < edge[bucket + 1]:
                    slot += 1
                    steps += partial_at[bucket + 1] - partial_at[bucket]
                    for entry in range(partial_at[bucket], partial_at[bucket + 1]):
                        other = partial[entry]
                        if (offsets[other] >= 0) & (birth[other] < end) & (death[other] > start):
                            near_low[near] = offsets[other]
                            near_high[near] = offsets[other] + size[other]
                            near += 1
                if length[slot] > 0:
                    # The first gap of this list that holds the item, from the hint on.
                    here = hints[slot * kinds + smaller[item]]
                    entry = slot * room
                    last = entry + length[slot]
                    right = last
                    while entry < right:
                        middle = (entry + right) // 2
                        if high[middle] <= here:
                            entry = middle + 1
                        else:
                            right = middle
                    while entry < last and low[entry] < here + need:
                        here = high[entry]
                        entry += 1
                        steps += 1
                    if here > hints[slot * kinds + larger[item]]:
                        hints[slot * kinds + larger[item]] = here
                    if here > at:
                        at = here
                    slots[lists] = slot
                    cursor[lists] = entry
                    lists += 1
                    steps += 8
            steps += 16 * near
            step = 1
            while step < near // 3:
                step = 3 * step + 1
            while step > 0:  # Shell's sort, by Knuth's steps
                for index in range(step, near):
                    key, value = near_low[index], near_high[index]
                    back = index
                    while back >= step and near_low[back - step] > key:
                        near_low[back] = near_low[back - step]
                        near_high[back] = near_high[back - step]
                        back -= step
                    near_low[back] = key
                    near_high[back] = value
                step //= 3
            if unit > 1:
                at += -at % unit
            passed = 0
            moved = True
            while moved:
                moved = False
                for index in range(lists):
                    entry = cursor[index]
                    last = slots[index] * room + length[slots[index]]
                    step = 1
                    while entry < last and high[entry] <= at:  # Far behind: leap on, twice as far each time.
                        if entry + step < last and high[entry + step] <= at:
                            entry += step
                            step *= 2
                        elif step > 1:
                            step //= 2
                        else:
                            entry += 1
                        steps += 1
                    while entry < last and low[entry] < at + need:
                        steps += 1
                        if high[entry] > at:
                            at = high[entry]
                            if unit > 1:
                                at += -at % unit
                            moved = True
                        entry += 1
                    cursor[index] = entry
                while passed < near and near_low[passed] < at + need:
                    if near_high[passed] > at:
                        at = near_high[passed]
                        if unit > 1:
                            at += -at % unit
                        moved = True
                    passed += 1
                steps += lists + 1
            if at + need > limit:
                break
            offsets[item] = at
        if at + need > highest:
            highest = at + need
        full = False
        for bucket in range(first_bucket[item], last_bucket[item] + 1):
            whole = 0 if start > edge[bucket] or end < edge[bucket + 1] else 1
            for slot in range(2 * bucket, 2 * bucket + 1 + whole):
                base = slot * room
                count = length[slot]
                left, right = 0, count
                while left < right:
                    middle = (left + right) // 2
                    if high[base + middle] < at:
                        left = middle + 1
                    else:
                        right = middle
                begin, finish = at, at + need
                right = left
                while right < count and low[base + right] <= finish:
                    begin = min(begin, low[base + right])
                    finish = max(finish, high[base + right])
                    right += 1
                steps += 8
                if right == left:
                    if count == room:
                        full = True
                        break
                    for entry in range(base + count, base + left, -1):
                        low[entry] = low[entry - 1]
                        high[entry] = high[entry - 1]
                    length[slot] = count + 1
                elif right > left + 1:
                    gone = right - left - 1
                    for entry in range(base + left + 1, base + count - gone):
                        low[entry] = low[entry + gone]
                        high[entry] = high[entry + gone]
                    length[slot] = count - gone
                low[base + left] = begin
                high[base + left] = finish
            if full:
                break
        if full:
            counts[OVERFLOW] = 1
            break
        position += 1
    counts[HIGHEST] = highest
    counts[STEPS] = steps
    return position
