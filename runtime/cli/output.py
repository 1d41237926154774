"""What the planning commands print."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from planner.plan import Plan
from runtime.check import Check
from runtime.cli.errors import FAILED, say


def progress(message: str) -> None:
    """A line of progress on standard error."""
    say(message)


def print_json(fields: dict[str, Any]) -> None:
    """One JSON object on standard output; an infinity or NaN becomes a string, as JSON has neither."""
    json.dump(_finite(fields), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def size(nbytes: int | None) -> str:
    """Bytes for people: ``"1.50 MiB"``."""
    if nbytes is None:
        return "not measured"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def console() -> Console:
    """Standard output; no wider than the terminal, and no colour codes in a file."""
    return Console(highlight=False, soft_wrap=False)


def finish(
    title: str,
    plan: Plan,
    check: Check | None,
    *,
    output: Path | None,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """End a planning command: save the plan, print it, and exit 1 if its run differed from eager."""
    if output is not None:
        plan.save(output)
        say(f"wrote {output}")
    if as_json:
        print_json({**plan.summary(), **(check.fields() if check else {}), **(more or {})})
    else:
        print_plan(title, plan, check)
    if check is not None and not check.passed:
        say(f"error: {check.worst} differs from eager by {check.max_rel_error:.3g}, {check.tolerance:.0e} allowed")
        raise typer.Exit(FAILED)


def print_plan(title: str, plan: Plan, check: Check | None) -> None:
    """The memory of a plan, and how its run compared with eager, as a table."""
    fields = plan.summary()
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    strategy = plan.strategy if plan.slices is None else f"{plan.strategy}, {plan.slices} slices in flight"
    table.add_row("strategy", strategy, "")
    table.add_row("arena", size(plan.arena_nbytes), "one allocation")
    table.add_row("lower bound", size(plan.lower_bound_nbytes), _bound_note(plan))
    table.add_row("resident", size(plan.resident_nbytes), "there before the pass starts")
    table.add_row("the pass adds", size(plan.extra_nbytes), "")
    table.add_row("a buffer per tensor adds", size(plan.naive_nbytes - plan.resident_nbytes), "")
    if fields["formula_bytes"] is not None:
        table.add_row("max(S, 3X)", size(fields["formula_bytes"]["target"]), "the formula the pass is held against")
        table.add_row("3X + max(3X, S)", size(fields["formula_bytes"]["lightseq2"]), "LightSeq2's layer")
    if check is not None:
        table.add_row("eager PyTorch adds", size(check.eager_peak_nbytes), "measured, its parameter gradients included")
        error = f"{check.max_rel_error:.3g}" if check.compared else ""
        table.add_row("largest relative error", error, _verdict(check))
        table.add_row("allocator calls per step", str(check.allocator_calls), "")
        table.add_row("seconds per step", f"{check.step_seconds:.4f}", f"eager {check.eager_seconds or 0:.4f}")
    for entry in plan.unplanned:
        table.add_row("outside the arena", size(entry.nbytes), entry.operator)
    table.add_row(
        "tensors, operations",
        f"{fields['tensors']}, {fields['operations']}",
        f"planned in {plan.plan_seconds or 0:.3f} s",
    )
    console().print(table)


def _bound_note(plan: Plan) -> str:
    gap = plan.arena_nbytes - plan.lower_bound_nbytes
    return "the arena equals it" if gap == 0 else f"the arena is {gap} bytes above it"


def _verdict(check: Check) -> str:
    if not check.compared:
        return "not compared: eager's dropout draws other masks on a GPU; without dropout it is"
    return f"{check.worst}; passed" if check.passed else f"{check.worst}; FAILED, {check.tolerance:.0e} allowed"
