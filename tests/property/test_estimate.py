"""Estimates of arbitrary models: sums, growth, and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlannerError
from planner.estimate import Architecture, Estimate, Family, architecture_of, inference, largest, training

small = st.integers(1, 64)


@st.composite
def models(draw: st.DrawFn) -> Architecture:
    family = draw(st.sampled_from(list(Family)))
    kv_heads, repeated, size = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(small)
    grouped = family is Family.LLAMA
    heads = kv_heads * repeated if grouped else kv_heads
    dropout = draw(st.sampled_from([0.0, 0.1]))
    return Architecture(
        name="drawn",
        family=family,
        layers=draw(st.integers(1, 12)),
        hidden=draw(small) * 2 if grouped else heads * size,
        heads=heads,
        kv_heads=kv_heads if grouped else heads,
        head_size=size,
        intermediate=draw(st.integers(1, 256)),
        vocabulary=draw(st.integers(1, 5000)),
        positions=0 if grouped else 4096,
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        residual_dropout=dropout,
        attention_dropout=dropout,
        composite_gelu=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 100)) if grouped else None,
    )


training_options = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["fp32", "fp16", "bf16", "mixed"]),
        "optimizer": st.sampled_from(["adamw", "adamw8bit", "sgd"]),
        "update": st.sampled_from(["foreach", "loop", "fused"]),
        "attention": st.sampled_from(["fused", "materialized"]),
        "zero": st.integers(0, 3),
        "gpus": st.integers(1, 9),
        "logits_held": st.booleans(),
        "device": st.sampled_from(["cuda", "cpu"]),
    }
)
inference_options = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["fp32", "fp16", "bf16"]),
        "attention": st.sampled_from(["fused", "materialized"]),
        "logits": st.sampled_from(["last", "all"]),
    }
)


def check(found: Estimate) -> None:
    assert found.total_nbytes == sum(term.nbytes for term in found.terms)
    assert found.total_nbytes == max(phase.total_nbytes for phase in found.phases)
    for phase in found.phases:
        assert all(term.nbytes > 0 and term.formula and term.name for term in phase.terms)
    content = json.loads(json.dumps(found.as_json()))
    assert content["total_bytes"] == sum(term["bytes"] for term in content["terms"])


@settings(max_examples=150, deadline=None)
@given(models(), training_options, st.integers(1, 32), st.integers(1, 512))
def test_training_totals_are_sums_and_grow(
    model: Architecture, options: dict[str, Any], batch: int, length: int
) -> None:
    found = training(model, batch=batch, length=length, **options)
    check(found)
    for larger in (
        training(model, batch=batch + 1, length=length, **options),
        training(model, batch=batch, length=length + 1, **options),
        training(replace(model, layers=model.layers + 1), batch=batch, length=length, **options),
        training(replace(model, vocabulary=model.vocabulary + 1), batch=batch, length=length, **options),
    ):
        assert larger.total_nbytes > found.total_nbytes
    if options["zero"]:
        alone = training(model, batch=batch, length=length, **{**options, "gpus": 1})
        assert found.total_nbytes <= alone.total_nbytes
    fused = training(model, batch=batch, length=length, **{**options, "optimizer": "adamw", "update": "fused"})
    foreach = training(model, batch=batch, length=length, **{**options, "optimizer": "adamw", "update": "foreach"})
    assert fused.total_nbytes <= foreach.total_nbytes


@settings(max_examples=150, deadline=None)
@given(models(), inference_options, st.integers(1, 32), st.integers(1, 512), st.integers(0, 64))
def test_inference_totals_are_sums_and_grow(
    model: Architecture, options: dict[str, Any], batch: int, length: int, new: int
) -> None:
    new = 0 if model.family is Family.BERT else new
    found = inference(model, batch=batch, length=length, new_tokens=new, **options)
    check(found)
    assert inference(model, batch=batch + 1, length=length, new_tokens=new, **options).total_nbytes > found.total_nbytes
    assert inference(model, batch=batch, length=length + 1, new_tokens=new, **options).total_nbytes > found.total_nbytes
    if model.family is not Family.BERT:
        more = inference(model, batch=batch, length=length, new_tokens=new + 1, **options)
        assert more.total_nbytes >= found.total_nbytes


@settings(max_examples=100, deadline=None)
@given(models(), training_options, st.integers(1, 64), st.integers(10_000, 10**10))
def test_the_largest_batch_fits_and_one_more_does_not(
    model: Architecture, options: dict[str, Any], length: int, memory: int
) -> None:
    def made(batch: int) -> Estimate:
        return training(model, batch=batch, length=length, **options)

    batch = largest(made, memory)
    if batch:
        assert made(batch).total_nbytes <= memory
    assert batch == 2**24 or made(batch + 1).total_nbytes > memory


@settings(max_examples=100, deadline=None)
@given(models(), training_options, st.integers(2, 512))
def test_length_costs_at_least_as_much_as_batch(model: Architecture, options: dict[str, Any], length: int) -> None:
    """Twice the tokens in one sequence or in two: attention matrices make the one longer, nothing makes it cheaper."""
    longer = training(model, batch=1, length=2 * length, **options)
    wider = training(model, batch=2, length=length, **options)
    assert longer.total_nbytes >= wider.total_nbytes


values = st.none() | st.booleans() | st.integers(-(10**6), 10**30) | st.floats() | st.text(max_size=8)
names = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size n_embd"
    " n_head n_layer n_positions max_position_embeddings tie_word_embeddings torch_dtype dtype attention_dropout"
    " sliding_window quantization_config num_experts attention_bias resid_pdrop type_vocab_size _name_or_path n_inner"
).split()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["gpt2", "llama", "mistral", "qwen2", "bert", "other"]),
    st.dictionaries(st.sampled_from(names), values | st.lists(values, max_size=2), max_size=8),
)
def test_any_config_is_read_or_refused_in_one_line(kind: str, changes: dict[str, Any]) -> None:
    whole: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
        "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32,
    }  # fmt: skip
    try:
        model = architecture_of({**whole, "model_type": kind, **changes}, "config.json")
        assert training(model, length=1).total_nbytes > 0
    except PlannerError as error:
        refusal = str(error)
    else:
        return
    assert "\n" not in refusal
    assert len(refusal) < 2000
