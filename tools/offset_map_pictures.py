"""Pictures of the offset map page for docs/offset-map.md, taken from real plans in a real browser.

    python tools/offset_map_pictures.py

Writes docs/images/offset_map_*.png. Needs the test extra (Playwright, transformers) and Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from planner import Plan, plan, trace
from planner.report.html import offset_map_html

sys.path.insert(0, str(Path(__file__).parent))
from chromium import chromium, open_page  # A tool beside this one.

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (1180, 700)


def gpt2() -> Plan:
    """A training step of GPT-2 with six layers, planned on meta tensors: nothing runs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=768, n_head=12, n_positions=512, vocab_size=50257, use_cache=False, resid_pdrop=0.1
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        tokens = torch.empty(2, 512, dtype=torch.int64)
    graph = trace(model, {"input_ids": tokens, "labels": tokens}, loss=lambda output: output.loss, mode="joint")
    return plan(graph, time_limit=5)


def attention(strategy: str) -> Plan:
    """Forward and backward of the self-attention that ``arenaplan demo`` plans."""
    from runtime.attention import build_attention

    module, x = build_attention(4, 8, 256, 256, dropout=0.1)
    return plan(trace(module, (x,), mode="joint"), strategy=strategy)


def point(page: Any, step: float, offset: float) -> None:
    """Move the pointer to a time and an offset of the first map."""
    data = page.locator(".plot").first.evaluate("plot => ({...plot.dataset})")
    v = {key: float(value) for key, value in data.items()}
    box = page.locator(".plot").first.bounding_box()
    x = v["left"] + (step - v["t0"]) / (v["t1"] - v["t0"]) * (v["right"] - v["left"])
    y = v["bottom"] - (offset - v["o0"]) / (v["o1"] - v["o0"]) * (v["bottom"] - v["top"])
    page.mouse.move(box["x"] + x, box["y"] + y)


def longest_chain(made: Plan) -> int:
    """The largest storage that is overwritten in place, long-lived ones first."""
    taken = {place.in_place_of for place in made.placements if place.in_place_of is not None}
    return max(
        taken,
        key=lambda index: (
            made.graph.storages[index].nbytes * (made.placements[index].death - made.placements[index].birth),
            -index,
        ),
    )


def main() -> None:
    """Plan, write the pages, take the pictures."""
    whole, before, after = gpt2(), attention("traced"), attention("sliced")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "page.html"

        path.write_text(offset_map_html(whole, "Offset map: gpt2.plan.json"), encoding="utf-8")
        page = open_page(browser, path, size=SIZE)
        index = longest_chain(whole)
        place, nbytes = whole.placements[index], whole.graph.storages[index].nbytes
        point(page, place.birth + (place.death - place.birth) * 0.2, place.offset + nbytes / 2)
        page.mouse.down()
        page.mouse.up()
        page.wait_for_timeout(200)
        page.screenshot(path=IMAGES / "offset_map_page.png")

        page = open_page(browser, path, size=SIZE, scheme="dark")
        page.select_option("#mode", "module")
        page.wait_for_timeout(200)
        page.screenshot(path=IMAGES / "offset_map_modules.png")

        labels = {"label": "traced.plan.json", "compare": (after, "sliced.plan.json")}
        path.write_text(offset_map_html(before, "Offset maps: traced and sliced", **labels), encoding="utf-8")
        page = open_page(browser, path, size=SIZE)
        page.locator(".plot").nth(1).focus()  # Its peak is shown.
        page.keyboard.press("p")
        page.wait_for_timeout(200)
        page.screenshot(path=IMAGES / "offset_map_compare.png")


if __name__ == "__main__":
    main()
