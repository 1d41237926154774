"""The offset map page in a browser: what it draws, says on hover and shows on a click, against the plan itself."""

from __future__ import annotations

import pytest
from browser_page import MapPage, Times
from plans import PlanBuilder, small_plan, synthetic_plan, traced_plan

from planner.graph import Role
from planner.plan import Plan
from planner.report.colours import ROLE_COLOURS, role_text
from planner.report.facts import live_nbytes

PLANS = {
    "small": small_plan,
    "backward": lambda: traced_plan("materialized"),
    "sliced": lambda: traced_plan("sliced"),
    "joint": lambda: traced_plan("traced", "joint"),
}

#: Where every storage is asked about, the larger plans take their time.
SOME = ["small", "backward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sliced", "joint"))]


def shown(plan: Plan) -> list[int]:
    return [index for index, storage in enumerate(plan.graph.storages) if storage.nbytes]


def rooms(plan: Plan, page: MapPage, least: float = 6) -> list[int]:
    """Storages whose rectangle is at least some pixels wide and high."""
    v, times = page.view(), Times.of(plan)
    wide = (v["right"] - v["left"]) / (v["t1"] - v["t0"]) / 2
    high = (v["bottom"] - v["top"]) / (v["o1"] - v["o0"])
    return [
        i
        for i in shown(plan)
        if (times.end[i] - times.start[i]) * wide > least and plan.graph.storages[i].nbytes * high > least
    ]


@pytest.mark.parametrize("name", PLANS)
def test_every_storage_is_drawn_in_the_colour_of_its_role(show, name):
    plan = PLANS[name]()
    page = show(plan)
    assert int(page.plot().get_attribute("data-rectangles")) == len(shown(plan))
    assert int(page.plot().get_attribute("data-storages")) == len(plan.graph.storages)
    large = rooms(plan, page, 10)
    assert len(large) > len(shown(plan)) / 3
    v = page.view()
    times, spots = Times.of(plan), []
    for index in large:  # Near the lower right corner, where no label stands.
        x, y = page.spot(times.end[index] / 2, plan.placements[index].offset, view=v)
        spots.append((min(x - 4, v["right"] - 4), y - 4))
    assert page.pixels(spots) == [ROLE_COLOURS[plan.graph.storages[index].role] for index in large]


@pytest.mark.parametrize("name", SOME)
def test_hovering_says_what_a_storage_is(show, name):
    plan = PLANS[name]()
    page = show(plan)
    for index in rooms(plan, page, 4)[:25]:
        storage, place = plan.graph.storages[index], plan.placements[index]
        lines = page.hover(*page.middle(plan, index)).splitlines()
        assert lines[0] == storage.name
        assert lines[1].startswith(role_text(storage.role) + ", ")
        exact = f"{storage.nbytes:,} bytes" if storage.nbytes >= 1024 else f"{storage.nbytes} B"
        assert exact in lines[1]
        tensor = next(tensor for tensor in plan.graph.tensors if tensor.storage == index)
        assert lines[2] == f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        assert any(line.startswith(f"steps [{place.birth:,}, {place.death:,}), ") for line in lines)
        assert f"offset {place.offset:,}" in lines
        writer = first_writer(plan, index)
        if writer is None:
            assert "the caller, before the first step" in lines
        else:
            operation = plan.graph.operations[writer]
            assert f"step {writer:,}: {operation.name} = {operation.operator}" in lines
            if operation.source:
                where = operation.source + (f", in {operation.module}" if operation.module else "")
                assert where in lines
        if place.in_place_of is not None:
            assert f"in place of {plan.graph.storages[place.in_place_of].name}" in lines


def first_writer(plan: Plan, storage: int) -> int | None:
    if plan.placements[storage].birth == 0 and plan.graph.storages[storage].role in {
        Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.SAVED, Role.GRAD_OUTPUT, Role.CONSTANT
    }:  # fmt: skip
        return None
    for step, operation in enumerate(plan.graph.operations):
        if any(plan.graph.tensors[tensor].storage == storage for tensor in operation.writes):
            return step
    return None


def test_free_ground_says_nothing(show):
    plan = small_plan()
    page = show(plan)
    v = page.view()
    assert page.hover(v["t1"] - 0.25, v["o1"] - 100) == ""
    page.click(v["t1"] - 0.25, v["o1"] - 100)
    assert page.selected() == "No tensor selected"
    assert page.step() == plan.steps - 1


def chain_of(plan: Plan, index: int) -> list[int]:
    """The storages that hand the same bytes on: found by walking over all pairs."""
    pairs = [(place.in_place_of, i) for i, place in enumerate(plan.placements) if place.in_place_of is not None]
    chain = [index]
    while before := [one for one, two in pairs if two == chain[0]]:
        chain.insert(0, before[0])
    while after := [two for one, two in pairs if one == chain[-1]]:
        chain.append(after[0])
    return chain


