"""The offset map as an SVG picture: time to the right, offset upwards, live bytes below."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from planner.report.colours import ROLE_COLOURS, role_text, text_colour
from planner.report.facts import handed_over, live_nbytes, size_text
from planner.report.svg_parts import LETTER, STYLE, columns, tick_text, ticks, xml_text

#: Larger plans show the storages that cover most of the map; the HTML report shows all.
MOST_RECTANGLES = 10_000
_WIDTH, _LEFT, _RIGHT, _TOP = 960, 86, 18, 58
_MAP_HEIGHT, _LIVE_HEIGHT, _BETWEEN = 400, 84, 40


def offset_map_svg(plan: Plan) -> str:
    """A picture of a plan that stands on its own: colours by role, details on hover, light and dark."""
    scale = _Scale(plan)
    names = _names_height(plan)
    live_top = _TOP + _MAP_HEIGHT + _BETWEEN
    legend_top = live_top + _LIVE_HEIGHT + 34 + names
    height = legend_top + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{xml_text(_title(plan))}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{xml_text(_title(plan))}</text>',
        f'<text class="quiet" x="{_LEFT}" y="42">{xml_text(_subtitle(plan))}</text>',
        *_map_axes(plan, scale),
        *_rectangles(plan, scale),
        *_live_curve(plan, scale, live_top),
        *(_operation_names(plan, scale, live_top + _LIVE_HEIGHT) if names else ()),
        *_legend(plan, legend_top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From steps and bytes to pixels."""

    plan: Plan

    def x(self, step: float) -> float:
        return _LEFT + step * (_WIDTH - _LEFT - _RIGHT) / self.plan.steps

    def y(self, offset: float) -> float:
        return _TOP + _MAP_HEIGHT * (1 - offset / max(self.plan.arena_nbytes, 1))


def _title(plan: Plan) -> str:
    return f"Offset map: {plan.graph.mode} plan, {plan.strategy}"


def _subtitle(plan: Plan) -> str:
    figures = [
        f"arena {size_text(plan.arena_nbytes)}",
        f"lower bound {size_text(plan.lower_bound_nbytes)}",
        f"resident {size_text(plan.resident_nbytes)}",
        f"extra {size_text(plan.extra_nbytes)}",
        f"naive {size_text(plan.naive_nbytes)}",
    ]
    if plan.formula is not None:
        figures.insert(4, f"max(S, 3X) {size_text(plan.formula.target)}")
    return " · ".join(figures)


def _map_axes(plan: Plan, scale: _Scale) -> list[str]:
    right = _WIDTH - _RIGHT
    parts = [f'<rect class="field" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{_MAP_HEIGHT}"/>']
    for offset in ticks(plan.arena_nbytes, count=7, binary=True):
        y = scale.y(offset)
        parts.append(f'<path class="line" d="M{_LEFT - 5} {y:.1f}H{_LEFT}"/>')
        parts.append(
            f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_text(offset)}</text>'
        )
    for step in ticks(plan.steps, count=12, binary=False):
        if step < plan.steps:
            x = scale.x(step + 0.5 if plan.steps <= 40 else step)
            y = _TOP + _MAP_HEIGHT + 18
            parts.append(f'<text class="quiet" x="{x:.1f}" y="{y}" text-anchor="middle">{step:,}</text>')
    parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{_TOP + _MAP_HEIGHT + 18}" text-anchor="end">step</text>')
    return parts


def _rectangles(plan: Plan, scale: _Scale) -> list[str]:
    after = handed_over(plan)
    found: list[tuple[float, int, str]] = []
    for index, (storage, place) in enumerate(zip(plan.graph.storages, plan.placements, strict=True)):
        if not storage.nbytes:
            continue
        # Bytes handed over in place change hands in the middle of the step.
        birth = place.birth + (0.5 if place.in_place_of is not None else 0)
        death = plan.placements[after[index]].birth + 0.5 if index in after else place.death
        x, y = scale.x(birth), scale.y(place.offset + storage.nbytes)
        width, height = scale.x(death) - x, scale.y(place.offset) - y
        hint = (
            f"{storage.name}\n{role_text(storage.role)}, {size_text(storage.nbytes)}\n"
            f"offset {place.offset:,}\nsteps [{place.birth}, {place.death})"
        )
        if place.in_place_of is not None:
            hint += f"\nin place of {plan.graph.storages[place.in_place_of].name}"
        box = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{max(height, 0.4):.2f}"'
        fill = ROLE_COLOURS[storage.role]
        seam = ' class="storage"' if width > 4 and height > 4 else ""
        part = f'<rect{seam} {box} fill="{fill}"><title>{xml_text(hint)}</title></rect>'
        room = int((width - 8) / LETTER)
        if height >= 11.5 and room >= min(len(storage.name), 5):
            name = storage.name if len(storage.name) <= room else storage.name[: room - 1] + "…"
            spot = f'x="{x + 4:.2f}" y="{y + min(height / 2 + 3.8, 14):.2f}"'
            part += f'<text class="label" {spot} style="fill: {text_colour(storage.role)}">{xml_text(name)}</text>'
        found.append((width * height, index, part))
    hidden = len(found) - MOST_RECTANGLES
    if hidden > 0:
        found = sorted(sorted(found, key=lambda entry: (-entry[0], entry[1]))[:MOST_RECTANGLES], key=lambda e: e[1])
    parts = [part for _, _, part in found]
    if hidden > 0:
        note = f"{hidden:,} smaller storages are not drawn"
        parts.append(f'<text class="quiet" x="{_WIDTH - _RIGHT}" y="{_TOP - 16}" text-anchor="end">{note}</text>')
    return parts


