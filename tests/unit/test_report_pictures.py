"""The offset map as SVG and HTML: well-formed, complete, and safe whatever the names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from plans import PlanBuilder, small_plan, synthetic_plan

from planner.graph import Role
from planner.plan import Plan
from planner.report import svg
from planner.report.colours import ROLE_COLOURS, text_colour
from planner.report.facts import live_nbytes
from planner.report.html import offset_map_html, viewer_data
from planner.report.svg import offset_map_svg

HOSTILE = (
    "</script><b>",
    "<!--",
    "]]>",
    "&amp;",
    "\"'`",
    "__PLAN__",
    "__TITLE__",
    "\u2028\u2029",
    "\0\x1b\ud800",
    "é∇🙂",
)
NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def hostile_plan() -> Plan:
    build = PlanBuilder()
    for name in HOSTILE:
        build.storage(name, (640,), Role.INPUT)
    plan = build.build(strategy="</title><script>alert(1)</script>")
    return replace(plan, graph=replace(plan.graph, inputs=()))


class _Elements(HTMLParser):
    """Counts elements and keeps what stands in each script."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data


def parse(page: str) -> _Elements:
    parser = _Elements()
    parser.feed(page)
    parser.close()
    return parser


# SVG


@pytest.mark.parametrize("make", [small_plan, lambda: synthetic_plan(300)])
def test_every_storage_is_a_rectangle_that_says_what_it_is(make):
    plan = make()
    root = ET.fromstring(offset_map_svg(plan))
    hints = [found.text or "" for found in root.iterfind(".//svg:rect/svg:title", NAMESPACE)]
    assert [hint.splitlines()[0] for hint in hints] == [storage.name for storage in plan.graph.storages]
    first = plan.placements[0]
    assert f"steps [{first.birth}, {first.death})" in hints[0]


def test_rectangles_lie_where_the_plan_says():
    plan = small_plan()
    root = ET.fromstring(offset_map_svg(plan))
    boxes = [rect for rect in root.iterfind(".//svg:rect", NAMESPACE) if rect.find("svg:title", NAMESPACE) is not None]
    field = root.find(".//svg:rect[@class='field']", NAMESPACE)
    assert field is not None
    top, height = float(field.get("y", 0)), float(field.get("height", 0))
    for box, storage, place in zip(boxes, plan.graph.storages, plan.placements, strict=True):
        bottom = float(box.get("y", 0)) + float(box.get("height", 0))
        expected = top + height * (1 - place.offset / plan.arena_nbytes)
        assert abs(bottom - expected) < 0.5
        assert box.get("fill") == ROLE_COLOURS[storage.role]


def test_hostile_names_leave_the_svg_well_formed():
    root = ET.fromstring(offset_map_svg(hostile_plan()))
    hints = [found.text or "" for found in root.iterfind(".//svg:rect/svg:title", NAMESPACE)]
    assert "</script><b>" in [hint.splitlines()[0] for hint in hints]
    assert not root.findall(".//svg:script", NAMESPACE)


def test_a_picture_of_very_many_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(svg, "MOST_RECTANGLES", 50)
    plan = synthetic_plan(300)
    picture = offset_map_svg(plan)
    assert f"{len(plan.graph.storages) - 50} smaller storages are not drawn" in picture
    assert len(ET.fromstring(picture).findall(".//svg:rect/svg:title", NAMESPACE)) == 50


def test_an_empty_plan_has_a_picture():
    assert ET.fromstring(offset_map_svg(PlanBuilder().build())).tag.endswith("svg")


def test_labels_stand_out_on_every_role():
    assert {text_colour(role) for role in ROLE_COLOURS} == {"#14161a", "#ffffff"}
    assert text_colour(Role.PARAMETER) == "#ffffff"
    assert text_colour(Role.TEMPORARY) == "#14161a"


# HTML


@pytest.mark.parametrize("make", [small_plan, hostile_plan, lambda: synthetic_plan(300)])
def test_the_page_holds_the_plan(make):
    plan = make()
    parsed = parse(offset_map_html(plan))
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    data = json.loads(parsed.scripts[0])
    assert data == json.loads(json.dumps(viewer_data(plan)))
    assert data["storages"]["name"] == [storage.name for storage in plan.graph.storages]
    assert data["storages"]["offset"] == [place.offset for place in plan.placements]
    assert data["live"] == list(live_nbytes(plan))
    assert all(len(column) == len(plan.graph.storages) for column in data["storages"].values())
    assert data["summary"]["arena_bytes"] == plan.arena_nbytes


@pytest.mark.parametrize("make", [small_plan, hostile_plan])
def test_the_page_needs_no_network_and_no_name_becomes_markup(make):
    plan = make()
    page = offset_map_html(plan)
    parsed = parse(page)
    assert not [attributes for _, attributes in parsed.elements if {"src", "href"} & set(attributes)]
    assert not re.search(r"https?://|@import|url\(", parsed.scripts[1] + page.split("</style>")[0])
    assert "innerHTML" not in parsed.scripts[1]
    assert [tag for tag, _ in parsed.elements].count("b") == 0


def test_writers_and_views_are_named():
    data = viewer_data(small_plan())
    names = data["storages"]["name"]
    assert data["storages"]["writer"][names.index("masked")] == 1
    assert data["storages"]["writer"][names.index("x")] == -1
    assert data["storages"]["tensors"][names.index("x")] == ["float32[64, 16]", "x.t: float32[16, 64]"]
    assert data["storages"]["inPlaceOf"][names.index("masked")] == names.index("scaled")


def test_the_page_of_many_storages_stays_small():
    plan = synthetic_plan(5000)
    assert len(offset_map_html(plan)) < 200 * len(plan.graph.storages)
