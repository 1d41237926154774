"""Settings that hold before anything is imported."""

from __future__ import annotations

import os

# Triton reads this when a kernel is defined: kernels run in its interpreter, on the CPU. Tests that compile kernels for
# a target do so in a process of their own (`triton_process.run`), with the interpreter off, as do those on a GPU
# (`TRITON_INTERPRET=0 pytest -m gpu`).
os.environ.setdefault("TRITON_INTERPRET", "1")
