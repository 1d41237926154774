"""A device's history as a picture: what was reserved and alive over time, and the same blocks in a planned arena."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath

from planner.problem import Colouring
from planner.report.facts import size_text
from planner.report.history_text import DeviceReport
from planner.report.svg import MOST_RECTANGLES
from planner.report.svg_parts import LETTER, STYLE, columns, tick_text, ticks, xml_text
from planner.snapshot.figures import place_name
from planner.snapshot.frames import user_place
from planner.snapshot.replay import Block

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _BETWEEN = 960, 86, 18, 66, 250, 52
_FIELD = _WIDTH - _LEFT - _RIGHT
#: Places with most bytes × steps get a colour each, the others the last one.
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_OTHER = "#9498a0"
_MORE_STYLE = """
.reserved { fill: #9498a0; fill-opacity: .35; stroke: #9498a0 }
.planned { stroke: #3ca951; stroke-width: 1.6; fill: none }
.failure { stroke: #d1242f; stroke-dasharray: 3 3; fill: none }
"""


def history_svg(report: DeviceReport, title: str) -> str:
    """Two fields over the same time: memory as it was, and the planned arena with every block at its offset."""
    picture = _Picture(report)
    second = _TOP + _HEIGHT + _BETWEEN
    legend = picture.legend(second + _HEIGHT + 44)
    height = second + _HEIGHT + 44 + 18 * -(-len(picture.colours) // 2) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{xml_text(title)}</title>",
        f"<style>{STYLE}{_MORE_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{xml_text(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="42">{xml_text(picture.subtitle())}</text>',
        *picture.field(_TOP, "as it was: reserved (grey), alive (blue)"),
        *picture.curve(report.history.reserved, "reserved", _TOP),
        *picture.curve(report.history.live, "live", _TOP),
        *picture.failures(_TOP),
    ]
    if report.packing is not None:
        parts += [
            *picture.planned_line(report.packing, _TOP),
            *picture.field(second, "the planned arena: each block at its offset, coloured by where it was allocated"),
            *picture.blocks(report.packing, second),
        ]
    parts += [*picture.steps(second + _HEIGHT), *legend, "</svg>"]
    return "\n".join(parts) + "\n"


class _Picture:
    """Scales and colours of one history."""

    def __init__(self, report: DeviceReport) -> None:
        self.report = report
        history, packing = report.history, report.packing
        arena = 0 if packing is None else packing.peak_nbytes
        highest = max(report.figures.peak_reserved_nbytes, report.figures.peak_live_nbytes, arena, 1)
        self.most = highest + highest // 16  # Room above the highest line.
        self.placed = [block for block in history.blocks if block.nbytes]
        self.names = [self._name(block) for block in self.placed]
        weight: dict[str, int] = defaultdict(int)
        for block, name in zip(self.placed, self.names, strict=True):
            weight[name] += block.nbytes * (block.death - block.birth)
        ranked = sorted(weight, key=lambda name: (-weight[name], name))
        self.colours = dict(zip(ranked, _COLOURS, strict=False))

    def _name(self, block: Block) -> str:
        place = user_place(block.frames)
        if place is None:
            return place_name(block, None)
        return f"{PurePath(place.file.replace(chr(92), '/')).name}:{place.line} {place.function}"

    def x(self, step: float) -> float:
        return _LEFT + step * _FIELD / self.report.history.steps

    def height(self, nbytes: int) -> float:
        return _HEIGHT * nbytes / self.most

    def subtitle(self) -> str:
        figures, packing = self.report.figures, self.report.packing
        parts = [f"peak reserved {size_text(figures.peak_reserved_nbytes)}"]
        parts += [] if packing is None else [f"planned arena {size_text(packing.peak_nbytes)}"]
        parts += [f"peak live {size_text(figures.peak_live_nbytes)}", f"{figures.events:,} events"]
        return " · ".join(parts)

    def field(self, top: int, heading: str) -> list[str]:
        parts = [f'<rect class="field" x="{_LEFT}" y="{top}" width="{_FIELD}" height="{_HEIGHT}"/>']
        for nbytes in ticks(self.most, count=7, binary=True):
            y = top + _HEIGHT - self.height(nbytes)
            parts.append(f'<path class="line" d="M{_LEFT - 5} {y:.1f}H{_LEFT}"/>')
            label = tick_text(nbytes)
            parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        parts.append(f'<text class="quiet" x="{_LEFT}" y="{top - 7}">{heading}</text>')
        return parts

    def curve(self, values: tuple[int, ...], kind: str, top: int) -> list[str]:
        base = top + _HEIGHT
        path = f"M{_LEFT} {base}"
        for last, most in columns(values, 2 * _FIELD):
            path += f"V{base - self.height(most):.1f}H{self.x(last):.1f}"
        return [f'<path class="{kind}" d="{path}V{base}Z"/>']

    def planned_line(self, packing: Colouring, top: int) -> list[str]:
        y = top + _HEIGHT - self.height(packing.peak_nbytes)
        note = f"planned arena {size_text(packing.peak_nbytes)}"
        return [
            f'<path class="planned" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>',
            f'<text x="{_WIDTH - _RIGHT - 6}" y="{top - 7}" text-anchor="end">green: {note}</text>',
        ]

    def failures(self, top: int) -> list[str]:
        parts = []
        for failure in self.report.history.out_of_memory[:100]:
            x = self.x(failure.step)
            hint = f"out of memory: {size_text(failure.nbytes)} asked for at step {failure.step}"
            parts.append(
                f'<path class="failure" d="M{x:.1f} {top}V{top + _HEIGHT}"><title>{hint}</title></path>'
                f'<text x="{x - 4:.1f}" y="{top + 13}" text-anchor="end">out of memory</text>'
            )
        return parts

    def blocks(self, packing: Colouring, top: int) -> list[str]:
        found: list[tuple[float, int, str]] = []
        rows = zip(self.placed, self.names, packing.offsets, strict=True)
        for index, (block, name, offset) in enumerate(rows):
            width = max(self.x(block.death) - self.x(block.birth), 0.4)
            height = max(self.height(block.nbytes), 0.4)
            y = top + _HEIGHT - self.height(offset + block.nbytes)
            seam = ' class="storage"' if width > 4 and height > 4 else ""
            hint = f"{name}\n{size_text(block.nbytes)} at offset {offset:,}\nsteps [{block.birth}, {block.death})"
            part = (
                f'<rect{seam} x="{self.x(block.birth):.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
                f' fill="{self.colours.get(name, _OTHER)}"><title>{xml_text(hint)}</title></rect>'
            )
            found.append((width * height, index, part))
        hidden = len(found) - MOST_RECTANGLES
        if hidden <= 0:
            return [part for _, _, part in found]
        largest = sorted(found, key=lambda entry: (-entry[0], entry[1]))[:MOST_RECTANGLES]
        note = f"{hidden:,} smaller blocks are not drawn"
        more = f'<text class="quiet" x="{_WIDTH - _RIGHT}" y="{top - 7}" text-anchor="end">{note}</text>'
        return [*(part for _, _, part in sorted(largest, key=lambda entry: entry[1])), more]

    def steps(self, top: int) -> list[str]:
        parts = [f'<text class="quiet" x="{_LEFT - 8}" y="{top + 18}" text-anchor="end">event</text>']
        for step in ticks(self.report.history.steps, count=12, binary=False):
            if step < self.report.history.steps:
                mark = f'x="{self.x(step):.1f}" y="{top + 18}" text-anchor="middle"'
                parts.append(f'<text class="quiet" {mark}>{step:,}</text>')
        return parts

    def legend(self, top: int) -> list[str]:
        parts = []
        most = int((_FIELD / 2 - 24) / LETTER)
        for index, (name, colour) in enumerate(self.colours.items()):
            x, y = _LEFT + (index % 2) * _FIELD / 2, top + 18 * (index // 2)
            shown = name if len(name) <= most else name[: most - 1] + "…"
            parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{x + 16:.0f}" y="{y}">{xml_text(shown)}</text>')
        return parts
