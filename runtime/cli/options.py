"""Options that several commands share, each with its help said once; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.files import require_writable
from runtime.cli.errors import CallError


class PassName(StrEnum):
    """Which part of the step is planned."""

    BACKWARD = "backward"
    JOINT = "joint"
    FORWARD = "forward"


class StrategyName(StrEnum):
    """How the attention matrix is held."""

    AUTO = "auto"
    MATERIALIZED = "materialized"
    SLICED = "sliced"
    FUSED = "fused"
    TRACED = "traced"

    @property
    def traced(self) -> str:
        """What PyTorch's attention is traced as, for this strategy."""
        return "fused" if self is StrategyName.FUSED else "math"


Pass = Annotated[PassName, typer.Option("--pass", help="What to plan.")]
Strategy = Annotated[StrategyName, typer.Option("--strategy", help="How to hold attention matrices.")]
Budget = Annotated[str | None, typer.Option(help="The arena may not be larger, such as 8GiB.")]
Alignment = Annotated[int, typer.Option(help="Bytes every offset is a multiple of.")]
Run = Annotated[bool, typer.Option("--run", help="Execute it and compare with eager.")]
Steps = Annotated[int, typer.Option(min=2, help="Steps to run.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
PlanOutput = Annotated[Path | None, typer.Option("-o", metavar="PLAN.json", help="Save the plan.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds of each case.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads for every contender.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def require_device(device: str) -> None:
    """Refuse a device that is unknown or not there."""
    import torch

    if device not in ("cpu", "cuda"):
        raise CallError(f"--device {device}: use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise CallError("--device cuda: this machine has no usable CUDA device; use --device cpu")


def require_outputs(written: Iterable[Path | None], read: Iterable[Path | None] = ()) -> None:
    """Refuse, before any work, files that could not be written, or would be written twice or over one that is read.

    Raises:
        CallError: a file is named twice.
        OSError: a file cannot be written.
    """
    sources = {path.resolve() for path in read if path is not None}
    found: set[Path] = set()
    for path in written:
        if path is None:
            continue
        require_writable(path)
        if path.exists() and not path.is_file():
            continue  # a device takes any number
        whole = path.resolve()
        if whole in found or whole in sources:
            raise CallError(f"{path} is named twice, or is a file that is read; write each format to a file of its own")
        found.add(whole)
