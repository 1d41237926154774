"""The planning commands as a user calls them: results, files, and one clear line for every wrong call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from planner.plan import Plan
from runtime.cli import app

runner = CliRunner()
SMALL = ["-B", "2", "-N", "2", "-L", "16", "-H", "8"]
FIELDS = {
    "schema",
    "strategy",
    "arena_bytes",
    "lower_bound_bytes",
    "resident_bytes",
    "extra_bytes",
    "naive_bytes",
    "eager_peak_bytes",
    "formula_bytes",
    "unplanned",
    "proved_optimal",
    "plan_seconds",
    "tensors",
    "operations",
}


def call(*arguments: str) -> Result:
    return runner.invoke(app, list(arguments))


def refused(result: Result, status: int, *words: str) -> None:
    """One line on standard error that names what is wrong, and nothing on standard output."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "error" in line]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in result.stderr


def test_attention_plans_a_shape_no_laptop_could_run() -> None:
    result = call("attention", "-B", "32", "-N", "16", "-L", "2048", "-H", "1024", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields.keys() >= FIELDS
    assert fields["extra_bytes"] <= fields["formula_bytes"]["target"] == 32 * 16 * 2048**2 * 2
    assert fields["arena_bytes"] == fields["lower_bound_bytes"]
    assert fields["extra_bytes"] == fields["arena_bytes"] - fields["resident_bytes"]
    assert fields["eager_peak_bytes"] is None


@pytest.mark.parametrize("pass_name", ["backward", "joint", "forward"])
@pytest.mark.parametrize("extra", [[], ["--strategy", "materialized", "--causal"], ["--separate", "--dropout", "0"]])
def test_attention_runs_and_checks(pass_name: str, extra: list[str]) -> None:
    result = call("attention", *SMALL, "--dtype", "float32", "--run", "--json", "--pass", pass_name, *extra)
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["max_rel_error"] <= 1e-5
    assert fields["allocator_calls"] == 0
    assert fields["step_seconds"] > 0
    assert fields["eager_peak_bytes"] > 0


def test_attention_sliced_takes_a_slice_count() -> None:
    result = call("attention", *SMALL, "--strategy", "sliced", "--slices", "1", "--run", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert (fields["strategy"], fields["slices"]) == ("sliced", 1)


def test_a_saved_plan_runs_and_checks(tmp_path: Path) -> None:
    for pass_name in ("backward", "joint"):
        path = tmp_path / f"{pass_name}.json"
        made = call("attention", *SMALL, "--dtype", "float32", "--pass", pass_name, "-o", str(path))
        assert made.exit_code == 0, made.output
        result = call("run", str(path), "--check", "--json")
        assert result.exit_code == 0, result.output
        fields = json.loads(result.stdout)
        assert fields["differing"] == []
        assert fields["allocator_calls"] == 0


def test_text_output_fits_80_columns() -> None:
    result = call("attention", *SMALL, "--run", "--dtype", "float32")
    assert result.exit_code == 0
    assert "max(S, 3X)" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-B", "2", "-N", "3", "-L", "16", "-H", "8"], ["H=8", "N=3"]),
        (["-B", "0", "-N", "2", "-L", "16", "-H", "8"], ["B=0"]),
        (["-B", "2", "-N", "2", "-L", "-1", "-H", "8"], ["L=-1"]),
        (["-B", "2", "-N", "2", "-L", "99999999999999", "-H", "8"], ["L="]),
        ([*SMALL, "--dtype", "float17"], ["dtype", "float17", "float16"]),
        ([*SMALL, "--dropout", "1.5"], ["dropout"]),
        ([*SMALL, "--dropout", "nan"], ["dropout"]),
        ([*SMALL, "--budget", "lots"], ["budget", "8GiB"]),
        ([*SMALL, "--budget", "-3"], ["budget"]),
        ([*SMALL, "--alignment", "100"], ["alignment", "power of two"]),
        ([*SMALL, "--strategy", "sliced", "--slices", "0"], ["slices"]),
        ([*SMALL, "--device", "cuda"], ["cuda", "cpu"]),
        ([*SMALL, "--device", "tpu"], ["tpu", "cpu"]),
    ],
)
def test_wrong_shapes_and_options_are_refused(arguments: list[str], words: list[str]) -> None:
    refused(call("attention", *arguments), 2, *words)


def test_a_budget_that_cannot_be_met_says_by_how_much_and_where() -> None:
    refused(
        call("attention", *SMALL, "--budget", "1KiB"),
        1,
        "budget of 1024 bytes",
        "the least reachable is",
        "most is alive at step",
        "allow",
    )


def write(path: Path, body: str) -> str:
    path.write_text("import torch\nfrom torch import nn\n" + body, encoding="utf-8")
    return str(path)


