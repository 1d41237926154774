"""Rewrite the tables of docs/measurements.md from the files under docs/benchmarks, as the bench commands print them.

arenaplan bench step --json > docs/benchmarks/step.json    (and attention, update)
python tools/measurement_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements.md"
MIB = 1 << 20


def attention(report: dict[str, Any]) -> list[str]:
    """Milliseconds, ratios and bytes of each shape."""
    lines = [
        (
            "| shape | slices | ours | fused | eager | Inductor | SDPA | ours/eager | ours/Inductor "
            "| held in all: ours / fused / eager / Inductor, MiB |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in report["cases"]:
        kind, shape = case["name"].removeprefix("attention ").removeprefix("attention").split("backward ")
        seconds = case["seconds"]
        times = " | ".join(f"{1e3 * seconds[name]:.0f}" for name in ("ours", "fused", "eager", "inductor", "sdpa"))
        held = case["peak_with_saved_bytes"]
        memory = " / ".join(f"{held[name] / MIB:.0f}" for name in ("ours", "fused", "eager", "inductor"))
        ratios = " | ".join(f"{case['ratio'][name]:.2f}" for name in ("eager", "inductor"))
        lines.append(f"| {'core' if kind else 'whole'} {shape} | {case['slices']} | {times} | {ratios} | {memory} |")
    return lines


def step(report: dict[str, Any]) -> list[str]:
    """Milliseconds, bytes and allocator calls of each model."""
    lines = [
        "| model | milliseconds | ratios | peak above the parameters, MiB | ratios | allocator calls |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    names = ("ours", "eager", "inductor")
    for case in report["cases"]:
        times = " / ".join(f"{1e3 * case['seconds'][name]:.0f}" for name in names)
        peaks = " / ".join(f"{case['peak_bytes'][name] / MIB:.0f}" for name in names)
        calls = " / ".join(str(case["allocator_calls"][name]) for name in names)
        ratios, shares = (", ".join(f"{case[key][name]:.2f}" for name in names[1:]) for key in ("ratio", "peak_ratio"))
        lines.append(f"| {case['name'].removesuffix(' step')} | {times} | {ratios} | {peaks} | {shares} | {calls} |")
    return lines


def update(report: dict[str, Any]) -> list[str]:
    """Milliseconds of each precision, and how many times as fast as the others."""
    lines = [
        (
            "| update | bytes per parameter | ours | cast and copy | torch fused | limit | faster than cast and copy "
            "| than torch fused | of the limit |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in report["cases"]:
        seconds, ratio = case["seconds"], case["ratio"]
        times = " | ".join(f"{1e3 * seconds[name]:.0f}" for name in ("ours", "cast_copy", "torch_fused", "limit"))
        faster = " | ".join(f"{1 / ratio[name]:.1f}" for name in ("cast_copy", "torch_fused"))
        lines.append(
            f"| {case['name']} | {case['bytes_per_parameter']:g} | {times} | {faster} | {case['share_of_limit']:.2f} |"
        )
    return lines


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {"attention": attention, "step": step, "update": update}


def render(page: str) -> str:
    """The page with every table made anew."""
    for name, table in TABLES.items():
        report = json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
        begin, end = f"<!-- {name}: tools/measurement_tables.py -->\n", f"<!-- end of {name} -->"
        head, rest = page.split(begin)
        page = head + begin + "\n".join(table(report)) + "\n" + end + rest.split(end)[1]
    return page


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
