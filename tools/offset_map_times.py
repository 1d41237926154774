"""How quick the offset map page is: written, opened, drawn whole, and asked what lies under the pointer.

    python tools/offset_map_times.py

Writes docs/benchmarks/offset_map.json and the table in docs/offset-map.md. Plans are the synthetic training steps of
the tests; drawing is by software, without a GPU. A frame is what the page's own clock says it takes to draw everything,
a hover what it takes to find the storage under the pointer and show its text.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planner.report.html import offset_map_html

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]
from chromium import chromium, open_page  # noqa: E402  # A tool beside this one.
from plans import synthetic_plan  # noqa: E402  # Plans built by hand, for tests.

SIZES = (100, 5_000, 50_000)
WINDOW = (1300, 800)
BEGIN, END = "<!-- offset map times: tools/offset_map_times.py -->", "<!-- end of offset map times -->"
FRAMES = """async () => {
    const next = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const base = document.querySelector(".base"), found = [];
    for (let k = 0; k < 30; k++) {
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "0", bubbles: true }));
        await next();
        found.push(Number(base.dataset.frameMs));
    }
    return found.slice(5);
}"""
HOVERS = """() => {
    const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect(), found = [];
    for (let k = 0; k < 400; k++) {
        const clientX = box.left + 80 + (k * 37) % (box.width - 100);
        const clientY = box.top + 10 + (k * 53) % (box.height - 200);
        const began = performance.now();
        plot.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
        found.push(performance.now() - began);
    }
    return found;
}"""


def spread(milliseconds: list[float]) -> dict[str, float]:
    """Median and the range of the middle nine tenths."""
    ordered = sorted(milliseconds)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return {"median": round(statistics.median(ordered), 3), "low": round(low, 3), "high": round(high, 3)}


def measure(browser: Any, storages: int, folder: Path) -> dict[str, Any]:
    """One size of plan."""
    plan = synthetic_plan(storages)
    began = time.perf_counter()
    text = offset_map_html(plan)
    written = time.perf_counter() - began
    path = folder / f"{storages}.html"
    path.write_text(text, encoding="utf-8")
    loads = []
    for _ in range(5):
        page = open_page(browser, path, size=WINDOW)
        loads.append(float(page.locator("html").get_attribute("data-load-ms")))
    return {
        "storages": len(plan.graph.storages),
        "steps": plan.steps,
        "file_bytes": len(text.encode()),
        "write_seconds": round(written, 3),
        "open_ms": spread(loads),
        "frame_ms": spread(page.evaluate(FRAMES)),
        "hover_ms": spread(page.evaluate(HOVERS)),
    }


def table(cases: list[dict[str, Any]]) -> str:
    """The figures for the documentation; times are medians."""
    rows = [
        "| storages | steps | file | written in | opens in | a frame | a hover |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        opened, frame, hover = (case[name]["median"] for name in ("open_ms", "frame_ms", "hover_ms"))
        rows.append(
            f"| {case['storages']:,} | {case['steps']:,} | {case['file_bytes'] / 1e6:.2f} MB | "
            f"{case['write_seconds']:.2f} s | {opened:.0f} ms | {frame:.1f} ms | {hover:.1f} ms |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure every size and keep the figures."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        cases = [measure(browser, storages, Path(folder)) for storages in SIZES]
        version = browser.version
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    environment = {
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "chromium": version,
        "window": WINDOW,
    }
    result = {"cases": cases, "environment": environment}
    (ROOT / "docs" / "benchmarks" / "offset_map.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = ROOT / "docs" / "offset-map.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(cases)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(table(cases))


if __name__ == "__main__":
    main()
