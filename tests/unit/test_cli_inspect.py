"""``arenaplan inspect`` and the way every command ends when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from plans import small_plan, synthetic_plan
from typer.testing import CliRunner

from planner.errors import CapacityError, PlanFileError, PlannerError, VerificationError
from planner.plan_file import save_plan
from planner.report.text import offset_map
from runtime.cli.errors import CallError, describe, exit_status, one_line_errors
from runtime.cli.inspect import inspect
from runtime.errors import ArenaError

runner = CliRunner()
app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(small_plan(), path)
    return path


def run(*arguments: object):
    return runner.invoke(app, [str(argument) for argument in arguments])


def one_error(result) -> str:
    """The only line on standard error; nothing stands on standard output."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("arenaplan: error: ")
    return line


def test_the_map_is_what_is_shown(saved):
    result = run(saved)
    assert result.exit_code == 0
    assert result.stdout == offset_map(small_plan())
    assert result.stderr == ""


def test_every_format_is_written(saved, tmp_path):
    names = {"html": "m.html", "svg": "m.svg", "csv": "m.csv", "chrome-trace": "t.json", "snapshot": "s.pickle"}
    options = [part for option, name in names.items() for part in (f"--{option}", tmp_path / name)]
    result = run(saved, *options)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == len(names)
    assert "<title>Offset map: plan.json</title>" in (tmp_path / "m.html").read_text()
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    assert (tmp_path / "m.csv").read_text().startswith("id,lower,upper,size,offset")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["segments"]


def test_json_is_one_object_with_what_was_asked_for(saved, tmp_path):
    result = run(saved, "--json", "--at", 1, "--tensor", "masked", "--csv", tmp_path / "m.csv")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    summary = {key: found[key] for key in small_plan().summary()}
    assert summary == json.loads(json.dumps(small_plan().summary()))
    assert found["at"]["operation"] == "mul_1"
    assert found["at"]["live_bytes"] == 24832
    assert {entry["name"] for entry in found["at"]["alive"] if entry["writes"]} == {"masked"}
    assert found["tensor"]["in_place_chain"] == ["grad_output", "scaled", "masked"]
    assert found["written"] == {"csv": str(tmp_path / "m.csv")}


def test_a_step_and_a_tensor_are_shown_as_text(saved):
    result = run(saved, "--at", 3, "--tensor", "grad_x")
    assert result.exit_code == 0
    assert "step 3 of 0 to 3" in result.stdout
    assert "written by" not in result.stdout
    assert "grad_x (gradient)" in result.stdout


def test_wrong_calls_exit_2_with_one_line(saved, tmp_path):
    for arguments, message in (
        ((tmp_path / "missing.json",), "no such file"),
        ((tmp_path,), "directory"),
        ((saved, "--at", 4), "the plan has the steps 0 to 3"),
        ((saved, "--at", -1), "the plan has the steps 0 to 3"),
        ((saved, "--tensor", "grad_y", "--html", tmp_path / "m.html"), "near: grad_x"),
        ((saved, "--svg", tmp_path / "missing" / "m.svg"), "not written: there is no directory"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in one_error(result)
    assert not (tmp_path / "m.html").exists()


def test_options_that_are_none_exit_2(saved):
    assert run(saved, "--at", "soon").exit_code == 2
    assert run(saved, "--colour").exit_code == 2
    assert run().exit_code == 2


def test_a_tampered_plan_exits_1_and_a_broken_file_2(saved):
    text = saved.read_text()
    saved.write_text(text.replace('"offset":16640', '"offset":12544'))
    result = run(saved)
    assert result.exit_code == 1
    assert "overlap" in one_error(result)
    saved.write_text(text[:500])
    result = run(saved, "--json")
    assert result.exit_code == 2
    assert "not a usable plan" in one_error(result)


def test_debug_shows_where(saved):
    result = run(saved, "--at", 99, "--debug")
    assert isinstance(result.exception, PlannerError)


def test_a_large_plan_is_inspected(tmp_path):
    path = tmp_path / "large.json"
    save_plan(synthetic_plan(2000), path)
    result = run(path, "--html", tmp_path / "m.html")
    assert result.exit_code == 0


# The shared ending of every command


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (VerificationError("overlap", ("a",), "a and b overlap"), 1, "overlap"),
        (CapacityError(10, 20, 3, ("a",), proved=True), 1, "no packing fits"),
        (MemoryError(), 1, "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), 1, "x.json: No space left"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.json"), 2, "x.json: No such file"),
        (PlanFileError("x.json", "empty"), 2, "x.json"),
        (ArenaError("two\nlines"), 2, "two lines"),
        (CallError("give a file"), 2, "give a file"),
        (ArenaError(), 2, "ArenaError"),
    ],
)
def test_an_error_is_one_line_and_a_status(error, status, text, capsys):
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise error
    assert caught.value.exit_code == status == exit_status(error)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"arenaplan: error: {describe(error)}\n"
    assert text in captured.err
    with pytest.raises(type(error)), one_line_errors(debug=True):
        raise error


