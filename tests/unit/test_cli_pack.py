"""The body of ``arenaplan pack``: what it prints and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from packing_oracle import MINIMALLOC, faults
from typer.testing import CliRunner

from planner.colouring import portfolio
from planner.packing_file import read_problem
from planner.problem import Colouring
from runtime.cli.pack import pack

FIELDS = {
    "peak_bytes",
    "lower_bound_bytes",
    "fits",
    "proved_optimal",
    "seconds",
    "buffers",
    "algorithm",
    "gap_bytes",
}
SMALL = MINIMALLOC / "input.12.csv"


def _run(*arguments: object) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(pack)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_json_is_one_object_and_nothing_else() -> None:
    status, out, err = _run(SMALL, "--json")
    fields = json.loads(out)
    assert (status, err) == (0, "")
    assert fields.keys() >= FIELDS
    assert (fields["peak_bytes"], fields["lower_bound_bytes"], fields["gap_bytes"], fields["buffers"]) == (12, 12, 0, 5)
    assert fields["fits"] is fields["proved_optimal"] is True


def test_text_says_the_peak_and_how_it_was_found() -> None:
    status, out, _ = _run(SMALL, "--capacity", 12)
    assert status == 0
    assert "12 bytes (proved least)" in out
    assert "fits" in out


def test_the_packing_is_written(tmp_path: Path) -> None:
    assert _run(SMALL, "-o", tmp_path / "out.csv")[0] == 0
    problem = read_problem(tmp_path / "out.csv", keep_offsets=False)
    offsets = tuple(item.offset or 0 for item in read_problem(tmp_path / "out.csv").lifetimes)
    assert faults(problem, Colouring(offsets, 12, 12, "", proved_optimal=True)) == []


def test_what_does_not_fit_ends_with_status_1_and_the_bottleneck() -> None:
    status, out, err = _run(SMALL, "--capacity", 11, "--json")
    assert status == 1
    assert json.loads(out)["fits"] is False
    assert err.count("\n") == 1
    assert "1 bytes too few" in err
    assert "step 0: b1, b3, b5" in err
    assert _run(SMALL, "--capacity", 11)[1] == ""


@pytest.mark.parametrize("arguments", [("--capacity", -1), ("--time-limit", -1), ("--time-limit", "nan")])
def test_a_wrong_call_ends_with_status_2(arguments: tuple[object, ...]) -> None:
    status, out, err = _run(SMALL, *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err


def test_a_bad_file_ends_with_status_2_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "problem.csv"
    path.write_text("id,lower,upper,size\na,0,1,4\nb,0,0,4\n")
    status, out, err = _run(path, "--json")
    assert (status, out) == (2, "")
    assert "line 3" in err
    assert err.count("\n") == 1
    assert _run(tmp_path / "missing.csv")[0] == 2


def test_an_interruption_prints_the_best_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio, "_portfolio", interrupt)
    status, out, err = _run(SMALL, "--json")
    assert status == 1
    assert json.loads(out)["interrupted"] is True
    assert "interrupted" in err