def beside(plan: Plan, index: int, step: int) -> tuple[str, str]:
    """What lies directly above and below when the step begins, or at the nearest moment of the storage's life."""
    times, storages, places = Times.of(plan), plan.graph.storages, plan.placements
    moment = min(max(2 * step, times.start[index]), times.end[index] - 1)
    alive = [i for i in shown(plan) if times.start[i] <= moment < times.end[i]]
    low, high = places[index].offset, places[index].offset + storages[index].nbytes
    over = (
        min((places[i].offset, i) for i in [*alive, -1] if i >= 0 and places[i].offset >= high)
        if any(places[i].offset >= high for i in alive)
        else None
    )
    under = [(places[i].offset + storages[i].nbytes, i) for i in alive if places[i].offset < low]
    above = storages[over[1]].name if over else "the arena's end"
    below = storages[max(under)[1]].name if under else "the arena's start"
    return above, below


@pytest.mark.parametrize("name", SOME)
def test_a_click_shows_everything_about_a_storage(show, name):
    plan = PLANS[name]()
    page = show(plan)
    chained = [i for i in rooms(plan, page) if len(chain_of(plan, i)) > 1]
    others = [i for i in rooms(plan, page) if i not in chained]
    assert others
    if name in {"small", "backward"}:
        assert chained
    for index in chained[:6] + others[:8]:
        storage, place = plan.graph.storages[index], plan.placements[index]
        time, offset = page.middle(plan, index)
        page.click(time, offset)
        assert page.selected() == storage.name
        assert page.step() == int(time)
        facts = page.facts()
        assert facts["role"] == role_text(storage.role)
        assert facts["bytes"].startswith(f"{storage.nbytes:,}")
        assert facts["offset"] == f"{place.offset:,} to {place.offset + storage.nbytes:,}"
        assert facts["lifetime"].startswith(f"steps [{place.birth:,}, {place.death:,}), ")
        chain = chain_of(plan, index)
        names = [plan.graph.storages[i].name for i in chain]
        assert facts["in place"] == ("no" if len(chain) == 1 else " → ".join(names))
        above, below = beside(plan, index, int(time))
        assert f"(step {int(time):,})" in facts["above"]
        assert above in facts["above"]
        assert below in facts["below"]
        assert len(facts["shape"].splitlines()) == min(
            13, sum(tensor.storage == index for tensor in plan.graph.tensors)
        )
        operations = plan.graph.operations
        read = [k for k, o in enumerate(operations) if any(plan.graph.tensors[t].storage == index for t in o.reads)]
        listed = ", ".join(f"{k:,}" for k in read[:8])
        assert (listed in facts["read at"]) if read else facts["read at"] == "no step"


def test_neighbours_and_chains_can_be_followed(show):
    plan = small_plan()
    page = show(plan)
    index = next(i for i, storage in enumerate(plan.graph.storages) if storage.name == "scaled")
    page.click(*page.middle(plan, index))
    page.page.locator("dd[data-fact='in place'] button", has_text="masked").click()
    assert page.selected() == "masked"
    page.page.locator("dd[data-fact=above] button").click()
    assert page.selected() == "x"


@pytest.mark.parametrize("step", [0, 3, 17])
def test_the_largest_tensors_of_a_step_are_listed(show, step):
    plan = traced_plan("traced", "joint")
    page = show(plan)
    v = page.view()
    # The curve lies between the map and the bottom of the plot.
    x, _ = page.spot(step + 0.5, 0)
    height = page.plot().bounding_box()["height"]
    page.plot().click(position={"x": x, "y": (v["bottom"] + height) / 2 + 12})
    page.settle()
    assert page.step() == step
    alive = [i for i in shown(plan) if plan.placements[i].birth <= step < plan.placements[i].death]
    alive.sort(key=lambda i: (-plan.graph.storages[i].nbytes, i))
    listed = page.page.locator("#largest .name").all_inner_texts()
    assert listed == [plan.graph.storages[i].name for i in alive][: len(listed)]
    assert len(listed) >= min(25, len(alive))
    operation = plan.graph.operations[step]
    said = page.page.locator("#step-facts").inner_text()
    assert f"{operation.name} = {operation.operator}" in said
    page.page.locator("#largest button").nth(1).click()
    assert page.selected() == listed[1]


