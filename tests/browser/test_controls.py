"""Search, keys, zoom, themes, two plans side by side, hostile names: the offset map page as it is used."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_page import MapPage, wait_until
from plans import PlanBuilder, small_plan, synthetic_plan, traced_plan
from typer.testing import CliRunner

from planner.graph import Role
from planner.plan import Plan
from planner.plan_file import save_plan
from planner.report.facts import live_nbytes

# Search


def test_search_finds_and_jumps_between_hits(show):
    plan = synthetic_plan(300)
    page = show(plan)
    page.press("/")
    assert page.page.evaluate("document.activeElement.id") == "search"
    page.page.keyboard.type("LAYERS.1")
    wanted = [i for i, storage in enumerate(plan.graph.storages) if "layers.1" in storage.name]
    wanted.sort(key=lambda i: (plan.placements[i].birth, i))
    assert page.page.locator("#hits").inner_text() == f"{len(wanted)} hits"
    assert page.page.locator("#found button").count() == min(len(wanted), 40)
    page.press("Enter")
    seen = [page.selected()]
    page.plot().focus()
    page.press("n")
    seen.append(page.selected())
    page.press("n")
    seen.append(page.selected())
    assert seen == [plan.graph.storages[i].name for i in wanted[:3]]
    page.press("N")
    assert page.selected() == seen[1]
    assert page.page.locator("#hits").inner_text() == f"2 of {len(wanted)}"
    page.press("Escape")
    assert page.page.locator("#search").input_value() == ""
    assert page.selected() == "No tensor selected"


def test_search_knows_views_and_says_when_there_is_none(show):
    page = show(small_plan())
    page.page.locator("#search").fill("w.t")
    assert page.page.locator("#found span").first.inner_text() == "w"
    page.page.locator("#search").fill("nothing of this name")
    assert page.page.locator("#found").inner_text() == "no match"
    assert page.page.locator("#next").is_disabled()


def test_a_hit_too_small_to_see_is_brought_into_view(show):
    plan = synthetic_plan(2000)
    page = show(plan)
    index = next(i for i, storage in enumerate(plan.graph.storages) if storage.name == "layers.100.norm")
    page.page.locator("#search").fill("layers.100.norm")
    page.press("Enter")
    assert page.selected() == "layers.100.norm"
    assert page.view()["t1"] - page.view()["t0"] < plan.steps
    assert page.hover(*page.middle(plan, index)).splitlines()[0] == "layers.100.norm"


# Keys


def test_the_map_is_reached_and_driven_by_keys_alone(show):
    plan = traced_plan("materialized", "joint", 0.0)
    page = show(plan)
    for _ in range(30):
        page.press("Tab")
        if page.page.evaluate("document.activeElement.matches('.plot')"):
            break
    assert page.page.evaluate("document.activeElement.getAttribute('role')") == "application"
    page.press("Home")
    assert page.step() == 0
    page.press("ArrowRight", "ArrowRight")
    assert page.step() == 2
    assert "step 2" in page.page.locator("#said").inner_text()
    page.press("Shift+ArrowRight")
    assert page.step() == 12
    page.press("End", "ArrowRight")
    assert page.step() == plan.steps - 1
    page.press("p")
    live = live_nbytes(plan)
    assert page.step() == live.index(max(live))
    page.press("Enter")
    alive = [i for i, place in enumerate(plan.placements) if place.birth <= page.step() < place.death]
    largest = min(alive, key=lambda i: (-plan.graph.storages[i].nbytes, i))
    assert page.selected() == plan.graph.storages[largest].name
    page.press("ArrowUp")
    above = page.selected()
    assert above != plan.graph.storages[largest].name
    page.press("ArrowDown")
    assert page.selected() == plan.graph.storages[largest].name
    page.press("f")
    v = page.view()
    assert v["o1"] - v["o0"] < plan.arena_nbytes
    page.press("0")
    v = page.view()
    assert (v["t0"], v["t1"], v["o0"], v["o1"]) == (0, plan.steps, 0, plan.arena_nbytes)


def test_keys_zoom_and_move(show):
    plan = synthetic_plan(300)
    page = show(plan)
    page.plot().focus()

    def spans() -> tuple[float, float]:
        v = page.view()
        return v["t1"] - v["t0"], v["o1"] - v["o0"]

    page.press("x")
    time, offset = spans()
    assert time == pytest.approx(0.75 * plan.steps)
    assert offset == plan.arena_nbytes
    page.press("y")
    assert spans() == pytest.approx((time, 0.75 * offset))
    page.press("X", "Y")
    assert spans() == pytest.approx((plan.steps, plan.arena_nbytes))
    page.press("+", "+")
    before = page.view()
    page.press("d")
    assert page.view()["t0"] > before["t0"]
    assert page.view()["t1"] - page.view()["t0"] == pytest.approx(before["t1"] - before["t0"])
    page.press("a", "a", "a", "a", "a", "a", "a", "a", "s", "s", "s", "s", "s", "s", "s", "s", "s")
    assert page.view()["t0"] == page.view()["o0"] == 0


def test_the_chain_of_a_storage_is_walked_with_brackets(show):
    plan = small_plan()
    page = show(plan)
    page.click(*page.middle(plan, [s.name for s in plan.graph.storages].index("grad_output")))
    page.press("]", "]")
    assert page.selected() == "masked"
    page.press("[")
    assert page.selected() == "scaled"


def test_the_help_lists_the_keys_and_gives_the_focus_back(show):
    page = show(small_plan())
    page.plot().focus()
    page.press("?")
    dialog = page.page.locator("#help")
    assert dialog.is_visible()
    assert {"/", "p", "0", "f", "c", "t", "n, N"} <= set(dialog.locator("dt").all_inner_texts())
    page.press("ArrowRight")  # Keys of the map rest meanwhile.
    page.press("Escape")
    assert not dialog.is_visible()
    assert page.page.evaluate("document.activeElement.matches('.plot')")
    assert page.step() == 0


def test_every_control_has_a_name(show):
    page = show(traced_plan("traced"), compare=(traced_plan("sliced"), "sliced"))
    named = "e => !!(e.getAttribute('aria-label') || e.innerText.trim() || e.closest('label') || e.labels?.length)"
    for control in page.page.locator("button:visible, input:visible, select:visible, [role=application]").all():
        assert control.evaluate(named), control.evaluate("e => e.outerHTML")


# Pointer


def test_the_wheel_zooms_about_the_pointer(show):
    plan = synthetic_plan(300)
    page = show(plan)
    time, offset = plan.steps / 3, plan.arena_nbytes / 3
    spot = page.spot(time, offset)
    page.page.mouse.move(*page.on_screen(*spot))
    for keys, both in (([], (True, False)), (["Shift"], (False, True)), (["Control"], (True, True))):
        before = page.view()
        for key in keys:
            page.page.keyboard.down(key)
        page.page.mouse.wheel(0, -100)
        page.page.wait_for_timeout(50)
        for key in keys:
            page.page.keyboard.up(key)
        after = page.view()
        smaller = (
            after["t1"] - after["t0"] < before["t1"] - before["t0"],
            after["o1"] - after["o0"] < before["o1"] - before["o0"],
        )
        assert smaller == both
        assert page.spot(time, offset) == pytest.approx(spot, abs=4)  # The pointer is at whole pixels.
    page.page.mouse.wheel(0, 5000)
    for _ in range(8):
        page.page.mouse.wheel(0, 200)
    page.press("0")
    assert page.view()["t1"] == plan.steps


def test_dragging_moves_and_with_shift_zooms_to_a_box(show):
    plan = synthetic_plan(300)
    page = show(plan)
    page.plot().focus()
    page.press("+", "+", "+")
    before = page.view()
    page.page.mouse.move(*page.on_screen(400, 200))
    page.page.mouse.down()
    page.page.mouse.move(*page.on_screen(340, 260), steps=4)
    page.page.mouse.up()
    after = page.view()
    moved = (after["t0"] - before["t0"]) / (before["t1"] - before["t0"]) * (before["right"] - before["left"])
    assert moved == pytest.approx(60, abs=1)
    assert page.selected() == "No tensor selected"  # A drag is no click.
    page.press("0")
    v = page.view()
    page.page.keyboard.down("Shift")
    page.page.mouse.move(*page.on_screen(v["left"] + 100, v["top"] + 100))
    page.page.mouse.down()
    page.page.mouse.move(*page.on_screen(v["left"] + 300, v["top"] + 200), steps=4)
    page.page.mouse.up()
    page.page.keyboard.up("Shift")
    after = page.view()
    wide = v["right"] - v["left"]
    assert after["t0"] == pytest.approx(plan.steps * 100 / wide, rel=0.02)
    assert after["t1"] == pytest.approx(plan.steps * 300 / wide, rel=0.02)
    high = v["bottom"] - v["top"]
    assert after["o1"] == pytest.approx(plan.arena_nbytes * (1 - 100 / high), rel=0.02)


def test_a_double_click_fits_and_on_free_ground_shows_everything(show):
    plan = small_plan()
    page = show(plan)
    index = [s.name for s in plan.graph.storages].index("grad_x")
    time, offset = page.middle(plan, index)
    page.page.mouse.dblclick(*page.on_screen(*page.spot(time, offset)))
    v = page.view()
    place = plan.placements[index]
    assert v["o0"] < place.offset < place.offset + 4096 < v["o1"] < plan.arena_nbytes
    page.page.mouse.dblclick(*page.on_screen(*page.spot(3.5, v["o1"] - 1)))
    assert page.view()["o1"] in {v["o1"], plan.arena_nbytes}


def test_two_fingers_zoom(show):
    plan = synthetic_plan(300)
    page = show(plan, touch=True)
    box = page.plot().bounding_box()
    x, y = box["x"] + 450, box["y"] + 250
    touch = page.page.context.new_cdp_session(page.page)

    def send(kind: str, apart: float) -> None:
        points = [] if kind == "touchEnd" else [
            {"x": x - apart, "y": y - apart, "id": 1}, {"x": x + apart, "y": y + apart, "id": 2}
        ]  # fmt: skip
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", 40)
    for apart in (60, 80, 100, 120):
        send("touchMove", apart)
    send("touchEnd", 0)
    v = page.view()
    assert v["t1"] - v["t0"] == pytest.approx(plan.steps / 3, rel=0.1)
    assert v["o1"] - v["o0"] == pytest.approx(plan.arena_nbytes / 3, rel=0.1)


# Light and dark


def contrast(page: MapPage, selector: str) -> float:
    """WCAG contrast of an element's text with the first opaque ground behind it."""
    one, two = page.page.locator(selector).first.evaluate(
        """element => {
            let behind = element;
            const ground = () => getComputedStyle(behind).backgroundColor;
            const clear = () => /^rgba\\(.*, 0\\)$|transparent/.test(ground());
            while (behind.parentElement && clear()) behind = behind.parentElement;
            return [getComputedStyle(element).color, ground()];
        }"""
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(show, scheme):
    plan = small_plan()
    page = show(plan, scheme=scheme, compare=(plan, "again"))
    page.click(*page.middle(plan, 0))
    for selector in (
        "h1",
        "#legend button",
        "#step-facts",
        "#largest button",
        "#selection dt",
        "#selection dd",
        ".link",
        "td",
        "th",
        "summary",
    ):
        assert contrast(page, selector) >= 4.5, selector
    page.press("?")
    assert contrast(page, "#help dd") >= 4.5
    page.press("Escape")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.page.evaluate(ground)
    page.press("t")
    after = page.page.evaluate(ground)
    assert before != after
    page.page.locator("#theme").click()
    assert page.page.evaluate(ground) == before


def test_the_scheme_follows_the_system(show):
    page = show(small_plan(), scheme="light")
    v = page.view()
    free = (v["right"] - 20, v["top"] + 20)
    assert page.pixel(*free) == "#f3f4f6"
    page.page.emulate_media(color_scheme="dark")
    page.settle()
    assert page.pixel(*free) == "#171c24"


# Two plans


def test_two_plans_stand_side_by_side_on_common_scales(show):
    before, after = traced_plan("traced"), traced_plan("sliced")
    page = show(before, label="traced", compare=(after, "sliced"), size=(1400, 850))
    assert page.page.locator(".plot").count() == 2
    for which, plan in enumerate((before, after)):
        assert int(page.plot(which).get_attribute("data-rectangles")) == sum(s.nbytes > 0 for s in plan.graph.storages)
        v = page.view(which)
        assert (v["t1"], v["o1"]) == (max(before.steps, after.steps), max(before.arena_nbytes, after.arena_nbytes))
    rows = {
        row.split("\t")[0]: row.split("\t")[1:] for row in page.page.locator("#differences").inner_text().splitlines()
    }
    change = after.arena_nbytes - before.arena_nbytes
    assert rows["steps"] == [
        str(before.steps),
        str(after.steps),
        f"+{after.steps - before.steps} (+{100 * (after.steps - before.steps) / before.steps:.1f} %)",
    ]
    assert rows["arena"][2].startswith("+" if change > 0 else "−" if change else "none")
    names = {s.name for s in before.graph.storages}, {s.name for s in after.graph.storages}
    said = page.page.locator("#gone").inner_text()
    assert f"{len(names[0] & names[1])} storages have the same name in both" in said
    assert f"Only in sliced: {len(names[1] - names[0])}" in said
    # What is selected in one is selected in the other.
    common = next(i for i, s in enumerate(after.graph.storages) if s.name == "qkv.weight")
    page.click(*page.middle(after, common), which=1)
    assert page.selected() == "qkv.weight"
    other = next(i for i, s in enumerate(before.graph.storages) if s.name == "qkv.weight")
    assert f"at offset {before.placements[other].offset:,}" in page.facts()["other plan"]
    # And zoomed together; o moves between them.
    page.press("+", "+")
    assert page.view(0)["t1"] == page.view(1)["t1"] < max(before.steps, after.steps)
    page.press("o")
    assert page.page.locator("#step-facts .plan").inner_text() == "in traced"
    assert "no storage of this name" in _select_one_without_counterpart(page, before, names)


def _select_one_without_counterpart(page: MapPage, plan: Plan, names: tuple[set[str], set[str]]) -> str:
    name = min(names[0] - names[1])
    page.page.locator("#search").fill(name)
    page.press("Enter")
    assert page.selected() == name
    return page.facts()["other plan"]


@pytest.mark.parametrize("size", [(420, 900), (900, 700), (1700, 1000)])
def test_nothing_runs_over_the_window(show, size):
    page = show(traced_plan("traced"), compare=(traced_plan("sliced"), "sliced" * 40), size=size)
    page.plot().focus()
    page.press("Enter")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    for which in range(2):
        box = page.plot(which).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 150


# The command


def test_the_command_writes_pages_that_open_at_a_step_and_a_tensor(show, tmp_path):
    from runtime.cli import app

    for name, strategy in (("one", "traced"), ("two", "sliced")):
        save_plan(traced_plan(strategy), tmp_path / f"{name}.json")
    runner = CliRunner()
    options = ["--html", str(tmp_path / "m.html"), "--at", "3", "--tensor", "qkv.weight"]
    done = runner.invoke(
        app, ["inspect", str(tmp_path / "one.json"), "--compare", str(tmp_path / "two.json"), *options]
    )
    assert done.exit_code == 0, done.output
    page = show(tmp_path / "m.html")
    assert page.page.title() == "Offset maps: one.json and two.json"
    assert page.step() == 3
    assert page.selected() == "qkv.weight"
    assert page.page.locator("figcaption").all_inner_texts() == ["one.json", "two.json"]


# Hostile names

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!-- {{script}} {{data}}",
    "\"'`${document.title='owned'}",
    "&lt;b&gt;",
    "é∇🙂漢字 \u202e rtl",
    "\u2028\u2029",
    "n" * 20_000,
    "∇" * 3000,
)


