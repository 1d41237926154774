"""The offset map in the terminal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plans import PlanBuilder, small_plan, synthetic_plan, traced_plan

from planner.graph import Role, TensorRef
from planner.plan import Unplanned
from planner.report.colours import ROLE_COLOURS, text_colour
from planner.report.facts import at_step
from planner.report.terminal import fitting_width, offset_map_colours
from planner.report.text import ROWS, WIDTH, offset_map, step_text, storage_keys, tensor_text


@pytest.mark.parametrize("make", [small_plan, lambda: synthetic_plan(60), lambda: synthetic_plan(5000)])
def test_no_line_is_wider_than_the_terminal(make):
    plan = make()
    texts = [offset_map(plan), step_text(plan, plan.steps // 2)]
    assert max(len(line) for text in texts for line in text.splitlines()) <= WIDTH


@pytest.mark.parametrize("width", [60, 76, 80, 100, 133, 160, 200])
@pytest.mark.parametrize("make", [small_plan, lambda: synthetic_plan(60), lambda: traced_plan("sliced", "joint")])
def test_every_width_is_kept_to(make, width):
    plan = make()
    texts = [offset_map(plan, width), step_text(plan, plan.steps // 2, width)]
    texts += [tensor_text(plan, tensor.name, width) for tensor in plan.graph.tensors[:40]]
    assert max(len(line) for text in texts for line in text.splitlines()) <= width
    picture = [line for line in texts[0].splitlines() if "┤" in line]
    assert max(map(len, picture)) > width // 2 or plan.steps * 8 < width  # Each step has as many columns as the next.


def test_a_colour_terminal_shows_the_same_characters_on_the_colours_of_their_roles():
    plan = traced_plan("materialized")
    shown = offset_map_colours(plan, 120)
    assert shown.plain == offset_map(plan, 120)
    grounds = {str(span.style).split(" on ")[1] for span in shown.spans if " on " in str(span.style)}
    assert grounds == {ROLE_COLOURS[storage.role] for storage in plan.graph.storages}
    # Each letter of the picture, against the storage whose letter it is.
    keys = dict(zip(storage_keys(plan), plan.graph.storages, strict=True))
    offset = 0
    for line in shown.plain.splitlines(keepends=True):
        if "┤" in line:
            for place, letter in enumerate(line.split("┤")[1].rstrip("\n"), offset + line.index("┤") + 1):
                styles = [str(span.style) for span in shown.spans if span.start <= place < span.end]
                assert [style for style in styles if "dim" not in style] == (
                    [f"{text_colour(keys[letter].role)} on {ROLE_COLOURS[keys[letter].role]}"] if letter != "·" else []
                )
        offset += len(line)


def test_widths_of_terminals_are_kept_within_reason():
    assert [fitting_width(columns) for columns in (20, 76, 120, 400)] == [60, 76, 120, 160]


def test_long_names_are_cut():
    build = PlanBuilder()
    build.storage("x" * 500, (64,), Role.INPUT)
    assert max(len(line) for line in offset_map(build.build()).splitlines()) <= WIDTH


def test_the_header_gives_the_figures():
    text = offset_map(small_plan())
    assert re.search(r"arena +24\.25 KiB", text)
    assert re.search(r"lower bound +24\.25 KiB .*equals", text)
    assert "max(S, 3X) is 16.00 KiB" in text
    above = replace(small_plan(), arena_nbytes=32768, proved_optimal=True, unplanned=(Unplanned("aten.sum", 2048),))
    text = offset_map(above)
    assert "7.75 KiB above it, proved least" in text
    assert re.search(r"unplanned +2\.00 KiB .*aten\.sum", text)


@pytest.mark.parametrize("make", [small_plan, lambda: synthetic_plan(40), lambda: traced_plan("materialized")])
def test_each_cell_shows_what_lies_there(make):
    """Compares the picture with a search at the middle of every cell."""
    plan = make()
    lines = offset_map(plan).splitlines()
    rows = [line.split("┤", 1)[1] for line in lines if "┤" in line]
    table = [re.match(r" (\S) +[\d,]+ +[\d,]+  \w+ +\[\d+, \d+\) +(\S+)", line) for line in lines]
    keys = {found[2]: found[1] for found in table if found}
    assert len(rows) == ROWS
    assert len(keys) == len(plan.graph.storages)
    columns = len(rows[0])
    for row, cells in enumerate(reversed(rows)):
        for column, cell in enumerate(cells):
            step, byte = column * plan.steps // columns, (2 * row + 1) * plan.arena_nbytes / (2 * ROWS)
            there = [
                (place.birth, keys[storage.name])
                for storage, place in zip(plan.graph.storages, plan.placements, strict=True)
                if place.birth <= step < place.death and place.offset <= byte < place.offset + storage.nbytes
            ]
            latest = [key for birth, key in there if birth == max(there)[0]]
            assert cell in latest if there else cell == "·"


def test_a_large_plan_shows_roles_and_says_what_is_left_out():
    text = offset_map(synthetic_plan(5000))
    assert "P parameter" in text
    assert re.search(r"… and 4,9\d\d more; these are the largest of \d+ alive at the peak", text)
    assert len(text.splitlines()) < 90


def test_in_place_chains_are_shown():
    text = offset_map(small_plan())
    assert "scaled ← grad_output" in text
    assert "grad_output → scaled" in text


def test_an_empty_plan_is_no_error():
    text = offset_map(PlanBuilder().build())
    assert re.search(r"arena +0 B", text)


def test_a_step_lists_what_is_alive_and_what_is_free():
    text = step_text(small_plan(), 3)
    assert "step 3 of 0 to 3: mm_1 = aten.mm.default at model.py:6" in text
    assert re.search(r"gradient +\[3, 4\) +grad_x  \(written\)", text)
    assert re.search(r"16,640 +8,192  \(free\)", text)
    assert "in 1 gap\n" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_step_of_a_large_plan_is_summed_up(width):
    """What the operation uses, the largest, the gaps; all in few lines, and the sums are those of everything alive."""
    plan = synthetic_plan(5000)
    step = 200
    facts = at_step(plan, step)
    text = step_text(plan, step, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 70 < len(facts.occupants)
    words = " ".join(text.split())
    assert "reads layers.100.weight (768 B), layers.99.out (64.00 KiB)" in words
    assert "writes layers.100.wide (128.00 KiB)" in words
    listed = [line for line in lines if "layers." in line or line.endswith(" input.0")][2:]
    hidden = re.search(r"… ([\d,]+) smaller storages", words)
    assert hidden is not None
    names = {plan.graph.storages[entry.storage].name for entry in facts.occupants}
    shown = {name for line in listed for name in line.split() if name in names}
    assert len(shown) + int(hidden[1].replace(",", "")) == len(facts.occupants)
    assert {"layers.100.weight", "layers.99.out", "layers.100.wide"} <= shown
    parameters = sum(plan.graph.storages[entry.storage].role is Role.PARAMETER for entry in facts.occupants)
    assert re.search(rf"parameter [\d.]+ KiB in {parameters}\b", words)


@pytest.mark.parametrize("width", [60, 80, 99])
def test_names_stay_readable_in_a_narrow_terminal(width):
    """The role goes before the name does."""
    for plan in (synthetic_plan(60), synthetic_plan(5000), traced_plan("materialized")):
        for text in (offset_map(plan, width), step_text(plan, plan.steps // 2, width)):
            heading = next(line for line in text.splitlines() if line.endswith(" name"))
            room = width - heading.index("name")
            assert room >= 18, heading


def test_long_lists_about_a_tensor_are_cut():
    """Many views, a long chain in place, many neighbours that take turns: each says how many more there are."""
    build = PlanBuilder()
    value = build.storage("x", (64,), Role.INPUT)
    for view in range(20):
        build.view(f"x.view_{view}", value, (8, 8), (8, 1))
    base = build.storage("w", (64,), Role.PARAMETER)
    for number in range(30):
        out = build.storage(f"y{number}", (64,))
        build.step(f"add_{number}", "aten.relu.default", (TensorRef(value),), out, over=value)
        value = out
    plan = build.build()
    text = " ".join(tensor_text(plan, "x").split())
    assert "x.view_7, and 12 more" in text
    assert "in place x → y0 → y1 → y2 → … 26 more … → y29" in text
    middle = " ".join(tensor_text(plan, "y14").split())
    assert "x → … 11 more … → y11 → y12 → y13 → y14 → y15 → y16 → y17 → … 11 more … → y29" in middle
    neighbours = tensor_text(plan, plan.graph.tensors[base].name)
    assert "and 25 more at other steps" in neighbours
    assert sum(", steps [" in line for line in neighbours.splitlines()) == 6


def test_a_tensor_tells_its_story():
    text = tensor_text(small_plan(), "x.t")
    assert re.search(r"tensor +x\.t: float32\[16, 64\], strides \[1, 16\]", text)
    assert re.search(r"written +by the caller", text)
    assert re.search(r"read +step 2 mm = aten\.mm\.default at model\.py:6", text)
    assert re.search(r"in place +grad_output → scaled → masked", tensor_text(small_plan(), "masked"))