def test_the_curve_shows_live_bytes_their_bound_and_the_peak(show):
    plan = traced_plan("materialized", "joint", 0.0)
    live = live_nbytes(plan)
    peak = live.index(max(live))
    page = show(plan)
    style = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    bound, filled = page.page.evaluate(style, "--bound"), page.page.evaluate(style, "--live")
    assert page.step() == peak  # The page opens there.
    height = page.plot().bounding_box()["height"]
    top = height - min(max(height * 0.17, 44), 110) - 4
    bottom = height - 6

    def y(nbytes: int) -> float:
        return bottom - nbytes / plan.arena_nbytes * (bottom - top)

    x, _ = page.spot(peak + 0.5, 0)
    assert page.pixel(x, y(live[peak])) == bound
    for step in (0, len(live) // 2, len(live) - 1):
        x, _ = page.spot(step + 0.5, 0)
        assert page.pixel(x, y(live[step]) + 6) == filled
        if live[step] < 0.8 * plan.arena_nbytes:
            assert page.pixel(x, y(live[step]) - 3) != filled
    line = round(y(plan.lower_bound_nbytes))
    left, right = int(page.view()["left"]), int(page.view()["right"])
    dashes = page.pixels([(x, line) for x in range(left + 2, right - 2)])
    assert 0.3 < dashes.count(bound) / len(dashes) < 0.8


def test_colours_by_module_and_dtype(show):
    plan = traced_plan("traced", "joint")
    page = show(plan)
    legend = page.page.locator("#legend")
    page.page.locator("#mode").select_option("dtype")
    dtypes = {tensor.dtype for tensor in plan.graph.tensors}
    assert set(legend.locator("button").all_inner_texts()) == dtypes
    page.page.locator("#mode").select_option("module")
    entries = set(legend.locator("button").all_inner_texts())
    modules = {operation.module for operation in plan.graph.operations if operation.module}
    assert modules
    assert modules <= entries
    # One alone: the others become faint, and the legend says so.
    page.page.locator("#mode").select_option("role")
    index = max(
        shown(plan), key=lambda i: plan.graph.storages[i].nbytes * (plan.placements[i].death - plan.placements[i].birth)
    )
    time, offset = page.middle(plan, index)
    before = page.pixel(*page.spot(time, offset))
    other = next(
        text
        for text in legend.locator("button").all_inner_texts()
        if text != role_text(plan.graph.storages[index].role)
    )
    legend.locator("button", has_text=other).first.click()
    page.settle()
    assert page.pixel(*page.spot(time, offset)) != before
    assert legend.locator("[aria-pressed=true]").count() == 1
    page.press("Escape")
    assert page.pixel(*page.spot(time, offset)) == before


def test_the_page_opens_where_it_was_asked_to(show):
    plan = small_plan()
    page = show(plan, at_step=2, tensor="x.t")
    assert page.step() == 2
    assert page.selected() == "x"


def test_an_empty_plan_has_a_page(show):
    page = show(PlanBuilder().build())
    assert page.plot().get_attribute("data-rectangles") == "0"
    page.press("Enter", "p", "+", "0")


@pytest.mark.slow
def test_fifty_thousand_tensors(show):
    plan = synthetic_plan(50_000)
    page = show(plan)
    assert int(page.plot().get_attribute("data-rectangles")) == len(shown(plan)) > 50_000
    assert float(page.page.locator("html").get_attribute("data-load-ms")) < 10_000
    index = max(shown(plan), key=lambda i: (plan.graph.storages[i].nbytes, i))
    page.page.locator("#search").fill(plan.graph.storages[index].name)
    page.press("Enter")  # Selects it and brings it into view.
    assert page.selected() == plan.graph.storages[index].name
    assert page.hover(*page.middle(plan, index)).splitlines()[0] == plan.graph.storages[index].name
    page.press("Escape")
    draws = []
    for _ in range(8):
        page.plot().focus()
        page.press("-")
        draws.append(float(page.plot().locator("canvas.base").get_attribute("data-frame-ms")))
    assert sorted(draws)[len(draws) // 2] < 250, "milliseconds to draw everything"


def under(plan: Plan, moment: float, offset: float) -> str:
    """The name of the storage at a time (in half steps) and an offset, by looking at all of them."""
    times = Times.of(plan)
    found = [
        plan.graph.storages[i].name
        for i in shown(plan)
        if times.start[i] <= moment < times.end[i]
        and plan.placements[i].offset <= offset < plan.placements[i].offset + plan.graph.storages[i].nbytes
    ]
    assert len(found) <= 1
    return found[0] if found else ""


SWEEP = """(plot, spots) => {
    const box = plot.getBoundingClientRect(), tip = document.getElementById("tip");
    return spots.map(([x, y]) => {
        const where = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
        plot.dispatchEvent(new PointerEvent("pointermove", where));
        return tip.hidden ? "" : tip.textContent.split("\\n")[0];
    });
}"""


@pytest.mark.parametrize("zooms", [0, 6])
def test_what_lies_under_any_pixel_is_found(show, zooms):
    plan = synthetic_plan(3000)
    page = show(plan)
    page.plot().focus()
    page.press(*["+"] * zooms)
    v = page.view()
    assert (v["t1"] - v["t0"] < plan.steps) == bool(zooms)
    spots = []
    for k in range(500):
        x = v["left"] + (k * 0.6180339 % 1) * (v["right"] - v["left"])
        y = v["top"] + (k * 0.7548777 % 1) * (v["bottom"] - v["top"])
        spots.append((x, y))
    expected = [
        under(
            plan,
            2 * (v["t0"] + (x - v["left"]) / (v["right"] - v["left"]) * (v["t1"] - v["t0"])) // 1,
            v["o0"] + (v["bottom"] - y) / (v["bottom"] - v["top"]) * (v["o1"] - v["o0"]),
        )
        for x, y in spots
    ]
    found = page.plot().evaluate(SWEEP, spots)
    # A pointer has whole pixels in some browsers' events: where the answer hangs on less, it is not asked.
    wrong = [(spot, one, two) for spot, one, two in zip(spots, expected, found, strict=True) if one != two]
    assert len(wrong) <= 2, wrong
    assert len(set(expected)) > 20
