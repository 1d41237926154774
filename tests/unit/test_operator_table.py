"""The page of operators is what the facts say."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "operator_table.py"


def test_the_page_is_current() -> None:
    tool = runpy.run_path(str(TOOL))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["render"](), "run `python tools/operator_table.py`"


def test_every_operator_with_facts_has_a_row() -> None:
    tool = runpy.run_path(str(TOOL))
    page = tool["render"]()
    assert all(f"\n| `{name}` |" in page for name in tool["FACTS"])
