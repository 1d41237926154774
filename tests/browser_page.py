"""A real browser for tests, and the offset map page as a user has it before them.

Positions on the map are computed here from the plan and from the four corners the page states, not by the page.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.plan import Plan

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = (1300, 800)


@contextmanager
def launched() -> Iterator[Any]:
    """Chromium from the system's packages, driven by Playwright; skips where either is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra `test`)")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: install the system's package `chromium`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True)
class Times:
    """When each storage holds its bytes, in half steps: those handed over in place change hands in mid-step."""

    start: list[int]
    end: list[int]

    @staticmethod
    def of(plan: Plan) -> Times:
        start = [2 * place.birth + (place.in_place_of is not None) for place in plan.placements]
        end = [2 * place.death for place in plan.placements]
        for index, place in enumerate(plan.placements):
            if place.in_place_of is not None:
                end[place.in_place_of] = start[index]
        return Times(start, end)


def wait_until(page: Any, expression: str, seconds: float) -> None:
    """Ask until it is true; Playwright's own wait evaluates text in the page, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {expression}")
        page.wait_for_timeout(20)


class MapPage:
    """An open page; `errors` and `requests` collect what must not happen."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        page.goto(self.url)
        loaded = "document.querySelector('html[data-ready], #maps[data-failed]') !== null"
        try:
            wait_until(page, loaded, 60)
        finally:
            self.check()

    def _heard(self, message: Any) -> None:
        # Reading single pixels is what these tests do, not the page.
        if "willReadFrequently" not in message.text:
            self.errors.append(message.text)

    def check(self) -> None:
        """Nothing on the console, and nothing fetched but the page itself (and its empty icon)."""
        assert self.errors == []
        assert [url for url in self.requests if url != self.url and not url.startswith("data:")] == []

    def plot(self, which: int = 0) -> Any:
        return self.page.locator(".plot").nth(which)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def view(self, which: int = 0) -> dict[str, float]:
        """``t0, t1, o0, o1``: steps and bytes shown; ``left, right, top, bottom``: where, in the plot."""
        self.settle()
        names = ("t0", "t1", "o0", "o1", "left", "right", "top", "bottom")
        data = self.plot(which).evaluate("plot => ({...plot.dataset})")
        return {name: float(data[name]) for name in names}

    def spot(
        self, step: float, offset: float, which: int = 0, view: dict[str, float] | None = None
    ) -> tuple[float, float]:
        """The pixel in the plot where a time and an offset lie; ``view`` if it is known already."""
        v = view or self.view(which)
        x = v["left"] + (step - v["t0"]) / (v["t1"] - v["t0"]) * (v["right"] - v["left"])
        y = v["bottom"] - (offset - v["o0"]) / (v["o1"] - v["o0"]) * (v["bottom"] - v["top"])
        return x, y

    def middle(self, plan: Plan, index: int) -> tuple[float, float]:
        """Time and offset of the middle of a storage's rectangle."""
        times = Times.of(plan)
        place, storage = plan.placements[index], plan.graph.storages[index]
        time = (times.start[index] + times.end[index]) / 4
        # Not on the line between two steps.
        return time + (0.2 if time == int(time) else 0), place.offset + storage.nbytes / 2

    def hover(self, step: float, offset: float, which: int = 0) -> str:
        """Move the pointer there; the text that appears, or nothing."""
        self.page.mouse.move(*self.on_screen(*self.spot(step, offset, which), which))
        tip = self.page.locator("#tip")
        return tip.inner_text() if tip.is_visible() else ""

    def click(self, step: float, offset: float, which: int = 0, **options: Any) -> None:
        self.page.mouse.click(*self.on_screen(*self.spot(step, offset, which), which), **options)
        self.settle()

    def on_screen(self, x: float, y: float, which: int = 0) -> tuple[float, float]:
        """A pixel of the plot as a pixel of the window."""
        box = self.plot(which).bounding_box()
        return box["x"] + x, box["y"] + y

    def facts(self) -> dict[str, str]:
        """The panel of the selected tensor."""
        rows = self.page.locator("#selection dd").evaluate_all(
            "rows => rows.map(row => [row.dataset.fact, row.innerText])"
        )
        return dict(rows)

    def selected(self) -> str:
        return self.page.locator("#selection h2").inner_text()

    def step(self) -> int:
        return int(self.page.locator("#step").input_value())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def pixel(self, x: float, y: float, which: int = 0) -> str:
        """Colour of the map's own drawing there, ``"#rrggbb"``; ``x`` and ``y`` in the plot."""
        return self.pixels([(x, y)], which)[0]

    def pixels(self, spots: list[tuple[float, float]], which: int = 0) -> list[str]:
        """The colours of several pixels."""
        script = """(canvas, spots) => {
            const ratio = canvas.width / canvas.clientWidth;
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const hex = part => part.toString(16).padStart(2, "0");
            return spots.map(([x, y]) => {
                const at = 4 * (Math.floor(y * ratio) * canvas.width + Math.floor(x * ratio));
                return "#" + [...data.slice(at, at + 3)].map(hex).join("");
            });
        }"""
        return list(self.plot(which).locator("canvas.base").evaluate(script, spots))
