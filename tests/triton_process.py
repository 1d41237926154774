"""Run Python in a process where Triton compiles instead of interpreting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import planner

#: Where the packages under test were imported from.
PACKAGES = str(Path(planner.__file__).parents[1])


def run(*arguments: str, cache: Path, timeout: float = 900) -> str:
    """Standard output of ``python *arguments`` with Triton's interpreter off and its cache under ``cache``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join([PACKAGES, str(Path(__file__).parent)]),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return done.stdout
