"""Configurations and checkpoints, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ShapeError
from planner.estimate import ConfigError, inference, preset, read_checkpoint, read_config, training

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


def config(tmp_path: Path, content: object) -> Path:
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


@pytest.mark.parametrize(("name", "content"), [("llama-3-8b", LLAMA), ("gpt2", GPT2), ("bert-base", BERT)])
def test_a_config_gives_the_same_model_as_the_preset(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    found = read_config(config(tmp_path, content))
    assert found.parameters == preset(name).parameters
    one, two = (training(model, batch=2, length=256).total_nbytes for model in (found, preset(name)))
    assert one == two
    assert read_config(tmp_path) == found


def test_head_size_ties_biases_and_dtype_are_read(tmp_path: Path) -> None:
    found = read_config(
        config(
            tmp_path,
            {
                **{key: value for key, value in LLAMA.items() if key != "torch_dtype"},
                "head_dim": 256,
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "dtype": "float16",
                "sliding_window": 4096,
                "rope_scaling": None,
            },
        )
    )
    assert (found.head_size, found.width, found.kv_width) == (256, 32 * 256, 8 * 256)
    assert found.tied
    assert (found.qkv_bias, found.output_bias, found.mlp_bias) == (True, True, True)
    assert (found.dtype, found.window) == ("float16", 4096)


def test_a_window_that_is_switched_off_does_not_count(tmp_path: Path) -> None:
    content = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    found = read_config(config(tmp_path, content))
    assert found.window is None
    assert found.qkv_bias
    assert not found.output_bias


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no whole JSON"),
        ('{"model_type": "llama", "hidden_si', "no whole JSON"),
        ("[1, 2]", "list where an object"),
        ("GGUF", "no whole JSON"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "no whole JSON"),
        ({}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": "mamba"}, "no formula"),
        ({**LLAMA, "num_local_experts": 8}, "experts"),
        ({**LLAMA, "hidden_size": None}, 'no "hidden_size"'),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, 'no "vocab_size"'),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({**LLAMA, "num_hidden_layers": "32"}, "whole number"),
        ({**LLAMA, "num_hidden_layers": 1e300}, "at most"),
        ({**LLAMA, "num_hidden_layers": [32]}, "whole number"),
        ({**LLAMA, "num_attention_heads": 7}, "do not divide"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "not true or false"),
        ({**LLAMA, "torch_dtype": "complex64"}, "complex64"),
        ({**LLAMA, "attention_dropout": 2}, "probability"),
        ({**BERT, "type_vocab_size": 4}, "type_vocab_size"),
    ],
)
def test_a_broken_config_is_refused_in_one_line(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(config(tmp_path, content))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="must divide the 32 query heads"):
        read_config(config(tmp_path, {**LLAMA, "num_key_value_heads": 5}))


def test_binary_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\x80\x04\x95" + bytes(100))
    with pytest.raises(ConfigError, match="no whole JSON"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "absent.json")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(ConfigError, match="too many"):
        read_config(tmp_path)


@pytest.mark.parametrize("field", [{"quantization_config": {"quant_method": "fp8"}}, {"dtype": "float8_e4m3fn"}])
def test_quantized_weights_need_a_checkpoint(tmp_path: Path, field: dict[str, Any]) -> None:
    content = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    found = read_config(config(tmp_path, {**content, **field}))
    with pytest.raises(ShapeError, match="quantized"):
        inference(found, length=16)
    with pytest.raises(ShapeError, match="quantized"):
        training(found, length=16)
    assert inference(found, length=16, weight_nbytes=10**9).total_nbytes > 10**9


def test_a_checkpoint_written_by_the_library_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    import torch

    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.float16),
        "b": torch.zeros(7, dtype=torch.float32),
        "c": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "d": torch.zeros(0, 4),
    }
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_checkpoint(tmp_path / "model.safetensors")
    assert (found.tensors, found.elements, found.nbytes) == (4, 15 + 7 + 16, 30 + 28 + 16)
    assert dict(found.by_dtype) == {"F16": 30, "F32": 28, "F8_E4M3": 16}


def test_an_index_adds_its_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    import torch

    for number in (1, 2):
        library.save_file({f"t{number}": torch.zeros(number * 8)}, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t1": "part-1.safetensors", "t2": "part-2.safetensors"}}))
    assert read_checkpoint(tmp_path).nbytes == read_checkpoint(index).nbytes == 96
    index.write_text(json.dumps({"weight_map": {"t1": "../part-1.safetensors"}}))
    with pytest.raises(ConfigError, match="elsewhere"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"t1": "part-3.safetensors"}}))
    with pytest.raises(ConfigError, match="not beside it"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ConfigError, match="weight_map"):
        read_checkpoint(tmp_path)


def entry(**fields: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "longer than the file"),
        (b"\xff" * 8, "longer than the file"),
        ((10**9).to_bytes(8, "little") + b"{}", "longer than the file"),
        ((4).to_bytes(8, "little") + b"abcd", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        (entry(dtype="F7"), "dtype"),
        (entry(shape=[-2]), "shape"),
        (entry(shape=None), "shape"),
        (entry(data_offsets=[0]), "data_offsets"),
        (entry(data_offsets=[0, 9]), "9 bytes"),
        (entry(data_offsets=[8, 0]), "-8 bytes"),
        ({"t": 3}, "missing"),
    ],
)
def test_a_broken_checkpoint_is_refused(tmp_path: Path, data: object, said: str) -> None:
    if not isinstance(data, bytes):
        raw = json.dumps(data).encode()
        data = len(raw).to_bytes(8, "little") + raw + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_checkpoint(tmp_path)
