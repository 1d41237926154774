"""``arenaplan bench pack`` in its smoke mode: what it prints."""

from __future__ import annotations

import json
from pathlib import Path

from packing_oracle import MINIMALLOC
from typer.testing import CliRunner

from runtime.cli.bench import bench_app


def _bench(*arguments: object) -> list[dict[str, dict[str, float]]]:
    """Return the cases of a smoke run."""
    result = CliRunner().invoke(bench_app, ["pack", *map(str, arguments), "--smoke", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert {"commit", "packages", "rounds", "time_limit"} <= report["environment"].keys()
    return list(report["cases"])


def test_a_smoke_run_prints_the_cases_and_the_environment() -> None:
    for case in _bench():
        assert {"name", "seconds", "peak_bytes", "ratio"} <= case.keys()
        assert case["seconds"]["ours"] > 0
        assert case["peak_bytes"].keys() == case["seconds"].keys()


def test_files_are_packed_as_well() -> None:
    (case,) = (case for case in _bench(Path(MINIMALLOC / "input.12.csv")) if case["name"] == "input.12")
    assert case["peak_bytes"]["ours"] == 12
