"""Measure ``arenaplan snapshot`` on files of real shape: seconds and the most memory the process took.

``python tools/snapshot_speed.py [MEGABYTES …]`` writes ``docs/benchmarks/snapshot.json``; 10 and 100 MB unless told
otherwise. The files are training steps of 24 layers on the caching allocator of ``tests/caching_allocator.py``, with
stacks of 33 frames for every allocation and one list of frames for each event, as PyTorch writes them.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from caching_allocator import CachingAllocator, Stacks, snapshot_of, train  # noqa: E402

from runtime.bench.environment import environment  # noqa: E402

_STEP_NBYTES = 59_200
"""Of one training step in the file, from a first file of ten steps."""
ROUNDS = 3


def write(path: Path, megabytes: int) -> None:
    """Write a snapshot of at least so many megabytes (10^6 bytes)."""
    allocator = CachingAllocator()
    train(allocator, layers=24, steps=megabytes * 1_000_000 // _STEP_NBYTES + 10, stacks=Stacks(depth=30))
    path.write_bytes(pickle.dumps(snapshot_of(allocator), protocol=4))


def measure(path: Path) -> dict[str, Any]:
    """Run the command in a process of its own; its output, wall and CPU seconds, and peak resident bytes."""
    call = [sys.executable, "-c", "from runtime.cli import main; main()", "snapshot", str(path), "--json"]
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(call, stdout=output, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process,
    ):
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        output.seek(0)
        device = json.loads(output.read())["devices"][0]
    if process.returncode:
        raise SystemExit(f"the command ended with {process.returncode}")
    return {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "pack_seconds": device["plan_seconds"],
        "peak_resident_bytes": used.ru_maxrss * 1024,
        "events": device["events"],
        "blocks": device["blocks"],
        "arena_bytes": device["arena_bytes"],
        "lower_bound_bytes": device["lower_bound_bytes"],
        "findings": len(device["findings"]),
    }


def main() -> None:
    """Measure each size a few times and keep the medians."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in [int(text) for text in sys.argv[1:]] or [10, 100]:
            path = Path(folder) / f"{megabytes}.pickle"
            subprocess.run(
                [sys.executable, "-c", f"import snapshot_speed as s; s.write(s.Path({str(path)!r}), {megabytes})"],
                cwd=ROOT / "tools",
                check=True,
            )
            measure(path)  # the first run compiles the packing's loops
            runs = [measure(path) for _ in range(ROUNDS)]
            spread = {
                key: [run[key] for run in runs]
                for key in ("seconds", "processor_seconds", "pack_seconds", "peak_resident_bytes")
            }
            case = {
                "file_bytes": path.stat().st_size,
                **runs[0],
                **{key: statistics.median(values) for key, values in spread.items()},
                "all": spread,
            }
            print(json.dumps(case))
            cases.append(case)
    report = {"cases": cases, "environment": environment(("numpy", "numba"), rounds=ROUNDS)}
    target = ROOT / "docs" / "benchmarks" / "snapshot.json"
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
