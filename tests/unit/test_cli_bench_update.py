"""``arenaplan bench update`` in its smoke mode: what it prints."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from runtime.bench.update import CHOICES, _sizes
from runtime.cli.bench import bench_app


def test_a_smoke_run_prints_every_contender_of_every_choice():
    result = CliRunner().invoke(bench_app, ["update", "--smoke", "--rounds", "2", "--threads", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [case["name"] for case in report["cases"]] == [choice.name for choice in CHOICES]
    for case in report["cases"]:
        assert case["seconds"].keys() == {"ours", "cast_copy", "torch_fused", "limit"}
        assert all(seconds > 0 for seconds in case["seconds"].values())
        assert case["ratio"]["limit"] == pytest.approx(1 / case["share_of_limit"])
        assert case["peak_bytes"]["ours"] < case["peak_bytes"]["cast_copy"]
    assert report["environment"]["parameters"] == 100_000


def test_sizes_add_up():
    assert sum(_sizes(25_000_000)) == 25_000_000
    assert min(_sizes(100_000)) > 0
