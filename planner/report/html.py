"""The offset map as one self-contained HTML page: the files in ``viewer/`` put together with the plan's data.

The page loads nothing: its content security policy allows its own style and script, by their hashes, and no network.
Names from a plan stand in the data only, as base64; the viewer shows them as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.resources import files

from planner.plan import Plan
from planner.report.viewer_data import packed, page_data

#: In the order in which they define what the next ones use.
SCRIPTS = ("text", "alive", "data", "colours", "facts", "map", "panel", "search", "controls", "chrome", "main")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def offset_map_html(
    plan: Plan,
    title: str = "",
    *,
    label: str = "",
    compare: tuple[Plan, str] | None = None,
    at_step: int | None = None,
    tensor: str | None = None,
) -> str:
    """The page with this plan; it needs no network and stays quick with tens of thousands of storages.

    Args:
        title: of the page.
        label: of the plan, where another is shown beside it.
        compare: another plan and its label, shown beside this one on common scales.
        at_step: the step at which the page opens; default the peak.
        tensor: the tensor (or storage) that is selected when it opens.

    Raises:
        ShapeError: there is no such tensor.
    """
    title = title or f"Offset map: {plan.graph.mode} plan, {plan.strategy}"
    plans = [(plan, label)] if compare is None else [(plan, label or "this plan"), compare]
    style = _source("style.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_source(f"{name}.js") for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": escape(policy, quote=False),
        "title": escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", title)),
        "style": style,
        "script": script,
        "data": packed(*page_data(plans, at_step=at_step, tensor=tensor)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _source("page.html"))


def _source(name: str) -> str:
    return files("planner.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names the text of an element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
