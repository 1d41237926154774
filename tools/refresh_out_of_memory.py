"""Write what docs/out-of-memory.md shows anew: the commands' output, the table, the pictures.

Run it from the repository's root after a change to the planner or to the reports; the recorded files stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "out-of-memory.md"
IMAGES = ROOT / "docs" / "images"
EXAMPLE = "examples/03_out_of_memory.py:factory"
MIB = 2**20


def arenaplan(*arguments: str) -> str:
    """What a command prints, trailing blanks left out."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from runtime.cli import main; main()", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def main() -> None:
    """Replace every block, figure and picture."""
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        plan = f"{folder}/step.plan.json"
        places = {"step.plan.json": plan, "whole_step.svg": str(IMAGES / "whole_step.svg")}

        def shown(match: re.Match[str]) -> str:
            words = [places.get(word, word) for word in match[1].split()]
            lines = [line for line in arenaplan(*words).splitlines() if "planned in" not in line]
            return f"```console\n$ arenaplan {match[1]}\n" + "\n".join(lines) + "\n```"

        page = re.sub(r"```console\n\$ arenaplan (.*?)\n.*?\n```", shown, page, flags=re.DOTALL)
        arenaplan("inspect", plan, "--svg", str(IMAGES / "out_of_memory_plan.svg"))
        arena = json.loads(Path(plan).read_text(encoding="utf-8"))["arena_bytes"]
        page = re.sub(r"\| the step planned \| .* \|", f"| the step planned | {arena / MIB:.2f} |", page)
        budget = re.search(r"`--budget (\w+)`", page)
        assert budget is not None
        call = ("plan", EXAMPLE, "--pass", "joint", "--budget", budget[1], "--json")
        less = json.loads(arenaplan(*call))["arena_bytes"]
        page = re.sub(r"this step takes\n[\d.]+ MiB", f"this step takes\n{less / MIB:.2f} MiB", page)
    page = re.sub("<!-- speed -->.*<!-- end of speed -->", speed, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


def speed(_: re.Match[str]) -> str:
    """What `tools/snapshot_speed.py` measured."""
    small, large = json.loads((ROOT / "docs" / "benchmarks" / "snapshot.json").read_text(encoding="utf-8"))["cases"]
    text = (
        f"A file of {large['file_bytes'] / 1e6:.0f} MB with {large['events']:,} events is read and its"
        f" {large['blocks']:,} blocks are packed in {large['processor_seconds']:.0f} processor seconds and at most"
        f" {large['peak_resident_bytes'] / 1e9:.1f} GB of memory; one of {small['file_bytes'] / 1e6:.0f} MB takes"
        f" {small['processor_seconds']:.1f} s and {small['peak_resident_bytes'] / 1e9:.2f} GB"
        " ([JSON](benchmarks/snapshot.json), written by `tools/snapshot_speed.py`)."
    )
    return f"<!-- speed -->\n{textwrap.fill(text, 120)}\n<!-- end of speed -->"


if __name__ == "__main__":
    main()
