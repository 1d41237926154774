"""What the SVG pictures share: their style for a light and a dark ground, round marks for an axis, safe text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from planner.report.facts import size_text

#: Width of a letter of the labels, pixels.
LETTER = 6.2
#: Characters that XML cannot hold at all.
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #59636e }
.label { pointer-events: none }
.ground { fill: #ffffff }
.field { fill: #f3f4f6 }
.line { stroke: #c8ccd2; fill: none }
.storage { stroke: #ffffff; stroke-width: .6 }
.live { fill: #4269d0; fill-opacity: .35; stroke: #4269d0 }
.bound { stroke: #b3261e; stroke-dasharray: 5 4; fill: none }
.arena { stroke: #1f2328; fill: none }
.peak { fill: #b3261e; stroke: none }
.at-peak { stroke: #b3261e; stroke-dasharray: 2 3; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .quiet { fill: #9198a1 }
  .ground { fill: #0d1117 }
  .field { fill: #171c24 }
  .line { stroke: #3d444d }
  .storage { stroke: #0d1117 }
  .live { fill: #8fabf5; stroke: #8fabf5 }
  .bound, .at-peak { stroke: #ff8a80 }
  .arena { stroke: #e6edf3 }
  .peak { fill: #ff8a80 }
}
"""


def tick_text(nbytes: int) -> str:
    """The size without digits that say nothing: ``256 KiB``, ``1.5 MiB``."""
    number, unit = size_text(nbytes).split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def ticks(limit: int, count: int, *, binary: bool) -> list[int]:
    """Round numbers from 0 to ``limit``: powers of two for bytes, or 1, 2, 5 times a power of ten for steps."""
    if limit <= 0:
        return [0]
    bases = (1, 2, 4, 8) if binary else (1, 2, 5)
    power = 16 if binary else 10
    unit = 1
    while True:
        for base in bases:
            if limit <= unit * base * count:
                return list(range(0, limit + 1, unit * base))
        unit *= power


def xml_text(text: str) -> str:
    """Text as it may stand in an SVG file."""
    return escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))


def columns(values: Sequence[int], most: int) -> list[tuple[int, int]]:
    """A curve in at most ``most`` columns of about equal width: where each ends, and its largest value."""
    count = min(len(values), most)
    edges = [column * len(values) // count for column in range(count + 1)] if count else [0]
    return [(last, max(values[first:last])) for first, last in pairwise(edges)]
