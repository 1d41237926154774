"""Arena size against extra work of GPT-2 under shrinking budgets, by planning alone.

Writes docs/benchmarks/budget.json and the table in docs/training.md::

    python tools/budget_curve.py

Work is counted as `planner.rewrite.costs` does: floating-point operations, plus ten for each byte moved.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from planner import plan, trace
from planner.errors import BudgetError
from planner.plan import Plan
from planner.rewrite.costs import cost, flops

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- budget curve: tools/budget_curve.py -->", "<!-- end of budget curve -->"
SHAPE = {"layers": 12, "hidden": 768, "heads": 12, "length": 512, "batch": 4, "vocabulary": 50257}
POINTS = 8


def main() -> None:
    """Plan without a budget, then at equal steps down to the least reachable."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=SHAPE["layers"],
        n_embd=SHAPE["hidden"],
        n_head=SHAPE["heads"],
        n_positions=SHAPE["length"],
        vocab_size=SHAPE["vocabulary"],
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        tokens = torch.empty(SHAPE["batch"], SHAPE["length"], dtype=torch.int64)
    graph = trace(model, {"input_ids": tokens, "labels": tokens}, loss=lambda output: output.loss, mode="joint")
    once = plan(graph, recompute=False)
    try:
        plan(graph, budget=once.resident_nbytes)
        raise SystemExit("the parameters alone leave room for the whole step")
    except BudgetError as error:
        least = error.least_nbytes
    rows = []
    for point in range(POINTS + 1):
        budget = once.arena_nbytes - (once.arena_nbytes - least) * point // POINTS
        started = time.perf_counter()
        made = plan(graph, budget=budget)
        rows.append(row(made, once, budget, time.perf_counter() - started))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), file=sys.stderr)
    default = plan(graph)
    document = {
        "shape": SHAPE,
        "resident_bytes": once.resident_nbytes,
        "without_budget": row(default, once, None, default.plan_seconds or 0.0),
        "rows": rows,
    }
    (ROOT / "docs/benchmarks/budget.json").write_text(json.dumps(document, indent=1) + "\n")
    refresh(document)


def refresh(document: dict[str, Any]) -> None:
    """Put the table between its marks in docs/training.md."""
    page = ROOT / "docs/training.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(document)}\n{END}{rest.partition(END)[2]}")


def table(document: dict[str, Any]) -> str:
    """The curve as Markdown, and what no budget gives."""
    resident, free = document["resident_bytes"], document["without_budget"]
    intro = (
        f"Parameters and gradients take {mib(resident)} MiB of each arena; without a budget it is "
        f"{mib(free['arena_bytes'])} MiB, for {free['extra_work']:.1%} more work."
    )
    lines = [
        intro,
        "",
        "| arena, MiB | above parameters and gradients | extra work | extra floating-point operations |",
        "|---:|---:|---:|---:|",
    ]
    for item in document["rows"]:
        arena = item["arena_bytes"]
        cells = mib(arena), mib(arena - resident), f"{item['extra_work']:.1%}", f"{item['extra_flops']:.1%}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mib(nbytes: int) -> str:
    """Whole MiB."""
    return f"{nbytes / 2**20:,.0f}"


def row(made: Plan, once: Plan, budget: int | None, seconds: float) -> dict[str, float | int | None]:
    """What one plan holds and costs, beside the plan that computes everything once."""

    def ratio(measure: Callable[..., int]) -> float:
        totals = [sum(measure(o, p.graph.tensors) for o in p.graph.operations) for p in (made, once)]
        return round(totals[0] / totals[1] - 1, 5)

    return {
        "budget_bytes": budget,
        "arena_bytes": made.arena_nbytes,
        "extra_work": ratio(cost),
        "extra_flops": ratio(flops),
        "operations": len(made.graph.operations),
        "plan_seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
