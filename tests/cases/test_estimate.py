"""Mistakes of other estimators (cases E01 to E05), and parameters counted twice (L07)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.estimate import Architecture, Estimate, Family, Term, inference, preset, read_checkpoint, training

SMALL = Architecture("small", Family.LLAMA, 4, 256, 8, 2, 32, 512, 1000)
P = SMALL.parameters


def term(found: Estimate, name: str, phase: str = "optimizer step") -> Term:
    (moment,) = (item for item in found.phases if item.name == phase)
    return next(item for item in moment.terms if item.name == name)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "state"),
    [
        (0, 2 * P, 2 * P, 16 * P),
        (1, 2 * P, 2 * P, 16 * -(-P // 8)),
        (2, 2 * P, 2 * -(-P // 8), 16 * -(-P // 8)),
        (3, 2 * -(-P // 8), 2 * -(-P // 8), 16 * -(-P // 8)),
    ],
)
def test_e01_every_stage_of_zero_divides_what_it_should(zero: int, weights: int, gradients: int, state: int) -> None:
    """deepspeedai/DeepSpeed#5102, #5099, #4076: no ZeRO-1; ZeRO-2's gradients whole; multipliers unexplained."""
    found = training(SMALL, batch=1, length=64, zero=zero, gpus=8)
    assert term(found, "weights").nbytes == weights
    assert term(found, "gradients").nbytes == gradients
    assert term(found, "optimizer state").nbytes == state
    for name in ("weights", "gradients", "optimizer state"):
        divided = " / 8" in term(found, name).formula
        assert divided == (zero >= {"weights": 3, "gradients": 2, "optimizer state": 1}[name])
    assert "4 FP32 parameter + 4 FP32 gradient + 4 + 4 moments" in term(found, "optimizer state").formula


def test_e01_zero_3_gathers_live_parameters() -> None:
    found = training(SMALL, batch=1, length=64, zero=3, gpus=8)
    layer = SMALL.part("attention").numel + SMALL.part("mlp").numel
    assert term(found, "live parameters (ZeRO-3)").nbytes == 4 * max(layer, 256 * 1000)
    given = training(SMALL, batch=1, length=64, zero=3, gpus=8, live_parameters=1000)
    assert term(given, "live parameters (ZeRO-3)").nbytes == 4000


def test_e01_fp32_is_not_counted_as_half() -> None:
    found = training(SMALL, batch=1, length=64, precision="fp32", update="fused")
    terms = [term(found, name).nbytes for name in ("weights", "gradients", "optimizer state")]
    assert terms == [4 * P, 4 * P, 8 * P]


def test_e02_activations_are_counted_and_the_rest_is_named() -> None:
    """deepspeedai/DeepSpeed#4527, #4093: 0.49 GB estimated, 14.7 GB and more seen."""
    found = training(preset("gpt2"), batch=8, length=1024)
    held = {item.name: item.nbytes for item in found.terms}
    assert held["activations"] > held["weights"] + held["gradients"] + held["optimizer state"]
    said = " ".join(found.not_covered)
    for word in ("context", "caching allocator", "workspaces"):
        assert word in said
    assert "communication" not in said
    assert "communication" in " ".join(training(SMALL, length=64, zero=1, gpus=2).not_covered)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file whose tensors are zeros: ``(dtype, shape, bytes)`` by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(offset))


def test_e03_a_checkpoint_of_several_dtypes_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    """huggingface/accelerate#3297, #3383: one dtype for all, whatever the file or torch_dtype said."""
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "layer.weight": ("F8_E4M3", [64, 32], 2048),
            "layer.weight_scale": ("F32", [], 4),
            "norm.weight": ("BF16", [32], 64),
        },
    )
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.tensors, checkpoint.nbytes) == (3, 2048 + 4 + 64)
    assert dict(checkpoint.by_dtype) == {"F8_E4M3": 2048, "BF16": 64, "F32": 4}
    found = inference(SMALL, length=16, weight_nbytes=checkpoint.nbytes, weight_source=checkpoint.formula)
    assert term(found, "weights", "prefill, logits") == Term("weights", "F8_E4M3 2048 + BF16 64 + F32 4", 2116)


def test_e04_a_foreach_update_holds_a_list_as_large_as_the_parameters() -> None:
    """pytorch/pytorch#97712: foreach Adam needs one more parameter size of intermediates."""
    name = "optimizer-step transient"
    assert term(training(SMALL, length=64, precision="fp32"), name).nbytes == 4 * P
    assert term(training(SMALL, length=64, precision="mixed"), name).nbytes == 4 * P
    assert term(training(SMALL, length=64, precision="bf16"), name).nbytes == 2 * P
    assert term(training(SMALL, length=64, zero=1, gpus=4), name).nbytes == 4 * -(-P // 4)
    loop = training(SMALL, length=64, precision="fp32", update="loop")
    assert term(loop, name).nbytes == 2 * 4 * 256 * 1000
    for found in (
        training(SMALL, length=64, update="fused"),
        training(SMALL, length=64, optimizer="sgd"),
        training(SMALL, length=64, optimizer="adamw8bit"),
    ):
        assert all(item.name != name for phase in found.phases for item in phase.terms)


def test_e05_logits_and_their_upcast_have_lines_of_their_own() -> None:
    """NVIDIA-NeMo/Automodel#3907; huggingface/trl#5575, #6858: [B, S, V] logits dominate, an FP32 copy on top."""
    model = Architecture("wide", Family.LLAMA, 2, 512, 8, 8, 64, 1024, 248000)
    tokens = 16384
    found = training(model, batch=1, length=tokens, precision="bf16")
    assert found.peak.name == "backward of the loss"
    held = {item.name: item for item in found.terms}
    assert held["logits"].nbytes == 2 * tokens * 248000  # 8.1 GB in BF16
    assert held["logits, FP32 upcast (log-softmax)"].nbytes == 4 * tokens * 248000  # 16.3 GB on top
    assert held["gradients of the logits"].nbytes == 2 * 4 * tokens * 248000
    dropped = training(model, batch=1, length=tokens, precision="bf16", logits_held=False)
    assert found.total_nbytes - dropped.total_nbytes == 2 * tokens * 248000


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-base", "qwen2.5-0.5b"])
def test_l07_tied_parameters_are_counted_once(name: str) -> None:
    """pytorch/executorch#1300: constants and parameters counted again among the rest (20 MB for 9 MB)."""
    model = preset(name)
    names = [part.name for part in model.parts]
    assert len(names) == len(set(names))
    assert ("head" in names) is not model.tied
    for phase in training(model, batch=1, length=64, precision="fp32").phases:
        assert [item.nbytes for item in phase.terms if item.name == "weights"] == [4 * model.parameters]
