"""The decision search: can these items be packed below a target? Plain loops over integers, so numba can compile it.

After Moffitt, MiniMalloc (ASPLOS 2023). Push every item of a packing down as far as it goes, and list the items by
offset: each then lies exactly on the items before it (or on a pin, or on the ground). The search builds that list
depth first. At each node

* an item is a candidate only at the lowest offset ``low`` that the items placed so far leave it, and only if
  (low, index) follows that of the item placed last: any other place is not pushed down, or was tried before;
* no candidate may start at or above the end another item would have at its own lowest offset: that item would fit
  below (dominance);
* in each section (a maximal clique, one moment in time) some item must start low enough for all that remain there
  to fit above it; an item that may no longer start at its lowest offset starts above one of its neighbours;
* where the remaining items fall apart in time, the parts are solved one by one, the smallest first, and a part once
  solved is not searched again when another fails.

The search is iterative and resumable. Its frames lie in flat arrays, so a compiled copy can be kept on disk, and it
returns after a number of nodes, so that a clock or Ctrl-C can stop it.
"""

from __future__ import annotations

from typing import Any

SOLVED, EXHAUSTED, PAUSED = 1, -1, 0
DEPTH, NODES, TRAIL = 0, 1, 2
REGISTERS = 3
MASK = (1 << 62) - 1
MIX_ITEM, MIX_LOW, MIX_KEY = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def advance(
    problem: Any, state: Any, registers: Any, target: int, offset_weight: int, index_weight: int, node_limit: int
) -> int:
    """Search on until solved, exhausted or ``node_limit`` nodes are counted; see ``search`` for the arrays."""
    size, first, stop, alignment, twin, near_at, near, section_at, section, pin_at, pin_low, pin_high = problem[:12]
    wall_at, wall_low, wall_high = problem[12:]
    low, placed, remaining, witness, support, trail_item, trail_value, items = state[:8]
    begin, end, floor, last, deadline, tried, tried_rank, trail_base, items_base, piece_base, piece, piece_end = state[
        8:20
    ]
    piece_from, piece_to, piece_deadline, piece_key, key, failed = state[20:]
    slots = len(failed)
    depth = registers[DEPTH]
    nodes = registers[NODES]
    trail = registers[TRAIL]
    outcome = PAUSED
    while outcome == PAUSED and nodes < node_limit:
        # The next candidate of this frame: the least weighed sum of offset and index.
        chosen = -1
        chosen_rank = 0
        for position in range(begin[depth], end[depth]):
            item = items[position]
            at = low[item]
            if at >= deadline[depth] or at < floor[depth] or (at == floor[depth] and item < last[depth]):
                continue
            if twin[item] >= 0 and placed[twin[item]] == 0:
                continue
            rank = at * offset_weight + item * index_weight
            if rank < tried_rank[depth] or (rank == tried_rank[depth] and item <= tried[depth]):
                continue
            if chosen < 0 or rank < chosen_rank or (rank == chosen_rank and item < chosen):
                chosen = item
                chosen_rank = rank
        fits = chosen >= 0
        if not fits:
            failed[key[depth] % slots] = key[depth]
            depth -= 1
            if depth < 0:
                outcome = EXHAUSTED
                break
        else:
            nodes += 1
            tried[depth] = chosen
            tried_rank[depth] = chosen_rank
            chosen_low = low[chosen]
            placed[chosen] = 1
            trail_item[trail] = -1 - chosen
            trail += 1
            for moment in range(first[chosen], stop[chosen]):
                remaining[moment] -= size[chosen]
            top = chosen_low + size[chosen]
            for position in range(near_at[chosen], near_at[chosen + 1]):
                item = near[position]
                if placed[item] == 1 or low[item] >= top:
                    continue
                at = top
                if alignment[item] > 1:
                    at += -at % alignment[item]
                for pin in range(pin_at[item], pin_at[item + 1]):
                    if at < pin_high[pin] and at + size[item] > pin_low[pin]:
                        at = pin_high[pin]
                        if alignment[item] > 1:
                            at += -at % alignment[item]
                trail_item[trail] = item
                trail_value[trail] = low[item]
                trail += 1
                low[item] = at
                if at + size[item] > target:
                    fits = False
                    break
            # What remains, in pieces that share no moment; the list is in order of first moments.
            pieces = piece_base[depth]
            write = items_base[depth]
            if fits:
                reach = -1
                for position in range(begin[depth], end[depth]):
                    item = items[position]
                    if item == chosen:
                        continue
                    if first[item] >= reach:
                        piece_from[pieces] = write
                        piece_deadline[pieces] = target + 1
                        piece_key[pieces] = 0
                        pieces += 1
                        reach = stop[item]
                    elif stop[item] > reach:
                        reach = stop[item]
                    items[write] = item
                    write += 1
                    piece_to[pieces - 1] = write
                    at = low[item]
                    if at + size[item] < piece_deadline[pieces - 1]:
                        piece_deadline[pieces - 1] = at + size[item]
                    mix = (((at + 1) * MIX_LOW) & MASK) ^ (((item + 1) * MIX_ITEM) & MASK)
                    if at < chosen_low or (at == chosen_low and item < chosen):
                        mix = mix ^ MIX_KEY
                    mix = ((mix ^ (mix >> 29)) * MIX_KEY) & MASK
                    piece_key[pieces - 1] = (piece_key[pieces - 1] + (mix ^ (mix >> 31))) & MASK
            checked = piece_base[depth]
            while fits and checked < pieces:
                if failed[piece_key[checked] % slots] == piece_key[checked]:
                    fits = False
                    break
                moment = first[items[piece_from[checked]]]
                reach = moment
                for position in range(piece_from[checked], piece_to[checked]):
                    item = items[position]
                    if stop[item] > reach:
                        reach = stop[item]
                    at = low[item]
                    if at < chosen_low or (at == chosen_low and item < chosen):
                        # Stranded: some neighbour must come to lie below its end.
                        under = support[item]
                        if under < 0 or placed[under] == 1 or low[under] >= at + size[item]:
                            found = False
                            for other in range(near_at[item], near_at[item + 1]):
                                under = near[other]
                                if placed[under] == 0 and low[under] < at + size[item]:
                                    support[item] = under
                                    found = True
                                    break
                            if not found:
                                fits = False
                                break
                while fits and moment < reach:
                    # Some item must start at or below `limit` here.
                    limit = target - remaining[moment]
                    if wall_at[moment] < wall_at[moment + 1]:
                        above = 0
                        for wall in range(wall_at[moment], wall_at[moment + 1]):
                            above += wall_high[wall] - wall_low[wall]
                        for wall in range(wall_at[moment], wall_at[moment + 1]):
                            if limit - above < wall_low[wall]:
                                break
                            above -= wall_high[wall] - wall_low[wall]
                        limit -= above
                    if limit < chosen_low:
                        fits = False
                        break
                    if limit + 1 < piece_deadline[checked]:
                        piece_deadline[checked] = limit + 1
                    item = witness[moment]
                    at = low[item]
                    if placed[item] == 1 or at > limit or at < chosen_low or (at == chosen_low and item < chosen):
                        found = False
                        for position in range(section_at[moment], section_at[moment + 1]):
                            item = section[position]
                            at = low[item]
                            if placed[item] == 1 or at > limit:
                                continue
                            if at > chosen_low or (at == chosen_low and item > chosen):
                                witness[moment] = item
                                found = True
                                break
                        position = section_at[moment]
                        while not found and position < section_at[moment + 1]:
                            item = section[position]
                            position += 1
                            if placed[item] == 1 or low[item] > limit:
                                continue
                            # Stranded: it can only start above a neighbour yet to be placed.
                            for other in range(near_at[item], near_at[item + 1]):
                                under = near[other]
                                if placed[under] == 1 or low[under] >= low[item] + size[item]:
                                    continue
                                at = low[under]
                                if at < chosen_low:
                                    at = chosen_low
                                if at + size[under] <= limit:
                                    found = True
                                    break
                        fits = found
                    moment += 1
                checked += 1
            if fits:
                # Smallest piece first: it fails soonest.
                for position in range(piece_base[depth] + 1, pieces):
                    slot = position
                    while slot > piece_base[depth] and (
                        piece_to[slot] - piece_from[slot] < piece_to[slot - 1] - piece_from[slot - 1]
                    ):
                        piece_from[slot], piece_from[slot - 1] = piece_from[slot - 1], piece_from[slot]
                        piece_to[slot], piece_to[slot - 1] = piece_to[slot - 1], piece_to[slot]
                        piece_deadline[slot], piece_deadline[slot - 1] = piece_deadline[slot - 1], piece_deadline[slot]
                        piece_key[slot], piece_key[slot - 1] = piece_key[slot - 1], piece_key[slot]
                        slot -= 1
                piece[depth] = piece_base[depth]
                piece_end[depth] = pieces
                while piece[depth] == piece_end[depth]:
                    depth -= 1
                    if depth < 0:
                        outcome = SOLVED
                        break
                    piece[depth] += 1
                if outcome == PAUSED:
                    part = piece[depth]
                    begin[depth + 1] = piece_from[part]
                    end[depth + 1] = piece_to[part]
                    deadline[depth + 1] = piece_deadline[part]
                    key[depth + 1] = piece_key[part]
                    floor[depth + 1] = low[tried[depth]]
                    last[depth + 1] = tried[depth]
                    trail_base[depth + 1] = trail
                    items_base[depth + 1] = items_base[depth]
                    for slot in range(piece[depth], piece_end[depth]):
                        if piece_to[slot] > items_base[depth + 1]:
                            items_base[depth + 1] = piece_to[slot]
                    piece_base[depth + 1] = piece_end[depth]
                    depth += 1
                    tried[depth] = -1
                    tried_rank[depth] = -1
        if not fits:
            # Take back what this frame placed, and whatever its solved pieces placed after it.
            while trail > trail_base[depth]:
                trail -= 1
                item = trail_item[trail]
                if item >= 0:
                    low[item] = trail_value[trail]
                else:
                    item = -1 - item
                    placed[item] = 0
                    for moment in range(first[item], stop[item]):
                        remaining[moment] += size[item]
    registers[DEPTH] = depth
    registers[NODES] = nodes
    registers[TRAIL] = trail
    return outcome
