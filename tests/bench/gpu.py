"""Measure on a CUDA device, in under eight minutes, and write one JSON file.

``python tests/bench/gpu.py --out gpu.json`` runs the tests marked ``gpu``; the attention backward, materialised and
fused, beside eager, SDPA and Inductor; the fused update beside torch's and the bandwidth of memory; a whole training
step in FP16 with its update in the plan, and whether it waits for the device; counts peak memory and allocator calls;
and replays planned steps as CUDA graphs. Every section is a process with a limit of its own, so that one that fails,
hangs or breaks the device leaves its error, and what it had measured, in the file, and the others run. With
``--smoke`` the same code runs on small tensors on a CPU, to show that it works; its numbers say nothing about a GPU,
and the file says so. Needs torch 2.11 or newer, Triton 3.6 or newer, and the project installed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from gpu_sections import FULL, ROOT, SMOKE, Device, Section, Settings, attention, replay, step, tests, update

from runtime.bench.environment import environment

#: Seconds the whole may take.
LIMIT_SECONDS = 465
#: Sections, and the seconds each may take on a device, its start included.
SECTIONS: dict[str, tuple[Section, int]] = {
    "tests": (tests, 130),
    "attention": (attention, 145),
    "update": (update, 40),
    "step": (step, 110),
    "replay": (replay, 40),
}


def measure(name: str, settings: Settings, out: Path) -> None:
    """One section in this process; what it gives, or its error besides what it kept, goes to the file."""

    def keep(found: Any) -> None:
        kept.update(found=found)
        _write(out, kept)

    kept: dict[str, Any] = {}
    try:
        device = Device(settings)
        kept["device"] = device.name
        keep(SECTIONS[name][0](settings, device, keep))
    except Exception as error:  # noqa: BLE001 - a borrowed device's minutes are not spent twice for one section
        kept |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-4000:]}
        _write(out, kept)


def _write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    part.replace(path)


def isolated(name: str, seconds: float, *, smoke: bool) -> dict[str, Any]:
    """A section in a process of its own, ended with all its children after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "section.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(out)]
        child = subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        error = None
        try:
            said = child.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said = child.communicate()[1]
            error = f"it ran past {seconds:.0f} s"
        if error is None and child.returncode:
            error = f"its process ended with {child.returncode}"
        kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if error is not None:
        kept = {**kept, "error": error, "stderr": said[-4000:]}
    return kept


def everything(settings: Settings, out: Path, only: list[str] | None = None) -> dict[str, Any]:
    """Every section's figures, written after each."""
    started = time.perf_counter()
    smoke = settings.device != "cuda"
    report: dict[str, Any] = {
        "smoke": smoke,
        "environment": environment(
            ("torch", "triton", "numpy"),
            cuda=torch.version.cuda,
            rounds=settings.rounds,
            dtype=settings.dtype,
        ),
    }
    if smoke:
        report["note"] = "A smoke run on a CPU with tiny tensors: it shows that the script works, and measures nothing."
    for name, (_, limit) in SECTIONS.items():
        if only and name not in only:
            continue
        begun = time.perf_counter()
        left = LIMIT_SECONDS - (begun - started)
        if left < 10:
            report[name] = {"skipped": "no time left"}
        else:
            done = isolated(name, min(limit, left), smoke=smoke)
            report["environment"]["device"] = done.pop("device", None) or report["environment"].get("device")
            report[name] = done if "error" in done else done.get("found")
        report["total_seconds"] = time.perf_counter() - started
        _write(out, report)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the file; 1 if any section failed, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny tensors on a CPU")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="this section (repeatable)")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device: use --smoke to try the script on a CPU", file=sys.stderr)
        return 2
    settings = SMOKE if options.smoke else FULL
    if options.section:
        measure(options.section, settings, options.out)
        return 0
    report = everything(settings, options.out, options.only)
    failed = [name for name in SECTIONS if isinstance(report.get(name), dict) and "error" in report[name]]
    if isinstance(report.get("tests"), dict) and report["tests"].get("exit_code"):
        failed.append("tests")
    for name in failed:
        print(f"{name} failed: see {options.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
