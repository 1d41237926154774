"""The GPU script's smoke mode runs every section, and says that it measured nothing."""

from __future__ import annotations

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
    assert report["replay"]["same_results"] is True
    assert report["replay"]["memory"]["launched"]["allocator_calls"] == 0


def test_a_section_can_be_run_alone(tmp_path):
    target = tmp_path / "gpu.json"
    assert _run("--smoke", "--only", "replay", "--out", str(target)).returncode == 0
    assert "attention" not in json.loads(target.read_text(encoding="utf-8"))


def test_without_a_device_it_says_so(tmp_path):
    if torch.cuda.is_available():
        return
    done = _run("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "--smoke" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
