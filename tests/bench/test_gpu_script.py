"""The GPU script's smoke mode runs every section, and says that it measured nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("gpu.py")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_smoke_run_goes_through_every_section(tmp_path):
    target = tmp_path / "gpu.json"
    done = _run("--smoke", "--out", str(target))
    report = json.loads(target.read_text(encoding="utf-8"))
    assert done.returncode == 0, report
    assert report["smoke"] is True
    assert "measures nothing" in report["note"]
    assert report["tests"] == {"skipped": "no CUDA device"}
    (case,) = report["attention"]
    assert set(case["seconds"]) == {"ours_materialized", "ours_fused", "eager", "sdpa"}
    assert case["memory"]["ours_materialized"]["allocator_calls"] == 0
    assert set(report["update"]["seconds"]) == {"ours", "torch_fused", "limit"}
    assert report["step"]["memory"]["ours"]["allocator_calls"] == 0
    assert set(report["step"]["losses"]) == {"ours", "eager"}
    assert report["step"]["losses"]["ours"][-1] < report["step"]["losses"]["ours"][0]
    assert report["replay"]["same_results"] is True
    assert report["replay"]["memory"]["launched"]["allocator_calls"] == 0


def test_a_section_can_be_run_alone(tmp_path):
    target = tmp_path / "gpu.json"
    assert _run("--smoke", "--only", "replay", "--out", str(target)).returncode == 0
    assert "attention" not in json.loads(target.read_text(encoding="utf-8"))


def test_a_section_that_hangs_or_dies_leaves_its_error(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    gpu = importlib.import_module("gpu")
    assert gpu.isolated("update", 0.1, smoke=True)["error"] == "it ran past 0 s"
    died = gpu.isolated("no such section", 60, smoke=True)
    assert died["error"] == "its process ended with 2"
    assert "no such section" in died["stderr"]


def test_what_a_section_kept_is_written_with_its_error(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    gpu = importlib.import_module("gpu")

    def breaks(_settings, _device, keep):
        keep([1, 2])
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(gpu.SECTIONS, "update", (breaks, 5))
    gpu.measure("update", gpu.SMOKE, tmp_path / "part.json")
    found = json.loads((tmp_path / "part.json").read_text(encoding="utf-8"))
    assert found["found"] == [1, 2]
    assert found["error"] == "RuntimeError: an illegal memory access"


def test_the_limits_leave_the_whole_under_eight_minutes(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    gpu = importlib.import_module("gpu")
    assert sum(limit for _, limit in gpu.SECTIONS.values()) <= gpu.LIMIT_SECONDS < 8 * 60 - 10


def test_without_a_device_it_says_so(tmp_path):
    if torch.cuda.is_available():
        return
    done = _run("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "--smoke" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