def hostile_plan() -> Plan:
    build = PlanBuilder()
    made = [build.storage(name, (6400,), Role.INPUT) for name in HOSTILE]
    from planner.graph import TensorRef

    for place, name in enumerate(HOSTILE):
        out = build.storage(f"{name}.out", (3200,))
        build.step(f"{name}!", name, (TensorRef(made[place]),), out, source=name)
    plan = build.build(strategy="</title><script>document.title='owned'</script>")
    operations = tuple(replace(operation, module=operation.operator) for operation in plan.graph.operations)
    return replace(plan, graph=replace(plan.graph, operations=operations))


@pytest.mark.parametrize("compare", [False, True])
def test_hostile_names_are_text_and_fit_the_window(show, compare):
    plan = hostile_plan()
    options: dict[str, Any] = {"compare": (plan, HOSTILE[0])} if compare else {}
    page = show(plan, title="<b>x</b>" + HOSTILE[0] + "y" * 5000, label=HOSTILE[1], **options)
    title = page.page.title()
    assert title.startswith("<b>x</b></script>")
    counts = "document.querySelectorAll('script').length + ' ' + document.querySelectorAll('img, b script').length"
    assert page.page.evaluate(counts) == "2 0"
    for index, name in enumerate(HOSTILE):
        page.page.locator("#search").fill(name)
        page.press("Enter")
        shown = page.page.locator("#selection h2").text_content()
        assert shown == name.strip() if len(name) <= 400 and name.strip() == name else len(shown) <= 400
        page.press("Escape")
        page.hover(*page.middle(plan, index))
        box = page.page.locator("#tip").bounding_box()
        assert box is None or (box["y"] >= 0 and box["y"] + box["height"] <= 800 and box["x"] + box["width"] <= 1300)
    page.page.locator("#mode").select_option("module")
    page.settle()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 1300
    assert page.page.title() == title


def test_the_page_may_not_reach_the_network(show):
    page = show(small_plan())
    script = "() => fetch('http://127.0.0.1:9/').then(() => 'reached', error => 'refused')"
    assert page.page.evaluate(script) == "refused"
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    assert [url for url in page.requests if url.startswith("http")] == []


def test_a_broken_page_says_so(show, tmp_path, browser):
    from planner.report.html import offset_map_html

    text = offset_map_html(small_plan())
    path = Path(tmp_path / "broken.html")
    path.write_text(re.sub(r'(id="plan">.{40})[^<]+', r"\1", text), encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    page.goto(path.as_uri())
    wait_until(page, "document.getElementById('maps').textContent.includes('cannot be shown')", 10)
    context.close()
