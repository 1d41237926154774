"""What a compiled loop of the update is handed: 64-bit words, most of them addresses, at these positions."""

from __future__ import annotations

(
    MEMBER,  # which share of the rows to take, −1: that of the calling OpenMP thread
    MEMBERS,  # of so many
    RESULTS,  # address of one 64-bit result a member
    TABLE,  # address of the table of chunks (`layout.chunk_table`)
    ROWS,  # its rows
    SETTINGS,  # address of the table of groups, float64
    GROUPS,  # its rows
    STEPS,  # address of the counts of steps, FP32
    PARAMETERS,  # how many there are
    MOMENTS,  # how moments are kept: `codes.FULL` or `codes.BYTES`
    SCALE,  # what gradients are multiplied by: the bits of a float64
    SEED,  # of random rounding
    KEPT,  # address of masters or remainders; this one and the following are those of state element 0, or 0
    FIRST,  # address of the first moments
    SECOND,  # address of the second
    FIRST_SCALES,  # address of the scales of the first, FP32
    SECOND_SCALES,  # address of the scales of the second
) = range(17)
COUNT = 17
