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
DEPTH, NODES, TRAIL, FAILED_AT = 0, 1, 2, 3
REGISTERS = 4
MASK = (1 << 62) - 1
MIX_ITEM, MIX_LOW, MIX_KEY = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB

BEGIN, END, FROM, TO, DEADLINE, FLOOR, LAST, KEY = 0, 1, 2, 3, 4, 5, 6, 7
TRIED, CANDIDATES, TRAIL_BASE, ITEMS_BASE, PIECE_BASE, PIECE, PIECE_END = 8, 9, 10, 11, 12, 13, 14
FRAME = 15
"""A frame's numbers: its items, its moments, the end no candidate may start at, the place before it, its key; then
the next candidate (or -1: not listed yet) and the end of the list, and where its trail, items and pieces begin."""

PIECE_SIZE = 6
"""A piece has the first six of a frame's numbers, its key in place of the floor."""


def advance(
    problem: Any, state: Any, registers: Any, target: int, offset_weight: int, index_weight: int, node_limit: int
) -> int:
    """Search on until solved, exhausted or ``node_limit`` nodes are counted; see ``search`` for the arrays."""
    size, first, stop, alignment, near_at, near, section_at, section, pin_at, pins, wall_at, walls = problem
    (
        number,
        twin,
        low,
        placed,
        remaining,
        witness,
        support,
        limits,
        trails,
        items,
        candidates,
        frames,
        pieces,
        failed,
    ) = state
    slots = len(failed)
    depth = registers[DEPTH]
    nodes = registers[NODES]
    trail = registers[TRAIL]
    failed_at = registers[FAILED_AT]
    outcome = PAUSED
    while outcome == PAUSED and nodes < node_limit:
        here = depth * FRAME
        if frames[here + TRIED] < 0:
            # List the candidates of a new frame by the weighed sum of offset and number.
            base = 0 if depth == 0 else frames[here - FRAME + CANDIDATES]
            write = base
            floor = frames[here + FLOOR]
            for position in range(frames[here + BEGIN], frames[here + END]):
                item = items[position]
                at = low[item]
                if at >= frames[here + DEADLINE] or at < floor or (at == floor and number[item] < frames[here + LAST]):
                    continue
                if twin[item] >= 0 and placed[twin[item]] == 0:
                    continue
                rank = at * offset_weight + number[item] * index_weight
                slot = write
                while slot > base:
                    other = candidates[slot - 1]
                    other_rank = low[other] * offset_weight + number[other] * index_weight
                    if other_rank < rank or (other_rank == rank and number[other] < number[item]):
                        break
                    candidates[slot] = other
                    slot -= 1
                candidates[slot] = item
                write += 1
            frames[here + TRIED] = base
            frames[here + CANDIDATES] = write
        fits = frames[here + TRIED] < frames[here + CANDIDATES]
        if not fits:
            failed[frames[here + KEY] % slots] = frames[here + KEY]
            depth -= 1
            here -= FRAME
            if depth < 0:
                outcome = EXHAUSTED
                break
        else:
            nodes += 1
            chosen = candidates[frames[here + TRIED]]
            frames[here + TRIED] += 1
            chosen_low = low[chosen]
            chosen_number = number[chosen]
            placed[chosen] = 1
            trails[2 * trail] = -1 - chosen
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
                    if at < pins[2 * pin + 1] and at + size[item] > pins[2 * pin]:
                        at = pins[2 * pin + 1]
                        if alignment[item] > 1:
                            at += -at % alignment[item]
                trails[2 * trail] = item
                trails[2 * trail + 1] = low[item]
                trail += 1
                low[item] = at
                if at + size[item] > target:
                    fits = False
                    break
            # In each moment some item must start at or below its limit. The one that failed last is looked at first.
            turn = frames[here + FROM] - 1
            while fits and turn < frames[here + TO]:
                moment = turn
                if turn < frames[here + FROM]:
                    moment = failed_at
                    if moment < frames[here + FROM] or moment >= frames[here + TO]:
                        moment = frames[here + FROM]
                turn += 1
                if remaining[moment] == 0:
                    continue
                limit = target - remaining[moment]
                if wall_at[moment] < wall_at[moment + 1]:
                    above = 0
                    for wall in range(wall_at[moment], wall_at[moment + 1]):
                        above += walls[2 * wall + 1] - walls[2 * wall]
                    for wall in range(wall_at[moment], wall_at[moment + 1]):
                        if limit - above < walls[2 * wall]:
                            break
                        above -= walls[2 * wall + 1] - walls[2 * wall]
                    limit -= above
                limits[moment] = limit
                item = witness[moment]
                at = low[item]
                if placed[item] == 0 and at <= limit:
                    if at > chosen_low:
                        continue
                    if at == chosen_low and number[item] > chosen_number:
                        continue
                found = False
                for position in range(section_at[moment], section_at[moment + 1]):
                    item = section[position]
                    at = low[item]
                    if placed[item] == 1 or at > limit:
                        continue
                    if at > chosen_low or (at == chosen_low and number[item] > chosen_number):
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
                if not found:
                    fits = False
                    failed_at = moment
            # What remains, in pieces that share no moment; the list is in order of first moments.
            first_piece = frames[here + PIECE_BASE]
            last_piece = first_piece - 1
            write = frames[here + ITEMS_BASE]
            reach = -1
            position = frames[here + BEGIN]
            while fits and position < frames[here + END]:
                item = items[position]
                position += 1
                if item == chosen:
                    continue
                at = low[item]
                passed = at < chosen_low or (at == chosen_low and number[item] < chosen_number)
                if passed:
                    # Stranded: some neighbour must come to lie below its end.
                    under = support[item]
                    if under < 0 or placed[under] == 1 or low[under] >= at + size[item]:
                        fits = False
                        for other in range(near_at[item], near_at[item + 1]):
                            under = near[other]
                            if placed[under] == 0 and low[under] < at + size[item]:
                                support[item] = under
                                fits = True
                                break
                if first[item] >= reach:
                    last_piece += 1
                    slot = last_piece * PIECE_SIZE
                    pieces[slot + BEGIN] = write
                    pieces[slot + FROM] = first[item]
                    pieces[slot + DEADLINE] = target + 1
                    pieces[slot + FLOOR] = 0
                slot = last_piece * PIECE_SIZE
                if stop[item] > reach:
                    reach = stop[item]
                    pieces[slot + TO] = reach
                items[write] = item
                write += 1
                pieces[slot + END] = write
                if at + size[item] < pieces[slot + DEADLINE]:
                    pieces[slot + DEADLINE] = at + size[item]
                mix = (((at + 1) * MIX_LOW) & MASK) ^ (((item + 1) * MIX_ITEM) & MASK)
                if passed:
                    mix = mix ^ MIX_KEY
                mix = ((mix ^ (mix >> 29)) * MIX_KEY) & MASK
                pieces[slot + FLOOR] = (pieces[slot + FLOOR] + (mix ^ (mix >> 31))) & MASK
            piece = first_piece
            while fits and piece <= last_piece:
                slot = piece * PIECE_SIZE
                key = pieces[slot + FLOOR]
                fits = failed[key % slots] != key
                for moment in range(pieces[slot + FROM], pieces[slot + TO]):
                    if limits[moment] + 1 < pieces[slot + DEADLINE]:
                        pieces[slot + DEADLINE] = limits[moment] + 1
                # Smallest piece first: it fails soonest.
                while slot > first_piece * PIECE_SIZE and (
                    pieces[slot + END] - pieces[slot] < pieces[slot - PIECE_SIZE + END] - pieces[slot - PIECE_SIZE]
                ):
                    for field in range(slot, slot + PIECE_SIZE):
                        swap = pieces[field]
                        pieces[field] = pieces[field - PIECE_SIZE]
                        pieces[field - PIECE_SIZE] = swap
                    slot -= PIECE_SIZE
                piece += 1
            if fits:
                frames[here + PIECE] = first_piece
                frames[here + PIECE_END] = last_piece + 1
                while frames[here + PIECE] == frames[here + PIECE_END]:
                    depth -= 1
                    here -= FRAME
                    if depth < 0:
                        outcome = SOLVED
                        break
                    frames[here + PIECE] += 1
                if outcome == PAUSED:
                    below = here + FRAME
                    slot = frames[here + PIECE] * PIECE_SIZE
                    for field in range(FLOOR):
                        frames[below + field] = pieces[slot + field]
                    frames[below + KEY] = pieces[slot + FLOOR]
                    last = candidates[frames[here + TRIED] - 1]
                    frames[below + FLOOR] = low[last]
                    frames[below + LAST] = number[last]
                    frames[below + TRIED] = -1
                    frames[below + TRAIL_BASE] = trail
                    frames[below + ITEMS_BASE] = frames[here + ITEMS_BASE]
                    for piece in range(frames[here + PIECE], frames[here + PIECE_END]):
                        if pieces[piece * PIECE_SIZE + END] > frames[below + ITEMS_BASE]:
                            frames[below + ITEMS_BASE] = pieces[piece * PIECE_SIZE + END]
                    frames[below + PIECE_BASE] = frames[here + PIECE_END]
                    depth += 1
        if not fits:
            # Take back what this frame placed, and whatever its solved pieces placed after it.
            while trail > frames[here + TRAIL_BASE]:
                trail -= 1
                item = trails[2 * trail]
                if item >= 0:
                    low[item] = trails[2 * trail + 1]
                else:
                    item = -1 - item
                    placed[item] = 0
                    for moment in range(first[item], stop[item]):
                        remaining[moment] += size[item]
    registers[DEPTH] = depth
    registers[NODES] = nodes
    registers[TRAIL] = trail
    registers[FAILED_AT] = failed_at
    return outcome
