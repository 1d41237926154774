"""``arenaplan inspect``: look at a saved plan, as text or in the formats of other tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from planner.files import write_whole
from planner.plan import Plan
from planner.plan_file import load_plan
from planner.report.chrome_trace import offset_map_chrome_trace
from planner.report.csv_table import offset_map_csv
from planner.report.difference import difference, difference_text
from planner.report.facts import StepFacts, TensorFacts, about_tensor, at_step
from planner.report.html import offset_map_html
from planner.report.snapshot import snapshot_json, snapshot_pickle
from planner.report.svg import offset_map_svg
from planner.report.terminal import fitting_width, offset_map_colours
from planner.report.text import WIDTH, offset_map, step_text, tensor_text
from runtime.cli.errors import one_line_errors, say
from runtime.cli.options import Debug, Json, require_outputs


def inspect(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan saved by `plan`, `demo` or save().")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an interactive offset map.")] = None,
    compare: Annotated[Path | None, typer.Option(metavar="OTHER.json", help="Show another plan beside it.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a table, as minimalloc reads it.")] = None,
    chrome_trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace (Perfetto).")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a PyTorch memory snapshot: pickled, or JSON by suffix.")
    ] = None,
    at: Annotated[int | None, typer.Option(metavar="STEP", help="Show what is alive at this step.")] = None,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Show everything about this tensor.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a plan's offset map: what lies where in the arena, and when."""
    with one_line_errors(debug):
        require_outputs([html, svg, csv, chrome_trace, snapshot], read=[plan_file, compare])
        plan = load_plan(plan_file)
        other = None if compare is None else load_plan(compare)
        text, facts = _report(plan, at, tensor)  # Before any file is written: the call may be wrong.
        if compare is not None and other is not None:
            labels = _labels(plan_file, compare)
            facts["compare"] = _difference_json(plan, other)
            text = "\n".join(part for part in (text, difference_text(plan, other, labels)) if part)
        written: dict[str, str] = {}
        writers: tuple[tuple[str, Path | None, Callable[[Plan], bytes]], ...] = (
            ("html", html, lambda plan: _page(plan, plan_file, other, compare, at, tensor).encode()),
            ("svg", svg, lambda plan: offset_map_svg(plan).encode()),
            ("csv", csv, lambda plan: offset_map_csv(plan).encode()),
            ("chrome_trace", chrome_trace, lambda plan: offset_map_chrome_trace(plan).encode()),
            ("snapshot", snapshot, snapshot_json if _is_json(snapshot) else snapshot_pickle),
        )
        for kind, path, write in writers:
            if path is not None:
                write_whole(path, write(plan))
                written[kind] = str(path)
                say(f"wrote {path}")
        if as_json:
            print(json.dumps({**plan.summary(), **facts, "written": written}, indent=2))
        elif text or not written:
            _print(text) if text else _print_map(plan)


def _is_json(path: Path | None) -> bool:
    return path is not None and path.suffix.lower() == ".json"


def _page(
    plan: Plan, plan_file: Path, other: Plan | None, other_file: Path | None, at: int | None, tensor: str | None
) -> str:
    """The interactive map, with the other plan beside it where one is given."""
    if other is None or other_file is None:
        return offset_map_html(plan, f"Offset map: {plan_file.name}", at_step=at, tensor=tensor)
    before, after = _labels(plan_file, other_file)
    title = f"Offset maps: {before} and {after}"
    return offset_map_html(plan, title, label=before, compare=(other, after), at_step=at, tensor=tensor)


def _labels(one: Path, two: Path) -> tuple[str, str]:
    """The files' names, with their directories where the names are the same."""
    return (one.name, two.name) if one.name != two.name else (str(one), str(two))


def _report(plan: Plan, at: int | None, tensor: str | None) -> tuple[str, dict[str, Any]]:
    """The text and the JSON fields asked for with ``--at`` and ``--tensor``."""
    texts: list[str] = []
    facts: dict[str, Any] = {}
    if at is not None:
        facts["at"] = _step_json(plan, at_step(plan, at))
        texts.append(step_text(plan, at, _width()))
    if tensor is not None:
        facts["tensor"] = _tensor_json(plan, about_tensor(plan, tensor))
        texts.append(tensor_text(plan, tensor, _width()))
    return "\n".join(texts), facts


def _difference_json(plan: Plan, other: Plan) -> dict[str, Any]:
    found = difference(plan, other)
    return {
        "figures": {
            row.label.replace(" ", "_") + ("_bytes" if row.unit == "bytes" else ""): {
                "before": row.before,
                "after": row.after,
                "change": row.change,
            }
            for row in found.rows
        },
        "storages_in_both": found.both,
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
        "resized": list(found.resized),
    }


def _width() -> int:
    """Columns to write for: the terminal's, or those of a file."""
    return fitting_width(Console().width) if sys.stdout.isatty() else WIDTH


def _print_map(plan: Plan) -> None:
    """The map, in colours on a terminal that has them."""
    screen = Console(highlight=False)
    if sys.stdout.isatty() and screen.color_system is not None and "utf" in (sys.stdout.encoding or "").lower():
        screen.print(offset_map_colours(plan, _width()), end="", crop=False, soft_wrap=True)
    else:
        _print(offset_map(plan, _width()))


def _print(text: str) -> None:
    """To standard output, also where its encoding lacks the map's characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), end="")


def _step_json(plan: Plan, facts: StepFacts) -> dict[str, Any]:
    storages, places = plan.graph.storages, plan.placements
    operation = facts.operation
    return {
        "step": facts.step,
        "operation": None if operation is None else operation.name,
        "operator": None if operation is None else operation.operator,
        "source": None if operation is None else operation.source,
        "live_bytes": facts.live_nbytes,
        "alive": [
            {
                "name": storages[entry.storage].name,
                "offset": entry.offset,
                "bytes": entry.nbytes,
                "role": storages[entry.storage].role.value,
                "birth": places[entry.storage].birth,
                "death": places[entry.storage].death,
                "reads": entry.reads,
                "writes": entry.writes,
            }
            for entry in facts.occupants
        ],
        "free": [{"offset": gap.offset, "bytes": gap.nbytes} for gap in facts.gaps],
    }


def _tensor_json(plan: Plan, facts: TensorFacts) -> dict[str, Any]:
    storages = plan.graph.storages
    return {
        "name": facts.tensor.name,
        "dtype": facts.tensor.dtype,
        "shape": list(facts.tensor.shape),
        "strides": list(facts.tensor.strides),
        "arena_offset": facts.arena_offset,
        "storage": facts.storage.name,
        "storage_offset": facts.placement.offset,
        "bytes": facts.storage.nbytes,
        "role": facts.storage.role.value,
        "birth": facts.placement.birth,
        "death": facts.placement.death,
        "written_at": list(facts.storage_writers),
        "read_at": list(facts.storage_readers),
        "views": list(facts.views),
        "in_place_chain": [storages[index].name for index in facts.chain],
        "above": [storages[index].name for index in facts.above],
        "below": [storages[index].name for index in facts.below],
    }
