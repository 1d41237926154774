"""One browser for these tests, a page of its own for each; every page is checked for errors and requests at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import WIDE, MapPage, launched

from planner.plan import Plan
from planner.report.html import offset_map_html


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., MapPage]]:
    """``show(plan, scheme="dark", size=(420, 800), touch=True, **options of offset_map_html)``, or a file's path."""
    opened: list[tuple[Any, MapPage]] = []

    def open_page(
        plan: Plan | Path,
        *,
        scheme: str = "light",
        size: tuple[int, int] = WIDE,
        touch: bool = False,
        **options: Any,
    ) -> MapPage:
        path = plan if isinstance(plan, Path) else tmp_path / f"map{len(opened)}.html"
        if isinstance(plan, Plan):
            path.write_text(offset_map_html(plan, **options), encoding="utf-8")
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=touch)
        context.set_default_timeout(120_000)  # A busy machine is no failure of the page.
        opened.append((context, MapPage(context.new_page(), path)))
        return opened[-1][1]

    yield open_page
    for context, page in opened:
        page.check()
        context.close()