def _live_curve(plan: Plan, scale: _Scale, top: int) -> list[str]:
    live = live_nbytes(plan)
    highest = max(*live, plan.arena_nbytes, 1)
    base = top + _LIVE_HEIGHT

    def y(nbytes: int) -> float:
        return base - _LIVE_HEIGHT * nbytes / highest

    # One level for each half pixel at most, the largest of its steps.
    path = f"M{_LEFT} {base}"
    for last, most in columns(live, 2 * (_WIDTH - _LEFT - _RIGHT)):
        path += f"V{y(most):.1f}H{scale.x(last):.1f}"
    peak = max(live)
    bound = y(plan.lower_bound_nbytes)
    at, high = scale.x(live.index(peak) + 0.5), y(peak)
    notes = [f"● peak {size_text(peak)} at step {live.index(peak):,}", "╌ lower bound"]
    arena = ""
    if plan.arena_nbytes > plan.lower_bound_nbytes:
        notes.append("— arena")
        arena = f'<path class="arena" d="M{_LEFT} {y(plan.arena_nbytes):.1f}H{_WIDTH - _RIGHT}"/>'
    note = "   ".join(notes)
    return [
        f'<rect class="field" x="{_LEFT}" y="{top}" width="{_WIDTH - _RIGHT - _LEFT}" height="{_LIVE_HEIGHT}"/>',
        f'<path class="live" d="{path}V{base}Z"/>',
        arena,
        f'<path class="bound" d="M{_LEFT} {bound:.1f}H{_WIDTH - _RIGHT}"/>',
        f'<path class="at-peak" d="M{at:.1f} {_TOP}V{_TOP + _MAP_HEIGHT}M{at:.1f} {top}V{base}"/>',
        f'<circle class="peak" cx="{at:.1f}" cy="{high:.1f}" r="4"/>',
        f'<text class="quiet" x="{_LEFT - 8}" y="{base}" text-anchor="end">live bytes</text>',
        f'<text class="quiet" x="{_WIDTH - _RIGHT}" y="{top - 6}" text-anchor="end" xml:space="preserve">{note}</text>',
    ]


def _names_height(plan: Plan) -> int:
    """Pixels for the names of the operations, which are shown where there are few."""
    if not 0 < len(plan.graph.operations) <= 40:
        return 0
    longest = max(len(operation.name) for operation in plan.graph.operations)
    return 10 + int(min(longest, 18) * LETTER * 0.65)


def _operation_names(plan: Plan, scale: _Scale, top: int) -> list[str]:
    parts = []
    for step, operation in enumerate(plan.graph.operations):
        x, y = scale.x(step + 0.5), top + 12
        name = operation.name if len(operation.name) <= 18 else operation.name[:17] + "…"
        parts.append(
            f'<text class="quiet" x="{x:.1f}" y="{y}" text-anchor="end" transform="rotate(-40 {x:.1f} {y})">'
            f"{xml_text(name)}</text>"
        )
    return parts


def _legend(plan: Plan, top: int) -> list[str]:
    parts, x = [], float(_LEFT)
    roles = {storage.role for storage in plan.graph.storages}
    for role, colour in ROLE_COLOURS.items():
        if role in roles:
            parts.append(f'<rect x="{x:.0f}" y="{top - 10}" width="11" height="11" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{x + 16:.0f}" y="{top}">{role_text(role)}</text>')
            x += 16 + LETTER * len(role_text(role)) + 18
    return parts
