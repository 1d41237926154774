"""Planning and running need no Triton; asking for its kernels without it names the remedy."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
from planner import plan, trace
from runtime import ArenaRuntime
from runtime.errors import ArenaError

x = torch.randn(3, 4)
made = plan(trace(lambda y: (y * 2).softmax(-1), (x,), mode="forward"))
assert torch.equal(ArenaRuntime(made)(x), (x * 2).softmax(-1))
try:
    ArenaRuntime(made, kernels="triton")
except ArenaError as error:
    print(error)
"""


def test_everything_else_works_without_triton():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'arenaplan[triton]'" in done.stdout
