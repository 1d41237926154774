"""``arenaplan attention``: plan, and with ``--run`` execute and check, self-attention of a given shape."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.pipeline import plan
from planner.trace import trace
from runtime.attention import build_attention
from runtime.check import check_against_eager
from runtime.cli.errors import CallError, one_line_errors
from runtime.cli.options import (
    Alignment,
    Budget,
    Debug,
    Device,
    Json,
    Pass,
    PassName,
    PlanOutput,
    Run,
    Steps,
    Strategy,
    StrategyName,
    require_device,
    require_outputs,
)
from runtime.cli.output import finish, progress


def attention(
    batch: Annotated[int, typer.Option("-B", "--batch", help="Batch size.")],
    heads: Annotated[int, typer.Option("-N", "--heads", help="Heads; must divide H.")],
    length: Annotated[int, typer.Option("-L", "--length", help="Sequence length.")],
    hidden: Annotated[int, typer.Option("-H", "--hidden", help="Hidden size.")],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float16",
    dropout: Annotated[float, typer.Option(help="Dropout of the attention weights and of the output.")] = 0.1,
    pass_name: Pass = PassName.BACKWARD,
    strategy: Strategy = StrategyName.AUTO,
    slices: Annotated[int | None, typer.Option(help="(batch, head) slices in flight when sliced.")] = None,
    separate: Annotated[bool, typer.Option("--separate", help="Three projections instead of a fused one.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Mask the keys after each query.")] = False,
    budget: Budget = None,
    alignment: Alignment = 256,
    run: Run = False,
    steps: Steps = 5,
    device: Device = "cpu",
    output: PlanOutput = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan self-attention of a shape; planning uses no memory, so any shape can be planned anywhere."""
    with one_line_errors(debug):
        require_device(device)
        require_outputs([output])
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
            device=device,
            slices=slices,
            progress=None if as_json else progress,
        )
        check = None
        if run:
            check = check_against_eager(module, (x,), graph, planned, steps=steps, device=device, fresh_inputs=True)
        shape = {"B": batch, "N": heads, "L": length, "H": hidden, "dtype": dtype, "dropout": dropout}
        title = f"self-attention {pass_name.value}, B={batch} N={heads} L={length} H={hidden} {dtype}"
        finish(title, planned, check, output=output, as_json=as_json, more={"shape": shape})
