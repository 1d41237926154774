"""The closed forms: published counts, families, grouped heads, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import estimate
from planner.errors import ShapeError
from planner.estimate import (
    GPUS,
    PRESETS,
    Architecture,
    Family,
    inference,
    largest,
    memory_nbytes,
    preset,
    published,
    training,
)
from planner.estimate.states import Optimizer, Precision, own_update_terms

#: Parameters as the published checkpoints have them, heads of BERT included.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
}
GROUPED = Architecture("grouped", Family.LLAMA, 3, 256, 8, 2, 48, 512, 1000)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_as_many_parameters_as_published(name: str) -> None:
    assert preset(name).parameters == PUBLISHED[name]


def test_every_preset_can_be_estimated_both_ways() -> None:
    for model in PRESETS.values():
        assert training(model, batch=1).total_nbytes > 20 * model.parameters
        assert inference(model).total_nbytes > 2 * model.parameters


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("mixed", "adamw", (2, 2, 16)),
        ("mixed", "adamw8bit", (2, 2, 10)),
        ("mixed", "sgd", (2, 2, 12)),
        ("fp32", "adamw", (4, 4, 8)),
        ("fp32", "adamw8bit", (4, 4, 2)),
        ("fp32", "sgd", (4, 4, 4)),
        ("bf16", "adamw", (2, 2, 4)),
        ("fp16", "sgd", (2, 2, 2)),
    ],
)
def test_published_bytes_per_parameter(precision: str, optimizer: str, expected: tuple[int, int, int]) -> None:
    each = published(Precision(precision), Optimizer(optimizer))
    assert (each.weight, each.gradient, each.optimizer) == expected
    found = training(GROUPED, batch=1, length=16, precision=precision, optimizer=optimizer)
    assert [term.nbytes for term in found.published] == [count * GROUPED.parameters for count in expected]
    step = {term.name: term.nbytes for term in found.phases[-1].terms}
    assert [step["weights"], step["gradients"], step["optimizer state"]] == [term.nbytes for term in found.published]


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("master", ["fp32", "split", "stochastic", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_own_update_costs_what_the_optimizer_says(dtype: str, master: str, states: str) -> None:
    import torch

    from runtime.optimizer.precision import Precision as Kept

    model = replace(GROUPED, vocabulary=1024)  # so that the parameters are whole blocks
    precision = Precision.FP32 if dtype == "float32" else Precision.MIXED
    rule = Optimizer.ADAMW_8BIT if states == "8bit" else Optimizer.ADAMW
    assert model.parameters % 256 == 0
    terms = {term.name: term.nbytes for term in own_update_terms(model, precision, rule)}
    expected = Kept(master, states).bytes_per_parameter(getattr(torch, dtype), 2) * model.parameters
    assert terms["fused update, FP32" if dtype == "float32" else f'master="{master}"'] == expected


def test_the_own_update_needs_less_than_published() -> None:
    found = training(preset("llama-7b"), batch=1, length=16)
    together = sum(term.nbytes for term in found.published)
    assert all(term.nbytes < together for term in found.own_update)


def test_grouped_heads_shrink_keys_values_and_cache() -> None:
    all_heads = replace(GROUPED, kv_heads=8)
    assert GROUPED.kv_width * 4 == all_heads.kv_width == all_heads.width == 384
    assert all_heads.parameters - GROUPED.parameters == 3 * 2 * 256 * (384 - 96)
    few, many = (inference(model, batch=2, length=64, precision="fp32") for model in (GROUPED, all_heads))
    caches = [next(term.nbytes for term in found.terms if term.name == "KV cache") for found in (few, many)]
    assert caches == [2 * 3 * 2 * 64 * 96 * 4, 2 * 3 * 2 * 64 * 384 * 4]
    single = inference(replace(GROUPED, kv_heads=1), batch=2, length=64, precision="fp32")
    assert next(term.nbytes for term in single.terms if term.name == "KV cache") == caches[0] // 2


def test_the_cache_grows_with_what_is_generated_up_to_the_window() -> None:
    def cache(length: int, new: int, model: Architecture = GROUPED) -> int:
        found = inference(model, length=length, new_tokens=new)
        return next(term.nbytes for term in found.phases[-1].terms if term.name == "KV cache")

    assert cache(64, 64) == cache(100, 28) == 2 * cache(32, 32)
    windowed = replace(GROUPED, window=96)
    assert cache(64, 64, windowed) == cache(1000, 1000, windowed) == cache(64, 32)


def test_fused_attention_has_no_square_term_and_materialized_has() -> None:
    def scores(attention: str, length: int) -> int:
        found = training(GROUPED, batch=1, length=length, attention=attention)
        moment = next(phase for phase in found.phases if phase.name == "backward of the loss")
        return next(term.nbytes for term in moment.terms if term.name == "attention matrices")

    assert scores("fused", 2048) == 2 * scores("fused", 1024)
    assert scores("materialized", 2048) == 4 * scores("materialized", 1024)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    def made(batch: int) -> estimate.Estimate:
        return training(preset("gpt2"), batch=batch, length=512)

    batch = largest(made, "24GiB")
    assert made(batch).total_nbytes <= 24 * 2**30 < made(batch + 1).total_nbytes
    assert largest(made, "1GiB") == 0
    assert largest(lambda length: training(preset("gpt2"), length=length), "1000GiB", most=1024) == 1024


def test_gpus_are_sorted_and_those_that_fit_are_large_enough() -> None:
    assert [gpu.nbytes for gpu in GPUS] == sorted(gpu.nbytes for gpu in GPUS)
    found = training(preset("llama-7b"), batch=1, length=128)
    assert found.fits
    assert all(gpu.nbytes >= found.total_nbytes for gpu in found.fits)
    assert all(gpu.nbytes < found.total_nbytes for gpu in GPUS if gpu not in found.fits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers"),
        ({"hidden": -768}, "hidden"),
        ({"heads": 2.5}, "whole number"),
        ({"vocabulary": float("nan")}, "whole number"),
        ({"vocabulary": float("inf")}, "whole number"),
        ({"intermediate": 10**400}, "at most"),
        ({"layers": True}, "whole number"),
        ({"kv_heads": 3}, "divide"),
        ({"residual_dropout": 1.0}, "probability"),
        ({"attention_dropout": float("nan")}, "probability"),
        ({"family": Family.GPT2}, "head_size"),
        ({"window": 0}, "window"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        replace(GROUPED, **changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": -1}, "batch"),
        ({"length": 10**30}, "length"),
        ({"precision": "fp8"}, "fp32, fp16, bf16, mixed"),
        ({"optimizer": "adam"}, "adamw, adamw8bit, sgd"),
        ({"update": "slow"}, "foreach, loop, fused"),
        ({"attention": "flash"}, "fused, materialized"),
        ({"zero": 4}, "stages"),
        ({"zero": True}, "stages"),
        ({"gpus": 0}, "gpus"),
        ({"zero": 3, "live_parameters": 0}, "live_parameters"),
        ({"device": "tpu"}, "cuda, cpu"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        training(GROUPED, **{"length": 16, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "mixed"}, "no FP32 copies"),
        ({"new_tokens": -1}, "new_tokens"),
        ({"logits": "some"}, "last, all"),
        ({"weight_nbytes": 0}, "weight_nbytes"),
    ],
)
def test_inference_refuses_as_well(options: dict[str, object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        inference(GROUPED, **{"length": 16, **options})  # type: ignore[arg-type]


def test_positions_bound_the_length() -> None:
    with pytest.raises(ShapeError, match="1024 positions"):
        training(preset("gpt2"), length=1025)
    with pytest.raises(ShapeError, match="1024 positions"):
        inference(preset("gpt2"), length=1000, new_tokens=25)
    with pytest.raises(ShapeError, match="does not generate"):
        inference(preset("bert-base"), length=100, new_tokens=1)


def test_an_unknown_preset_is_answered_with_near_ones() -> None:
    with pytest.raises(ShapeError, match=r"near: .*llama-3-8b"):
        preset("llama3-8b")
    assert preset("GPT2") is preset("gpt2")


@pytest.mark.parametrize("size", ["80GG", "-1GiB", "nan", "", "9" * 400, "0", 0, -5])
def test_a_memory_size_that_cannot_be_read_is_refused(size: str | int) -> None:
    with pytest.raises(ShapeError, match="device_memory"):
        memory_nbytes(size)


def test_the_package_is_there_without_being_imported_by_name() -> None:
    import planner

    assert planner.estimate.preset("gpt2").hidden == 768
