"""Measure how packing grows with the problem, and write the rows of ``docs/benchmarks/pack_scaling.json`` anew.

Synthetic training steps and random problems up to 200,000 buffers, 10 seconds each at the most. The seconds of whole
processes, which the file has as well, were measured by hand and are kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from planner.colouring import colour
from runtime.bench.environment import environment
from runtime.bench.pack_problems import random_lifetimes, training_step

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "pack_scaling.json"
BUFFERS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
TIME_LIMIT = 10.0


def row(buffers: int) -> dict[str, Any]:
    """Seconds, and peak over bound, of a problem of each kind."""
    found: dict[str, Any] = {"buffers": buffers}
    for name, make in (("training_step", training_step), ("random", random_lifetimes)):
        problem = make(buffers)
        start = time.perf_counter()
        result = colour(problem, time_limit=TIME_LIMIT)
        found[name] = {
            "seconds": time.perf_counter() - start,
            "peak_bytes": result.peak_nbytes,
            "lower_bound_bytes": result.lower_bound_nbytes,
            "ratio": result.peak_nbytes / result.lower_bound_nbytes,
            "algorithm": result.algorithm,
        }
    return found


def main() -> None:
    """Run everything (about two minutes) and write the file."""
    colour(training_step(2_000), time_limit=1.0)  # loading and compiling are not what is measured
    rows = [row(buffers) for buffers in BUFFERS]
    settings = environment(("numpy", "numba"), time_limit=TIME_LIMIT)
    report = json.loads(PAGE.read_text(encoding="utf-8")) | {"rows": rows, "environment": settings}
    PAGE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
