"""``arenaplan estimate``: what it prints, how it ends, and that it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from planner.estimate import inference, preset, training
from runtime.cli.estimate import estimate

FACTORY = """
import torch

def step():
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    print("built")
    return module, (torch.randn(8, 16),), lambda output: output.square().mean()

def raises():
    raise RuntimeError("no data")
"""


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(estimate)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def fields(*arguments: object) -> dict[str, Any]:
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_has_every_term_with_its_formula_in_bytes() -> None:
    found = fields("gpt2", "-B", 4, "-L", 512, "--precision", "fp32")
    expected = training(preset("gpt2"), batch=4, length=512, precision="fp32")
    assert found["schema"] == "arenaplan/estimate/1"
    assert found["total_bytes"] == expected.total_nbytes == sum(term["bytes"] for term in found["terms"])
    assert found["peak"] == expected.peak.name
    assert found["parameters"] == 124_439_808
    for phase in found["phases"]:
        assert phase["total_bytes"] == sum(term["bytes"] for term in phase["terms"]) <= found["total_bytes"]
    assert all(term["formula"] for phase in found["phases"] for term in phase["terms"])
    assert [term["bytes"] for term in found["published"]] == [count * 124_439_808 for count in (4, 4, 8)]
    assert found["not_covered"]
    assert all(gpu["memory_bytes"] >= found["total_bytes"] for gpu in found["fits"])


def test_text_has_the_terms_the_total_and_what_is_not_covered() -> None:
    status, out, err = run("llama-3-8b", "-L", 2048, "--zero", 3, "--gpus", 8, "--device-memory", "80GiB")
    assert (status, err) == (0, "")
    for word in (
        "weights",
        "2 · P / 8",
        "live parameters",
        "logits, FP32 upcast",
        "total",
        "not covered",
        "fits in 80.00 GiB",
    ):
        assert word in " ".join(out.split())
    assert "largest batch: " in out
    assert "longest length: " in out


def test_the_largest_batch_and_length_fit_and_one_more_does_not() -> None:
    options = ("gpt2", "-B", 2, "-L", 256, "--device-memory", "24GB")
    found = fields(*options)
    memory, model = 24 * 10**9, preset("gpt2")
    batch, length = found["largest_batch"], found["longest_length"]
    assert found["device_memory_bytes"] == memory
    assert training(model, batch=batch, length=256).total_nbytes <= memory
    assert training(model, batch=batch + 1, length=256).total_nbytes > memory
    assert length == 1024
    assert training(model, batch=2, length=length).total_nbytes <= memory
    assert not fields("gpt2", "-B", 64, "--device-memory", "1GiB")["fits_device"]


def test_inference_computes_in_the_models_own_dtype() -> None:
    assert dict(fields("llama-3-8b", "--inference", "-L", 100)["settings"])["precision"] == "bf16"
    found = fields("gpt2", "--inference", "-L", 100, "--new-tokens", 28, "--logits", "all")
    expected = inference(preset("gpt2"), length=100, new_tokens=28, precision="fp32", logits="all")
    assert found["total_bytes"] == expected.total_nbytes


def test_sizes_on_the_command_line() -> None:
    sizes = ("--layers", 32, "-H", 4096, "-N", 32, "--kv-heads", 8, "--intermediate", 14336, "--vocabulary", 128256)
    assert fields(*sizes, "-L", 128)["parameters"] == 8_030_261_248
    assert fields(*sizes, "--head-size", 64, "--tied", "-L", 128)["parameters"] < 8_030_261_248
    assert fields("--family", "gpt2", "--layers", 2, "-H", 64, "-N", 4, "--vocabulary", 100)["parameters"] > 0


def test_a_directory_with_a_checkpoint_is_read_dtype_by_dtype(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [1000], "data_offsets": [0, 1000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    config = {
        "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 9,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for arguments in (
        (tmp_path,),
        (tmp_path / "config.json",),
        (tmp_path, "--weights", tmp_path / "model.safetensors"),
    ):
        (term,) = [item for item in fields(*arguments, "--inference")["terms"] if item["name"] == "weights"]
        assert term == {"name": "weights", "formula": "F8_E4M3 1000", "bytes": 1000}
    status, _, err = run(tmp_path)
    assert status == 2
    assert "quantized" in err


def test_a_factory_is_planned(tmp_path: Path) -> None:
    from planner import plan, trace

    file = tmp_path / "model.py"
    file.write_text(FACTORY)
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    module, inputs, loss = namespace["step"]()
    made = plan(trace(module, inputs, loss=loss, mode="joint"))
    status, out, _ = run(f"{file}:step", "--optimizer", "sgd", "--device-memory", "1GiB", "--json")
    assert status == 0
    found = json.loads(out)
    state = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert found["total_bytes"] == made.arena_nbytes + state
    assert found["eager_total_bytes"] == max(phase["total_bytes"] for phase in found["eager"])
    assert found["fits_device"]
    status, out, _ = run(f"{file}:step", "--inference")
    assert status == 0
    assert "eager PyTorch, forward: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt-2",), "near: gpt2"),
        ((), "name a preset"),
        (("--layers", 2), "missing: --hidden, --heads, --vocabulary)"),
        (("gpt2", "--layers", 2), "--layers: gpt2 has its own sizes"),
        (("gpt2", "-B", 0), "batch=0"),
        (("gpt2", "-B", -4), "batch=-4"),
        (("gpt2", "-L", 2000), "1024 positions"),
        (("gpt2", "-B", 10**40), "at most"),
        (("gpt2", "--gpus", 0), "gpus=0"),
        (("gpt2", "--zero", 5), "stages"),
        (("gpt2", "--precision", "fp4"), "fp32, fp16, bf16, mixed"),
        (("gpt2", "--device-memory", "80 elephants"), "device_memory"),
        (("gpt2", "--device-memory", "nan"), "device_memory"),
        (("gpt2", "--device-memory", "9" * 400), "device_memory"),
        (("gpt2", "--inference", "--precision", "mixed"), "no FP32 copies"),
        (("gpt2", "--weights", "x.safetensors"), "add --inference"),
        (("gpt2", "--inference", "--weights", "x.safetensors"), "x.safetensors"),
        (("absent/config.json",), "No such file"),
        (("--family", "mamba", "--layers", 1, "-H", 8, "-N", 2, "--vocabulary", 9), "gpt2, llama, bert"),
        (("--layers", 1, "-H", 9, "-N", 2, "--vocabulary", 9), "do not divide"),
        (("--layers", 1, "-H", 8, "-N", 4, "--kv-heads", 3, "--vocabulary", 9), "must divide the 4 query heads"),
        (("--layers", 1, "-H", -8, "-N", 2, "--vocabulary", 9), "hidden=-8"),
        (("--layers", 1, "-H", 8, "-N", 0, "--vocabulary", 9), "heads=0"),
        (("absent.py:step",), "no such file"),
        (("absent.py:step", "--zero", 1), "leave it out"),
        (("absent.py:step", "-B", 4), "set it in absent.py:step"),
        (("absent.py:step", "--device", "tpu"), "--device: "),
        (("gpt2", "--family", "x"), "--family: "),
        (("gpt2", "--logits", "x"), "--logits: it is of inference only"),
        (("gpt2", "--inference", "--zero", 0, "--optimizer", "x"), "--optimizer, --zero: it is of training only"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(arguments: tuple[object, ...], said: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("arenaplan: error: ")
    assert err.count("\n") == 1


def test_broken_files_are_one_line_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in (
        "",
        '{"model_type": "gpt2", "n_em',
        "[]",
        '{"model_type": "gpt2"}',
        '{"model_type": "gpt2", "n_embd": NaN}',
    ):
        file.write_text(text)
        status, out, err = run(file)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert str(file) in err
    model = tmp_path / "model.py"
    model.write_text(FACTORY)
    for name in ("raises", "absent"):
        status, out, err = run(f"{model}:{name}")
        assert (status, out) == (2, "")
        assert "Traceback" not in err


def test_it_starts_without_torch() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['arenaplan', 'estimate', 'gpt2', '--json', '--device-memory', '24GiB']\n"
        "from runtime.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'networkx' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "gpt2"
