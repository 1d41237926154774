"""What the formulas need to know of a model: its family, its sizes, its parameters one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import ShapeError

#: No size may be larger: products of several stay exact and readable, and no model comes near.
LARGEST = 2**48
TOKEN_TYPES = 2
"""Rows of BERT's segment embedding (Devlin et al., 2019, section 3)."""


class Family(StrEnum):
    """Models that compute alike and keep the same activations."""

    GPT2 = "gpt2"
    LLAMA = "llama"
    BERT = "bert"


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that belong together: ``copies`` of ``numel`` elements."""

    name: str
    formula: str
    numel: int
    copies: int = 1

    @property
    def total(self) -> int:
        """Elements of all copies."""
        return self.numel * self.copies


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer with a language-modelling head.

    Attributes:
        name: for reports.
        family: GPT-2 (learned positions, one QKV product, LayerNorm), Llama (rotary positions, RMSNorm, gated MLP;
            Mistral and Qwen2 too) or BERT (LayerNorm after each block, masked-language head).
        layers, hidden, heads: n, H, N.
        kv_heads: K, key and value heads; N unless queries are grouped.
        head_size: d; it need not be H/N.
        intermediate: F, the MLP's inner width.
        vocabulary: V.
        positions: rows of a learned position table, 0 without one.
        longest: the longest sequence the model is made for, ``None`` if unbounded.
        tied: whether the head's matrix is the embedding.
        qkv_bias, output_bias, mlp_bias: of Llama-like blocks (the other families have all of them).
        residual_dropout, attention_dropout: probabilities in training.
        composite_gelu: whether the activation is written out in elementary operators (``gelu_new``), which keeps more.
        window: keys a query sees at most (sliding window), ``None`` for all.
        dtype: of the published weights.
        quantization: how they are quantized, ``""`` if they are not; then only a checkpoint says how large they are.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    positions: int = 0
    longest: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    composite_gelu: bool = False
    window: int | None = None
    dtype: str = "float32"
    quantization: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary"):
            size_of(name, getattr(self, name))
        size_of("positions", self.positions, least=0)
        for name in ("longest", "window"):
            if getattr(self, name) is not None:
                size_of(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ShapeError(
                "kv_heads", self.kv_heads, f"it must divide the {self.heads} query heads; each serves equally many"
            )
        for name in ("residual_dropout", "attention_dropout"):
            probability = getattr(self, name)
            if not isinstance(probability, (int, float)) or not 0 <= probability < 1:
                raise ShapeError(name, probability, "it must be a probability of at least 0 and below 1")
        if self.family is not Family.LLAMA and self.head_size * self.heads != self.hidden:
            raise ShapeError(
                "head_size",
                self.head_size,
                f"{self.family} splits the hidden size {self.hidden} over {self.heads} heads",
            )
        if self.family is not Family.LLAMA and self.kv_heads != self.heads:
            raise ShapeError("kv_heads", self.kv_heads, f"{self.family} has as many as query heads ({self.heads})")

    @property
    def width(self) -> int:
        """N·d, the width of the queries."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """K·d, the width of the keys, and of the values."""
        return self.kv_heads * self.head_size

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parameters: embedding, attention and MLP of each layer, what follows the layers."""
        return _PARTS[self.family](self)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(part.total for part in self.parts)

    @property
    def largest_part(self) -> Part:
        """The part that is gathered at once and has most elements: an embedding, or one layer."""
        layer = [part for part in self.parts if part.copies > 1 or part.name in LAYER_PARTS]
        whole = Part("one layer", " + ".join(part.formula for part in layer), sum(part.numel for part in layer))
        rest = [part for part in self.parts if part.name not in LAYER_PARTS]
        return max([whole, *rest], key=lambda part: part.numel)

    def part(self, name: str) -> Part:
        """The part of that name; empty if the family has none."""
        return next((part for part in self.parts if part.name == name), Part(name, "0", 0))


#: Parts that every layer has.
LAYER_PARTS = ("attention", "mlp")


def size_of(name: str, value: object, *, least: int = 1) -> int:
    """``value`` if it is a whole number that can be a size; raise `ShapeError` if not."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ShapeError(name, value, "it must be a whole number")
    if value < least:
        raise ShapeError(name, value, f"it must be at least {least}")
    if value > LARGEST:
        raise ShapeError(name, value if value < 10**30 else "…", f"it must be at most {LARGEST}")
    return value


def _gpt2(a: Architecture) -> tuple[Part, ...]:
    H, F, V = a.hidden, a.intermediate, a.vocabulary
    return (
        Part("token embedding", "V·H", V * H),
        Part("position embedding", "P·H", a.positions * H),
        Part("attention", "4·H² + 6·H", 4 * H * H + 6 * H, a.layers),
        Part("mlp", "2·H·F + F + 3·H", 2 * H * F + F + 3 * H, a.layers),
        Part("final norm", "2·H", 2 * H),
        *(() if a.tied else (Part("head", "V·H", V * H),)),
    )


def _llama(a: Architecture) -> tuple[Part, ...]:
    H, F, V, D, E = a.hidden, a.intermediate, a.vocabulary, a.width, a.kv_width
    attention, formula = 2 * H * D + 2 * H * E + H, "2·H·N·d + 2·H·K·d + H"
    if a.qkv_bias:
        attention, formula = attention + D + 2 * E, formula + " + N·d + 2·K·d"
    if a.output_bias:
        attention, formula = attention + H, formula + " + H"
    mlp, mlp_formula = 3 * H * F + H, "3·H·F + H"
    if a.mlp_bias:
        mlp, mlp_formula = mlp + 2 * F + H, mlp_formula + " + 2·F + H"
    return (
        Part("token embedding", "V·H", V * H),
        Part("attention", formula, attention, a.layers),
        Part("mlp", mlp_formula, mlp, a.layers),
        Part("final norm", "H", H),
        *(() if a.tied else (Part("head", "V·H", V * H),)),
    )


def _bert(a: Architecture) -> tuple[Part, ...]:
    H, F, V = a.hidden, a.intermediate, a.vocabulary
    return (
        Part("token embedding", "V·H", V * H),
        Part("position embedding", "(P + 2)·H + 2·H", (a.positions + TOKEN_TYPES) * H + 2 * H),
        Part("attention", "4·H² + 6·H", 4 * H * H + 6 * H, a.layers),
        Part("mlp", "2·H·F + F + 3·H", 2 * H * F + F + 3 * H, a.layers),
        Part("head transform", "H² + 3·H + V", H * H + 3 * H + V),
        *(() if a.tied else (Part("head", "V·H", V * H),)),
    )


_PARTS = {Family.GPT2: _gpt2, Family.LLAMA: _llama, Family.BERT: _bert}
