"""Rewrite what the documentation shows of real plans: the picture of an offset map and the README's memory table."""

from __future__ import annotations

from pathlib import Path

from planner import Plan, plan, trace
from planner.report.facts import size_text
from planner.report.svg import offset_map_svg
from runtime.attention import build_attention

ROOT = Path(__file__).resolve().parents[1]
#: The shape that ``arenaplan demo`` plans: B, N, L, H.
SHAPE = (4, 8, 256, 256)
BEGIN, END = "<!-- memory table: tools/refresh_docs.py -->", "<!-- end of memory table -->"


def attention_plan(strategy: str, dropout: float) -> Plan:
    """The plan of the demo's backward pass; nothing runs and no memory is used."""
    module, x = build_attention(*SHAPE, dropout=dropout)
    return plan(trace(module, (x,), mode="backward"), strategy=strategy)


def memory_table() -> str:
    """What the backward adds to what it is handed, by formula and in bytes for the demo's shape."""
    rows = ["| scheme | adds, in elements | dropout 0.1 | dropout 0 |", "|---|---|---:|---:|"]
    plans = {(strategy, p): attention_plan(strategy, p) for strategy in ("materialized", "sliced") for p in (0.1, 0.0)}
    drop, none = plans["materialized", 0.1], plans["materialized", 0.0]
    if drop.formula is None or none.formula is None:
        raise SystemExit("the demo's plan has no formula to compare with")

    def row(name: str, formula: str, first: int, second: int) -> None:
        rows.append(f"| {name} | {formula} | {size_text(first)} | {size_text(second)} |")

    row(
        "a buffer per tensor, as traced",
        "—",
        drop.naive_nbytes - drop.resident_nbytes,
        none.naive_nbytes - none.resident_nbytes,
    )
    row("LightSeq2's layer", "3X + max(3X, S)", drop.formula.lightseq2, none.formula.lightseq2)
    row("the target", "max(S, 3X)", drop.formula.target, none.formula.target)
    row("arenaplan, materialized", "at most max(S, 3X)", drop.extra_nbytes, none.extra_nbytes)
    sliced = plans["sliced", 0.1], plans["sliced", 0.0]
    counts = {part.slices for part in sliced}
    k = "k" if len(counts) > 1 else f"k = {counts.pop()}"
    row(f"arenaplan, sliced, {k}", "at most k·L² + 3X", sliced[0].extra_nbytes, sliced[1].extra_nbytes)
    return "\n".join(rows)


def main() -> None:
    picture = ROOT / "docs" / "images" / "attention_backward.svg"
    picture.write_text(offset_map_svg(attention_plan("materialized", 0.0)), encoding="utf-8")
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{memory_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
