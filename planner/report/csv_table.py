"""The storages as an allocation problem with its solution, in minimalloc's columns and some of our own."""

from __future__ import annotations

import csv
import io

from planner.graph import FILLED_ROLES
from planner.plan import Plan
from planner.report.facts import handed_over

#: The first five are minimalloc's; readers that know only those skip the others.
COLUMNS = ("id", "lower", "upper", "size", "offset", "role", "birth", "death", "in_place_of")


def offset_map_csv(plan: Plan) -> str:
    """One row for each storage.

    In ``lower`` and ``upper`` time 0 is the moment before the first step and step ``k`` is time ``k + 1``; a storage
    overwritten in place ends when the other begins. So no two rows alive together share a byte, as minimalloc demands.
    """
    graph = plan.graph
    after = handed_over(plan)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for index, (storage, place) in enumerate(zip(graph.storages, plan.placements, strict=True)):
        lower = 0 if storage.role in FILLED_ROLES and place.birth == 0 else place.birth + 1
        upper = place.death + 1
        if index in after:
            upper = min(upper, plan.placements[after[index]].birth + 1)
        before = "" if place.in_place_of is None else graph.storages[place.in_place_of].name
        writer.writerow(
            (
                storage.name,
                lower,
                upper,
                storage.nbytes,
                place.offset,
                storage.role.value,
                place.birth,
                place.death,
                before,
            )
        )
    return out.getvalue()
