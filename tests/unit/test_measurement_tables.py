"""The page of measurements shows what the files of the benchmarks say."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "measurement_tables.py"


def test_the_page_is_current() -> None:
    tool = runpy.run_path(str(TOOL))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["render"](page), "run `python tools/measurement_tables.py`"
