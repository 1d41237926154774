"""Reports of any plan: complete, of one size with what they show, and safe whatever the names."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st
from plans import PlanBuilder

from planner.graph import Role, TensorRef
from planner.plan import Plan
from planner.report.difference import difference, difference_lines, difference_text
from planner.report.facts import live_nbytes
from planner.report.html import offset_map_html
from planner.report.svg import offset_map_svg
from planner.report.terminal import offset_map_colours
from planner.report.text import offset_map, step_text, tensor_text
from planner.report.viewer_data import page_data

#: Anything that can be printed, as names in a plan must.
NAMES = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=40)
ROLES = st.sampled_from([Role.PARAMETER, Role.INPUT, Role.SAVED, Role.BUFFER])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of a few storages, each step reading some and writing one, in place where it may."""
    build = PlanBuilder(alignment=draw(st.sampled_from([1, 64, 256])))
    names = iter(draw(st.lists(NAMES, min_size=24, max_size=24, unique=True)))
    made = [
        build.storage(next(names), (draw(st.integers(0, 500)),), draw(ROLES)) for _ in range(draw(st.integers(1, 6)))
    ]
    last_use: dict[int, int] = {}
    for step in range(draw(st.integers(0, 12))):
        read = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        last_use |= dict.fromkeys(read, step)
        shape = build.tensors[read[0]].shape
        out = build.storage(next(names), shape)
        build.step(f"{step}", draw(NAMES), tuple(TensorRef(k) for k in read), out, source=draw(NAMES))
        made.append(out)
        last_use[out] = step
    return build.build()


@settings(max_examples=60, deadline=None)
@given(plans())
def test_the_columns_of_the_page_are_the_plan(plan):
    header, data = page_data([(plan, "")])
    (shown,) = header["plans"]

    def column(name: str) -> list[float]:
        kind, start, count = shown["columns"][name]
        assert start % 8 == 0
        return list(memoryview(data)[start : start + count * (8 if kind == "d" else 4)].cast(kind))

    graph = plan.graph
    assert shown["names"] == [storage.name for storage in graph.storages]
    assert column("size") == [storage.nbytes for storage in graph.storages]
    assert column("offset") == [place.offset for place in plan.placements]
    assert column("birth") == [place.birth for place in plan.placements]
    assert column("death") == [place.death for place in plan.placements]
    assert column("live") == list(live_nbytes(plan))
    assert [shown["operators"][k] for k in column("operator")] == [o.operator for o in graph.operations]
    assert [shown["sources"][k] for k in column("source")] == [o.source for o in graph.operations]
    starts, reads = column("readStart"), column("readList")
    for step, operation in enumerate(graph.operations):
        assert set(reads[starts[step] : starts[step + 1]]) == {graph.tensors[t].storage for t in operation.reads}
    tensors = zip(column("tensorStorage"), column("tensorDtype"), column("tensorShape"), strict=True)
    for tensor, (storage, dtype, shape) in zip(graph.tensors, tensors, strict=True):
        assert (storage, shown["dtypes"][dtype]) == (tensor.storage, tensor.dtype)
        assert shown["shapes"][shape] == ", ".join(map(str, tensor.shape))


@settings(max_examples=40, deadline=None)
@given(plans(), plans())
def test_two_plans_differ_the_same_way_round_and_back(one, two):
    there, back = difference(one, two), difference(two, one)
    assert [row.change for row in there.rows] == [-row.change for row in back.rows]
    assert (there.only_before, there.only_after) == (back.only_after, back.only_before)
    assert there.both + len(there.only_before) == len(one.graph.storages)
    assert there.both + len(there.only_after) == len(two.graph.storages)
    assert difference(one, one).resized == ()
    text = difference_text(one, two, ("a" * 99, "b"))
    assert max(map(len, text.splitlines()[:9])) <= 100
    assert difference_lines(one, two, ("a", "b"))[0].startswith(f"{there.both:,} storages")


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(76, 160))
def test_every_report_of_any_plan_is_well_formed(plan, width):
    texts = [offset_map(plan, width), step_text(plan, plan.steps - 1, width)]
    texts.append(tensor_text(plan, plan.graph.tensors[0].name, width))
    assert max(len(line) for text in texts for line in text.split("\n")) <= width
    assert offset_map_colours(plan, width).plain == texts[0]
    hints = ET.fromstring(offset_map_svg(plan)).findall(".//{*}rect/{*}title")
    assert len(hints) == sum(storage.nbytes > 0 for storage in plan.graph.storages)
    page = offset_map_html(plan, label=plan.graph.storages[0].name, compare=(plan, plan.graph.storages[-1].name))
    assert len(re.findall(r"</?script", page)) == 4
    assert json.loads(json.dumps(plan.summary()))["storages"] == len(plan.graph.storages)