MLP = """
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (torch.randn(4, 6),)

def with_loss():
    module, inputs = make()
    return module, inputs, lambda y: (y * y).sum()

def keywords():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
        def forward(self, *, x, scale=2.0):
            return {"y": x * self.w * scale}
    return M(), {"x": torch.randn(2, 3, requires_grad=True)}

def raises():
    raise KeyError("no such thing")

def wrong():
    return 3

def data_dependent():
    class M(nn.Module):
        def forward(self, x):
            return x[x > 0].sum() + x.sum()
    return M(), (torch.randn(5, requires_grad=True),)

def shapes():
    return nn.Linear(3, 4), (torch.randn(5, 7, requires_grad=True),)

def sparse():
    return nn.Embedding(10, 4, sparse=True), (torch.tensor([1, 2]),)

def nothing():
    return nn.ReLU(), (torch.randn(3),)
"""


@pytest.mark.parametrize("factory", ["make", "with_loss", "keywords"])
@pytest.mark.parametrize("pass_name", ["backward", "joint", "forward"])
def test_plan_plans_runs_and_saves_a_module(tmp_path: Path, factory: str, pass_name: str) -> None:
    target = write(tmp_path / "model.py", MLP)
    saved = tmp_path / "plan.json"
    result = call("plan", f"{target}:{factory}", "--pass", pass_name, "--run", "--json", "-o", str(saved))
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields.keys() >= FIELDS
    assert fields["max_rel_error"] <= 1e-5
    assert Plan.load(saved).arena_nbytes == fields["arena_bytes"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["KeyError", "no such thing", "line"]),
        ("wrong", ["(module, example_inputs)"]),
        ("absent", ["absent", "make"]),
        ("data_dependent", ["nonzero", "model.py:"]),
        ("shapes", ["reduction dim", "5, 7"]),
        ("sparse", ["sparse=False"]),
        ("nothing", ["requires a gradient", "forward"]),
        ("not an identifier", ["FILE.py:FACTORY"]),
    ],
)
def test_factories_that_cannot_be_planned_are_refused(tmp_path: Path, name: str, words: list[str]) -> None:
    target = write(tmp_path / "model.py", MLP)
    refused(call("plan", f"{target}:{name}"), 2, *words)


def test_files_that_are_not_there_or_not_python_are_refused(tmp_path: Path) -> None:
    refused(call("plan", f"{tmp_path}/absent.py:make"), 2, "no such file")
    broken = tmp_path / "broken.py"
    broken.write_text("def make(:\n", encoding="utf-8")
    refused(call("plan", f"{broken}:make"), 2, "SyntaxError")
    refused(call("run", str(tmp_path / "absent.json")), 2, "absent.json")


def edited(path: Path, change) -> Path:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    other = path.with_name("edited.json")
    other.write_text(json.dumps(document), encoding="utf-8")
    return other


def overlap(document) -> None:
    live = [s for s in document["storages"] if s["bytes"] and s["in_place_of"] is None]
    live[1]["offset"] = live[0]["offset"]


def shorten(document) -> None:
    longest = max(document["storages"], key=lambda s: s["death"] - s["birth"])
    longest["death"] = longest["birth"] + 1


def resize(document) -> None:
    document["storages"][0]["bytes"] *= 2


def rescale(document) -> None:
    for operation in document["operations"]:
        for position, argument in enumerate(operation["arguments"]):
            if isinstance(argument, float):
                operation["arguments"][position] = argument + 1
                return


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (overlap, 1, ["overlap"]),
        (shorten, 1, ["lives"]),
        (resize, 1, []),
        (rescale, 2, ["digest"]),
        (lambda d: d.update(schema="arenaplan/plan/99"), 2, ["schema", "99"]),
        (lambda d: d["storages"][0].update(offset=-256), 2, ["offset"]),
        (lambda d: d["storages"][0].update(offset=1 << 80), 2, ["offset"]),
        (lambda d: d["storages"][0].update(bytes=float("nan")), 2, []),
    ],
)
def test_a_tampered_plan_never_runs(tmp_path: Path, change, status: int, words: list[str]) -> None:
    path = tmp_path / "plan.json"
    made = call("attention", *SMALL, "--dtype", "float32", "-o", str(path))
    assert made.exit_code == 0, made.output
    refused(call("run", str(edited(path, change))), status, *words)


def test_a_truncated_plan_never_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert call("attention", *SMALL, "-o", str(path)).exit_code == 0
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    refused(call("run", str(path)), 2, "plan.json")


def test_bench_attention_prints_every_contender() -> None:
    result = call("bench", "attention", "--smoke", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    whole, core = report["cases"]
    assert "core" in core["name"]
    for case in (whole, core):
        check_case(case)
    assert report["environment"]["threads"] == 2


def check_case(case) -> None:
    contenders = {"ours", "fused", "eager", "inductor", "sdpa"}
    assert contenders <= case["seconds"].keys()
    assert contenders == case["peak_bytes"].keys()
    assert case["allocator_calls"]["ours"] == case["allocator_calls"]["fused"] == 0
