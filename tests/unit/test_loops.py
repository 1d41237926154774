"""Compiled loops and the files they are kept in: cut files, a full disk and no folder cost time, not the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

PROGRAM = """
import resource, sys
import torch
from runtime.kernels import pointwise, bernoulli
if "small" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from runtime.kernels.pointwise_source import NUMBER, TENSOR, Signature, compiled
address = compiled(Signature((("mul", (0, 1)),), (TENSOR, NUMBER), None))
assert address, "not compiled"
torch.manual_seed(0)
assert bernoulli.engine() is not None
"""


def run(folder: Path, *arguments: str) -> None:
    """The program with caches of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_cut_files_and_a_full_disk_cost_time_only(tmp_path: Path) -> None:
    run(tmp_path)
    kept = [path for path in tmp_path.rglob("*.nb*") if path.is_file()]
    assert len(kept) >= 4
    for path in kept:
        path.write_bytes(b"")
    run(tmp_path)
    for path in kept:
        path.write_bytes(path.read_bytes()[:20] + b"\\x00" * 20)
    run(tmp_path)
    run(tmp_path / "new", "small")


def test_no_folder_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import FunctionCache

    from planner.loops import compiled_loop

    def refused(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(FunctionCache, "__init__", refused)
    assert compiled_loop()(lambda x: x + 1)(2) == 3
