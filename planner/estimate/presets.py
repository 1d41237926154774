"""Sizes of published models. Each source is the paper, or the ``config.json`` published with the weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from planner.errors import ShapeError
from planner.estimate.architecture import Architecture, Family


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Architecture:
    """GPT-2: Radford et al., 2019, table 2; vocabulary 50257, context 1024, dropout 0.1 (openai-community/gpt2*)."""
    return Architecture(
        name, Family.GPT2, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50257,
        positions=1024, longest=1024, tied=True, residual_dropout=0.1, attention_dropout=0.1, composite_gelu=True,
    )  # fmt: skip


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    *,
    kv_heads: int | None = None,
    vocabulary: int = 32000,
    longest: int = 2048,
    tied: bool = False,
    qkv_bias: bool = False,
    window: int | None = None,
    dtype: str = "float16",
    head_size: int | None = None,
) -> Architecture:
    return Architecture(
        name, Family.LLAMA, layers, hidden, heads, kv_heads or heads, head_size or hidden // heads, intermediate,
        vocabulary, longest=longest, tied=tied, qkv_bias=qkv_bias, window=window, dtype=dtype,
    )  # fmt: skip


def _bert(name: str, layers: int, hidden: int, heads: int, vocabulary: int) -> Architecture:
    """BERT: Devlin et al., 2019, section 3; dropout 0.1, 512 positions; vocabularies of google-bert/bert-*."""
    return Architecture(
        name, Family.BERT, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocabulary,
        positions=512, longest=512, tied=True, residual_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip


_ALL = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    # Llama: Touvron et al., 2023, table 2; inner widths from the released configurations (huggyllama/llama-*).
    _llama("llama-7b", 32, 4096, 32, 11008),
    _llama("llama-13b", 40, 5120, 40, 13824),
    _llama("llama-30b", 60, 6656, 52, 17920),
    _llama("llama-65b", 80, 8192, 64, 22016),
    # Llama 2: Touvron et al., 2023 (2307.09288), table 1; context 4096; grouped queries at 70B (meta-llama/Llama-2-*).
    _llama("llama-2-7b", 32, 4096, 32, 11008, longest=4096),
    _llama("llama-2-13b", 40, 5120, 40, 13824, longest=4096),
    _llama("llama-2-70b", 80, 8192, 64, 28672, kv_heads=8, longest=4096),
    # Llama 3: Grattafiori et al., 2024 (2407.21783), table 3; context 8192 (meta-llama/Meta-Llama-3-*).
    _llama("llama-3-8b", 32, 4096, 32, 14336, kv_heads=8, vocabulary=128256, longest=8192, dtype="bfloat16"),
    _llama("llama-3-70b", 80, 8192, 64, 28672, kv_heads=8, vocabulary=128256, longest=8192, dtype="bfloat16"),
    # Mistral 7B: Jiang et al., 2023 (2310.06825), table 1; window 4096 (mistralai/Mistral-7B-v0.1).
    _llama("mistral-7b", 32, 4096, 32, 14336, kv_heads=8, longest=32768, window=4096, dtype="bfloat16"),
    # Qwen2.5: Qwen team, 2024 (2412.15115), table 1; Qwen/Qwen2.5-0.5B and -7B.
    _llama(
        "qwen2.5-0.5b", 24, 896, 14, 4864, kv_heads=2, vocabulary=151936, longest=32768,
        tied=True, qkv_bias=True, dtype="bfloat16",
    ),
    _llama(
        "qwen2.5-7b", 28, 3584, 28, 18944, kv_heads=4, vocabulary=152064, longest=131072,
        qkv_bias=True, dtype="bfloat16",
    ),
    _bert("bert-base", 12, 768, 12, 30522),
    _bert("bert-base-cased", 12, 768, 12, 28996),
    _bert("bert-large", 24, 1024, 16, 30522),
)  # fmt: skip

#: Every preset by its name.
PRESETS: Mapping[str, Architecture] = MappingProxyType({model.name: model for model in _ALL})


def preset(name: str) -> Architecture:
    """The published model of that name; raise `ShapeError` naming near ones if there is none."""
    found = PRESETS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
        raise ShapeError(
            "model", name[:80], f"no preset has this name; near: {', '.join(near) or 'none'}; all: {', '.join(PRESETS)}"
        )
    return found
