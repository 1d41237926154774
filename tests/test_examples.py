"""Every example runs as a script, as a reader would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import planner

#: Where the packages under test were imported from, for the processes started here.
PACKAGES = str(Path(planner.__file__).parents[1])
EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    # From another folder, so that it meets the installed packages and leaves nothing here.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "def main() -> None:" in path.read_text(encoding="utf-8")
