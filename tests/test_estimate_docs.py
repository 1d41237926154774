"""The tables of ``docs/estimate.md`` have every model, and what they say is within what the page promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from planner.estimate import eager_step
from planner.trace.eager import eager_memory
from tests.models.zoo import CASES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Cells of the table between the marks of that title."""
    (table,) = re.findall(rf"<!-- {title}: tools/estimate_table\.py -->\n(.*?)<!-- end of {title} -->", PAGE, re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def percent(cell: str) -> float:
    """The error a cell states."""
    return float(cell.replace("−", "-").removesuffix(" %"))


def number(cell: str) -> int:
    return int(cell.split(maxsplit=1)[0].replace(",", ""))


def test_every_model_of_the_suite_is_there_and_within_5_percent() -> None:
    found = rows("traced models")
    assert [row[0] for row in found] == list(CASES)
    for row in found:
        assert abs(percent(row[3])) <= 5
        assert abs(number(row[2]) / number(row[1]) - 1) <= 0.05
        assert number(row[6]) == number(row[7])  # the arena, predicted and allocated


def test_closed_forms_are_within_5_percent() -> None:
    found = rows("closed forms")
    assert len(found) >= 5
    assert all(abs(percent(row[5])) <= 5 for row in found)


@pytest.mark.parametrize("name", ["char-gpt", "mixer"])
def test_the_predictions_are_those_of_today(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    seen = eager_memory(case.module, case.inputs(0), loss=case.loss)
    predicted = max(phase.total_nbytes for phase in eager_step(seen))
    (row,) = [row for row in rows("traced models") if row[0] == name]
    assert number(row[2]) == predicted, "run tools/estimate_table.py"


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(program, "docs/estimate.md", "exec"), namespace)
    assert "weights" in capsys.readouterr().out
    assert int(str(namespace["batch"])) > 0


def test_other_estimators_formulas() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import estimate_table
    finally:
        sys.path.pop(0)
    # The example of DeepSpeed's documentation: 2851 million parameters on eight GPUs are stated as 15.93 GB.
    assert round(estimate_table.deepspeed_nbytes(2_851_000_000, 8) / 2**30, 2) == 15.93
    assert estimate_table.accelerate_nbytes(1000) == 4000
