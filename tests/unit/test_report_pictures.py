"""The offset map as SVG and HTML: well-formed, complete, and safe whatever the names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from plans import PlanBuilder, small_plan, synthetic_plan

from planner.errors import ShapeError
from planner.graph import Role, TensorRef
from planner.plan import Plan
from planner.report import svg
from planner.report.colours import ROLE_COLOURS, text_colour
from planner.report.facts import live_nbytes
from planner.report.html import SCRIPTS, offset_map_html
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


def unpacked(page: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Header and the columns of the first plan, read from the page as its script does."""
    raw = zlib.decompress(base64.b64decode(parse(page).scripts[0]))
    (length,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + length])
    start = -(-(4 + length) // 8) * 8
    columns = {
        name: list(struct.unpack_from(f"<{count}{kind}", raw, start + at))
        for name, (kind, at, count) in header["plans"][0]["columns"].items()
    }
    return header, columns


@pytest.mark.parametrize("make", [small_plan, hostile_plan, lambda: synthetic_plan(300)])
def test_the_page_holds_the_plan(make):
    plan = make()
    header, columns = unpacked(offset_map_html(plan))
    (shown,) = header["plans"]
    assert shown["names"] == [storage.name for storage in plan.graph.storages]
    assert columns["offset"] == [place.offset for place in plan.placements]
    assert columns["size"] == [storage.nbytes for storage in plan.graph.storages]
    assert columns["live"] == list(live_nbytes(plan))
    assert shown["summary"] == json.loads(json.dumps(plan.summary()))
    assert header["open"] == {"step": None, "storage": None}
    assert "difference" not in header


@pytest.mark.parametrize("make", [small_plan, hostile_plan])
def test_the_page_needs_no_network_and_no_name_becomes_markup(make):
    plan = make()
    page = offset_map_html(plan, label=HOSTILE[0], compare=(plan, HOSTILE[1]))
    parsed = parse(page)
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    links = [attributes for _, attributes in parsed.elements if {"src", "href"} & set(attributes)]
    assert links == [{"rel": "icon", "href": "data:,"}]
    assert not re.search(r"https?://|@import|url\(", parsed.scripts[1] + page.split("</style>")[0])
    for unsafe in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert unsafe not in parsed.scripts[1]
    assert not [name for _, attributes in parsed.elements for name in attributes if name == "style" or name[:2] == "on"]


def test_the_policy_allows_this_style_and_this_script_alone():
    page = offset_map_html(small_plan())
    policy = next(dict(a)["content"] for tag, a in parse(page).elements if tag == "meta" and "http-equiv" in a)
    style = page.split("<style>")[1].split("</style>")[0]
    for kind, text in (("style", style), ("script", parse(page).scripts[1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_writers_views_and_modules_are_there():
    plan = small_plan()
    operations = tuple(replace(operation, module=f"net.{operation.name}") for operation in plan.graph.operations)
    header, columns = unpacked(offset_map_html(replace(plan, graph=replace(plan.graph, operations=operations))))
    (shown,) = header["plans"]
    names = shown["names"]
    assert columns["writer"][names.index("masked")] == 1
    assert columns["writer"][names.index("x")] == -1
    assert columns["inPlaceOf"][names.index("masked")] == names.index("scaled")
    tensors = [k for k, storage in enumerate(columns["tensorStorage"]) if storage == names.index("x")]
    assert [shown["tensorNames"][k] for k in tensors] == [None, "x.t"]
    assert [shown["shapes"][columns["tensorShape"][k]] for k in tensors] == ["64, 16", "16, 64"]
    # A storage the caller fills belongs to whoever reads it first.
    modules = [shown["modules"][index] for index in columns["module"]]
    assert modules[names.index("masked")] == "net.mul_1"
    assert modules[names.index("x")] == "net.mm"


def test_parameters_belong_to_their_owner():
    build = PlanBuilder()
    weight = build.storage("layers.0.fc.weight", (4, 4), Role.PARAMETER)
    out = build.storage("out", (4, 4), Role.OUTPUT)
    build.step("relu", "aten.relu.default", (TensorRef(weight),), out)
    header, columns = unpacked(offset_map_html(build.build()))
    assert header["plans"][0]["modules"][columns["module"][0]] == "layers.0.fc"


def test_two_plans_come_with_their_difference():
    one, two = small_plan(), synthetic_plan(100)
    header, _ = unpacked(offset_map_html(one, label="one", compare=(two, "two"), at_step=1, tensor="w.t"))
    assert [plan["label"] for plan in header["plans"]] == ["one", "two"]
    assert header["open"] == {"step": 1, "storage": 2}
    (arena,) = [row for row in header["difference"]["rows"] if row["label"] == "arena"]
    assert (arena["before"], arena["after"], arena["unit"]) == (one.arena_nbytes, two.arena_nbytes, "bytes")


def test_a_tensor_that_is_not_there_is_refused():
    with pytest.raises(ShapeError, match="near: grad_x"):
        offset_map_html(small_plan(), tensor="grad_y")


def test_the_page_of_many_storages_stays_small():
    plan = synthetic_plan(5000)
    assert len(offset_map_html(plan)) < 80_000 + 40 * len(plan.graph.storages)


def test_the_same_plan_gives_the_same_page():
    assert offset_map_html(small_plan()) == offset_map_html(small_plan())


def test_every_file_of_the_viewer_is_in_the_page_and_readable():
    folder = files("planner.report").joinpath("viewer")
    sources = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    assert {name.removesuffix(".js") for name in sources if name.endswith(".js")} == set(SCRIPTS)
    page = offset_map_html(small_plan())
    for name, text in sources.items():
        assert max(map(len, text.splitlines())) <= 120, name
        assert len(text.splitlines()) <= 300, name
        if name != "page.html":
            assert text in page
        if name.endswith(".js"):
            assert "</script" not in text.lower()
            assert "<!--" not in text


@pytest.mark.slow
def test_the_built_package_holds_the_viewer(tmp_path):
    root = Path(__file__).resolve().parents[2]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path / name)
    for package in ("planner", "runtime"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    pytest.importorskip("setuptools", reason="setuptools builds the package")
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        inside = {name for name in wheel.namelist() if name.startswith("planner/report/viewer/")}
    here = {f"planner/report/viewer/{entry.name}" for entry in files("planner.report").joinpath("viewer").iterdir()}
    assert inside == here