def test_an_interrupt_exits_130_with_one_line(capsys):
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == "arenaplan: interrupted\n"


@pytest.mark.parametrize(("command", "module"), [("pack", "runtime.cli.pack"), ("run", "runtime.cli.commands")])
def test_an_interrupt_while_modules_load_exits_130_with_one_line(command, module):
    """Between two imports, where some libraries catch it and others then fail to load."""
    program = f"""
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["arenaplan", {command!r}, "nothing"]
from runtime.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "arenaplan: interrupted\n")


def test_what_nobody_expected_is_said_with_the_way_to_see_more(capsys):
    with pytest.raises(ZeroDivisionError), one_line_errors(debug=True):
        raise ZeroDivisionError
    with pytest.raises(typer.Exit) as ended, one_line_errors():
        raise ZeroDivisionError("of a step")
    assert ended.value.exit_code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("arenaplan: error: ZeroDivisionError: of a step; --debug shows where")
    with pytest.raises(BrokenPipeError), one_line_errors():
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


# Two plans


def test_two_plans_are_compared(saved, tmp_path):
    other = tmp_path / "other.json"
    save_plan(synthetic_plan(100), other)
    result = run(saved, "--compare", other)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:9])) <= 100
    assert lines[0].split() == ["plan.json", "other.json", "difference"]
    steps = synthetic_plan(100).steps
    assert lines[7].split() == ["steps", "4", str(steps), f"+{steps - 4}", f"(+{100 * (steps - 4) / 4:.1f}", "%)"]
    assert "0 storages have the same name in both." in result.stdout
    assert "Only in plan.json: 9, the largest grad_output (8.00 KiB)" in result.stdout
    found = json.loads(run(saved, "--compare", other, "--json", "--html", tmp_path / "m.html").stdout)
    assert found["compare"]["figures"]["steps"] == {"before": 4, "after": steps, "change": steps - 4}
    assert found["compare"]["figures"]["arena_bytes"]["before"] == small_plan().arena_nbytes
    assert found["compare"]["storages_in_both"] == 0
    assert found["written"] == {"html": str(tmp_path / "m.html")}
    assert "<title>Offset maps: plan.json and other.json</title>" in (tmp_path / "m.html").read_text()


def test_a_plan_compared_with_itself_differs_in_nothing(saved):
    found = json.loads(run(saved, "--compare", saved, "--json").stdout)["compare"]
    assert {row["change"] for row in found["figures"].values()} == {0}
    assert found["storages_in_both"] == 9
    assert found["only_before"] == found["only_after"] == found["resized"] == []


def test_a_plan_that_is_none_is_not_compared(saved, tmp_path):
    result = run(saved, "--compare", tmp_path / "missing.json", "--html", tmp_path / "m.html")
    assert result.exit_code == 2
    assert "missing.json" in one_error(result)
    assert not (tmp_path / "m.html").exists()


# A terminal


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", [90, 140])
def test_on_a_terminal_the_map_has_its_width_and_colours(saved, columns):
    import fcntl
    import pty
    import struct
    import termios

    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR", "CI"}}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "ignore", "-c", "from runtime.cli import main; main()", "inspect", str(saved)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        read = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # The other end is closed.
                break
            if not part:
                break
            read += part
    os.close(master)
    assert process.returncode == 0
    text = read.decode().replace("\r\n", "\n")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert plain == offset_map(small_plan(), columns)
    assert "\x1b[38;2;20;22;26;48;2;253;158;23m" in text  # Dark on the colour of temporaries.


def test_no_file_is_written_twice_or_over_the_plan(saved, tmp_path):
    before = saved.read_bytes()
    for options in (("--html", saved), ("--html", tmp_path / "a.html", "--svg", tmp_path / "a.html")):
        result = run(saved, *options)
        assert result.exit_code == 2
        assert "a file of its own" in one_error(result)
    assert saved.read_bytes() == before
    assert not (tmp_path / "a.html").exists()
    assert run(saved, "--html", "/dev/null", "--svg", "/dev/null").exit_code == 0
