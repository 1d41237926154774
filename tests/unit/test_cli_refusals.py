"""Every command, called wrongly or cut short: one line that names cause and remedy, its status, and no file left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import planner
from planner.plan import Plan
from planner.problem import Lifetime, Problem
from planner.snapshot import write_problem
from runtime import cli

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = str(ROOT / "examples" / "whole_step.pickle")
ATTENTION = ("attention", "-B", "2", "-N", "2", "-L", "16", "-H", "8")
MODEL = """
import torch

def factory():
    print("the factory runs")
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh()), (torch.randn(4, 6),)

def boom():
    raise ValueError("no data")
"""


@pytest.fixture
def call(monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Call the command as its entry point does: exit status, standard output and standard error."""

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["arenaplan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capfd.readouterr())

    return called


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A directory, and the present one, with a model, a problem and a plan in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    write_problem(tmp_path / "problem.csv", Problem((Lifetime("a", 4, 0, 2), Lifetime("b", 4, 1, 3))))
    return tmp_path


@pytest.fixture
def plan_file(files, call) -> Path:
    assert call(*ATTENTION, "--dtype", "float32", "-o", files / "plan.json")[0] == 0
    return files / "plan.json"


def names(place: str = ".") -> list[str]:
    """Files in a directory."""
    return sorted(entry.name for entry in Path(place).iterdir() if entry.name != "__pycache__")


def error_line(err: str) -> str:
    (line,) = [line for line in err.splitlines() if line.startswith("arenaplan: error: ")]
    assert "Traceback" not in err
    return line


OUTPUTS = [
    (*ATTENTION, "-o"),
    ("plan", "model.py:factory", "-o"),
    ("pack", "problem.csv", "-o"),
    ("snapshot", SNAPSHOT, "--csv"),
    ("snapshot", SNAPSHOT, "--svg"),
    *(("inspect", "plan.json", option) for option in ("--html", "--svg", "--csv", "--chrome-trace", "--snapshot")),
]


@pytest.mark.parametrize("arguments", OUTPUTS, ids=lambda arguments: " ".join((arguments[0], arguments[-1])))
def test_an_output_that_cannot_be_written_is_refused_before_any_work(plan_file, call, arguments):
    before = names()
    (plan_file.parent / "taken").mkdir()
    for place, reason in (
        ("absent/out", "there is no directory"),
        ("taken", "it is a directory"),
        ("model.py/out", "is no directory"),
    ):
        status, out, err = call(*arguments, place)
        assert (status, out) == (2, "")
        assert error_line(err) == err.rstrip()  # no progress before it, and nothing printed by the factory
        assert f"{place}: not written: " in err
        assert reason in err
    assert names() == sorted([*before, "taken"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", OUTPUTS, ids=lambda arguments: " ".join((arguments[0], arguments[-1])))
def test_a_full_disk_is_status_1_and_names_the_file(plan_file, call, arguments):
    status, _, err = call(*arguments, "/dev/full")
    assert status == 1
    assert error_line(err) == "arenaplan: error: /dev/full: not written: No space left on device"


def test_a_place_where_nobody_may_write_is_refused(files, call, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != files)
    status, _, err = call("pack", "problem.csv", "-o", "out.csv")
    assert status == 2
    assert f"out.csv: not written: writing to {files} is not allowed; choose another place" in error_line(err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments", [("pack", "problem.csv"), ("inspect", "plan.json", "--json"), ("run", "plan.json")]
)
def test_a_full_standard_output_is_status_1_in_one_line(plan_file, arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from runtime.cli import main; main()", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(planner.__file__).parents[1])},
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "arenaplan: error: standard output, or a temporary file: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(plan_file, closed):
    command = f'"{sys.executable}" -c "from runtime.cli import main; main()" inspect plan.json {closed}'
    environment = {**os.environ, "PYTHONPATH": str(Path(planner.__file__).parents[1])}
    done = subprocess.run(
        command,
        shell=True,
        check=False,
        env=environment,
        cwd=plan_file.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == (">&-" in closed.split())


def test_no_memory_for_data_is_status_1_and_one_line(files, call):
    """1 PiB of inputs, more than any machine maps."""
    status, out, err = call("attention", "-B", 2**20, "-N", 1, "-L", 2**20, "-H", 256, "--run")
    assert (status, out) == (1, "")
    assert err.startswith("arenaplan: error: not enough memory: ")
    assert "plan without --run" in err
    assert err.count("\n") == 1


def test_an_error_nobody_expected_is_one_line_and_a_traceback_with_debug(plan_file, call, monkeypatch):
    def broken(*_arguments: object, **_keywords: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("runtime.cli.run_plan.generated", broken)
    status, out, err = call("run", plan_file)
    assert (status, out) == (1, "")
    assert err == (
        "arenaplan: error: KeyError: 'lost'; --debug shows where; unless that is your own code, please report it\n"
    )
    monkeypatch.setattr(sys, "argv", ["arenaplan", "run", str(plan_file), "--debug"])
    with pytest.raises(KeyError):
        cli.main()


def test_a_packing_replaces_a_file_whole_or_not_at_all(files, call, monkeypatch):
    (files / "out.csv").write_text("as it was")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, err = call("pack", "problem.csv", "-o", "out.csv")
    assert (status, error_line(err)) == (1, "arenaplan: error: out.csv: not written: No space left on device")
    assert (files / "out.csv").read_text() == "as it was"
    assert names() == ["model.py", "out.csv", "problem.csv"]


def test_no_file_is_written_twice_or_over_the_one_that_is_read(files, call):
    Path("taken.pickle").write_bytes(Path(SNAPSHOT).read_bytes())
    for options in (("--csv", "x", "--svg", "x"), ("--csv", "taken.pickle")):
        status, out, err = call("snapshot", "taken.pickle", *options)
        assert (status, out) == (2, "")
        assert "is named twice, or is a file that is read" in error_line(err)


def test_demo_wants_a_directory(files, call):
    status, out, err = call("demo", "--out", "model.py")
    assert (status, out, error_line(err)) == (2, "", err.rstrip())
    assert "--out model.py: it is a file; name a directory" in err


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_a_plan_that_fails_verification_is_named_with_the_remedy(plan_file, call, command):
    plan = Plan.load(plan_file)
    text = plan_file.read_text().replace(f'"lower_bound_bytes":{plan.lower_bound_nbytes}', '"lower_bound_bytes":1')
    text = text.replace(f'"lower_bound_bytes": {plan.lower_bound_nbytes}', '"lower_bound_bytes": 1')
    Path("edited.json").write_text(text)
    status, out, err = call(command, "edited.json")
    assert (status, out) == (1, "")
    line = error_line(err)
    assert line.startswith("arenaplan: error: edited.json: the plan fails verification (bound): ")
    assert line.endswith("save the plan again from its graph")


def test_pins_that_collide_are_named_with_their_file(files, call):
    Path("pins.csv").write_text("id,lower,upper,size,offset\nfree,0,9,4,\nweights,0,4,8,0\ngrads,3,6,4,4\n")
    status, out, err = call("pack", "pins.csv")
    assert (status, out) == (2, "")
    assert error_line(err) == (
        "arenaplan: error: pins.csv: weights and grads are pinned over each other at offset 4; "
        "move one of them, or leave its offset empty"
    )


@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_factory_that_raises_is_named_with_its_line(files, call, command, absolute):
    model = files / "model.py" if absolute else Path("model.py")
    status, out, err = call(command, f"{model}:boom")
    assert (status, out) == (2, "")
    assert error_line(err) == f"arenaplan: error: {model}, line 9: boom() raised ValueError: no data; mend it there"


def test_a_file_that_raises_is_told_from_its_factory(files, call):
    for text, words in (("import nothing_of_that_name", "ModuleNotFoundError"), ("x = (", "SyntaxError")):
        Path("broken.py").write_text(f"\n{text}\n")
        status, _, err = call("plan", "broken.py:make")
        assert status == 2
        assert f"broken.py, line 2: loading it raised {words}" in error_line(err)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (".:factory", "it is a directory; name the Python file in it, as in model.py:factory"),
        ("absent.py:factory", "no such file; write FILE.py:FACTORY"),
        ("problem.csv:factory", "its name must end in .py"),
        ("model.py", "write FILE.py:FACTORY"),
    ],
)
def test_what_is_no_python_file_is_refused(files, call, target, words):
    status, _, err = call("plan", target)
    assert status == 2
    assert words in error_line(err)


def test_estimate_without_a_model_asks_for_all_that_is_missing(call):
    assert "(missing" not in error_line(call("estimate")[2])
    assert "(missing: --layers, --vocabulary)" in error_line(call("estimate", "-H", 8, "-N", 2)[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), ["nothing", "arenaplan --help"]),
        (
            ("attention", "-B", "x", "-N", "2", "-L", "16", "-H", "8"),
            ["attention: ", "-B", "arenaplan attention --help"],
        ),
        (("attention", "-B", "2"), ["-N", "arenaplan attention --help"]),
        ((*ATTENTION, "--strategy", "x"), ["--strategy", "'x'", "materialized"]),
        (("plan",), ["FILE.py:FACTORY"]),
        (("plan", "model.py:factory", "--pass", "x"), ["--pass", "'x'", "joint"]),
        (("run", "plan.json", "--steps", "1"), ["--steps"]),
        (("pack", "problem.csv", "--colour"), ["--colour", "arenaplan pack --help"]),
        (("inspect", "plan.json", "--at", "soon"), ["--at"]),
        (("snapshot", SNAPSHOT, "--top", "-1"), ["--top"]),
        (("estimate", "gpt2", "--batch", "many"), ["--batch"]),
        (("bench", "nothing"), ["bench: ", "nothing"]),
        (("bench", "attention", "--strategy", "x"), ["--strategy", "'x'", "sliced"]),
        (("bench", "attention", "--strategy", "fused"), ["--strategy", "'fused'", "sliced"]),
        (("bench", "step", "--rounds", "0"), ["--rounds"]),
        (("bench", "update", "--parameters", "0"), ["--parameters"]),
        (("bench", "pack", "absent.csv"), ["absent.csv", "No such file"]),
        (("bench", "pack", "--time-limit", "nan"), ["--time-limit"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_one_line_before_any_work(files, call, arguments, words):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert error_line(err) == err.rstrip()
    assert [word for word in words if word not in err] == []


def test_a_command_without_arguments_shows_its_help(call):
    for arguments in ((), ("bench",)):
        status, out, err = call(*arguments)
        assert status == 2
        assert "Usage: arenaplan" in out + err


INTERRUPTED = {
    "plan": (("plan", "slow.py:factory", "--run", "--steps", "100000", "-o", "out.json"), "begun"),
    "estimate": (("estimate", "slow.py:waiting"), "begun"),
    "attention": ((*ATTENTION, "--run", "--steps", "100000", "--dtype", "float32", "-o", "out.json"), "colouring"),
    "bench update": (("bench", "update", "--smoke", "--rounds", "100000"), "arenaplan: "),
    "bench pack": (("bench", "pack", "hard.csv", "--rounds", "1000", "--time-limit", "60"), "hard"),
    "demo": (("demo", "--out", "out"), "running"),
}
SLOW = """
import sys, time
import torch

def factory():
    print("begun", file=sys.stderr, flush=True)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh()), (torch.randn(4, 6),)

def waiting():
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_in_the_middle_is_one_line_and_leaves_no_file(files, name):
    arguments, sign = INTERRUPTED[name]
    Path("slow.py").write_text(SLOW)
    sizes = [(index * 7919) % 1000 + 1 for index in range(600)]
    lifetimes = (Lifetime(str(i), size, i % 97, i % 97 + size % 89 + 1) for i, size in enumerate(sizes))
    write_problem(files / "hard.csv", Problem(tuple(lifetimes)))
    before = names()
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "from runtime.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(planner.__file__).parents[1])},
        text=True,
    ) as process:
        try:
            while sign not in (line := process.stderr.readline()):
                assert line, "it ended before it could be interrupted"
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    lines = [line for line in err.splitlines() if "interrupted" in line or not line.startswith("arenaplan: ")]
    assert lines == ["arenaplan: interrupted"]
    if name == "demo":
        assert names("out") == []
    else:
        assert names() == before


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_between_loading_and_the_command_is_one_line(files):
    """After the modules are there, the framework still builds the command and reads its arguments."""
    program = """
import os, signal, sys
import typer
make = typer.main.get_command
def interrupting(app):
    os.kill(os.getpid(), signal.SIGINT)
    return make(app)
typer.main.get_command = interrupting
sys.argv = ["arenaplan", "pack", "problem.csv"]
from runtime.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "arenaplan: interrupted\n")
