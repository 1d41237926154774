"""``arenaplan attention``: plan, and with ``--run`` execute and check, self-attention of a given shape."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.pipeline import plan
from planner.trace import trace
from runtime.attention import build_attention
from runtime.check import check_against_eager
from runtime.cli.errors import CallError, one_line_errors
from runtime.cli.output import finish, progress


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


def attention(
    batch: Annotated[int, typer.Option("-B", "--batch", help="Batch size.")],
    heads: Annotated[int, typer.Option("-N", "--heads", help="Heads; must divide H.")],
    length: Annotated[int, typer.Option("-L", "--length", help="Sequence length.")],
    hidden: Annotated[int, typer.Option("-H", "--hidden", help="Hidden size.")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float16",
    dropout: Annotated[float, typer.Option(help="Dropout of the attention weights and of the output.")] = 0.1,
    pass_name: Annotated[PassName, typer.Option("--pass", help="What to plan.")] = PassName.BACKWARD,
    strategy: Annotated[StrategyName, typer.Option(help="How to hold the attention matrix.")] = StrategyName.AUTO,
    slices: Annotated[int | None, typer.Option(help="(batch, head) slices in flight when sliced.")] = None,
    separate: Annotated[bool, typer.Option("--separate", help="Three projections instead of a fused one.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Mask the keys after each query.")] = False,
    budget: Annotated[str | None, typer.Option(help="The arena may not be larger, such as 8GiB.")] = None,
    alignment: Annotated[int, typer.Option(help="Bytes every offset is a multiple of.")] = 256,
    run: Annotated[bool, typer.Option("--run", help="Execute it and compare with eager.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps to run.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option("-o", metavar="PLAN.json", help="Save the plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Plan self-attention of a shape; planning uses no memory, so any shape can be planned anywhere."""
    with one_line_errors(debug):
        require_device(device)
        if slices is not None and strategy is not StrategyName.SLICED:
            raise CallError(f"--slices {slices}: it goes with --strategy sliced")
        module, x = build_attention(
            batch,
            heads,
            length,
            hidden,
            dtype=dtype,
            dropout=dropout,
            fused=not separate,
            causal=causal,
            sdpa=strategy is StrategyName.FUSED,
            device=device if run else "meta",
        )
        graph = trace(module, (x,), mode=pass_name.value, attention=strategy.traced)
        planned = plan(
            graph,
            budget=budget,
            alignment=alignment,
            strategy=strategy.value,
            slices=slices,
            progress=None if as_json else progress,
        )
        check = None
        if run:
            check = check_against_eager(module, (x,), graph, planned, steps=steps, device=device, fresh_inputs=True)
        shape = {"B": batch, "N": heads, "L": length, "H": hidden, "dtype": dtype, "dropout": dropout}
        title = f"self-attention {pass_name.value}, B={batch} N={heads} L={length} H={hidden} {dtype}"
        finish(title, planned, check, output=output, as_json=as_json, more={"shape": shape})


def require_device(device: str) -> None:
    """Refuse a device that is unknown or not there."""
    import torch

    if device not in ("cpu", "cuda"):
        raise CallError(f"--device {device}: use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise CallError("--device cuda: this machine has no usable CUDA device; use --device cpu")
