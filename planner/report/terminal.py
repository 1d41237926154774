"""The offset map on a colour terminal: the text map, each letter on the colour of its storage's role."""

from __future__ import annotations

from rich.text import Text

from planner.plan import Plan
from planner.report.colours import ROLE_COLOURS, text_colour
from planner.report.text import offset_map, storage_keys

#: Terminals narrower than the first are written to as if they were so wide; wider than the second is hard to read.
LEAST_WIDTH, MOST_WIDTH = 60, 160


def fitting_width(columns: int) -> int:
    """The width to write for a terminal of so many columns."""
    return min(max(columns, LEAST_WIDTH), MOST_WIDTH)


def offset_map_colours(plan: Plan, width: int) -> Text:
    """`offset_map` with colours: the same characters."""
    styles = {
        key: f"{text_colour(storage.role)} on {ROLE_COLOURS[storage.role]}"
        for key, storage in zip(storage_keys(plan), plan.graph.storages, strict=True)
    }
    shown = Text(no_wrap=True, overflow="crop")
    for line in offset_map(plan, width).splitlines(keepends=True):
        start, bar, cells = line.partition("┤")
        if bar:
            shown.append(start + bar, "dim")
            for cell in cells:
                shown.append(cell, styles.get(cell, "dim"))
        elif len(line) > 3 and line[0] == line[2] == " " and line[1] in styles:
            shown.append(" ")
            shown.append(line[1], styles[line[1]])
            shown.append(line[2:])
        else:
            shown.append(line)
    return shown
