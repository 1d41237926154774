"""A model's sizes from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, ShapeError
from planner.estimate.architecture import Architecture, Family, size_of

#: No configuration is larger; a weight file given by mistake is.
LARGEST_FILE_NBYTES = 16 * 2**20
#: Llama-like model types: their blocks are Llama's, with the biases named.
_LLAMA_LIKE = {"llama": False, "mistral": False, "qwen2": True}
_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "half": "float16", "float": "float32"}
_NARROW = ("float8", "float4", "int8", "uint8", "int4")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "ffn_config")
_REMEDY = "trace the model instead: arenaplan estimate FILE.py:FACTORY"


class ConfigError(PlannerError):
    """A file that should describe a model does not.

    Attributes:
        source: the file.
        cause: what is wrong, and what to do.
    """

    def __init__(self, source: str, cause: str) -> None:
        self.source = source
        self.cause = cause
        super().__init__(f"{source}: {cause}")


def read_json(path: Path, what: str, limit: int = LARGEST_FILE_NBYTES) -> dict[str, Any]:
    """The JSON object in a file; raise `ConfigError` if there is none."""
    if path.is_file() and path.stat().st_size > limit:
        raise ConfigError(str(path), f"it has {path.stat().st_size} bytes, too many for {what}")
    data = path.read_bytes()
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:120] if isinstance(error, ValueError) else "it is nested too deeply"
        raise ConfigError(str(path), f"not {what}: no whole JSON ({cause})") from None
    if not isinstance(content, dict):
        raise ConfigError(str(path), f"not {what}: a JSON {type(content).__name__} where an object is expected")
    return content


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def read_config(path: str | Path) -> Architecture:
    """Read a ``config.json`` (or the directory it lies in).

    Raises:
        ConfigError: it is no JSON, it lacks a field, or the model is of a kind the formulas do not know.
        ShapeError: a size cannot be.
        OSError: it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config = read_json(file, "a model's config.json")
    return architecture_of(config, str(file))


def architecture_of(config: Mapping[str, Any], source: str) -> Architecture:
    """The sizes a configuration states; arguments and errors as `read_config`."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(source, 'it has no "model_type"; is it the config.json of a model?')
    experts = [name for name in _EXPERTS if config.get(name) not in (None, 0, 1)]
    if experts:
        raise ConfigError(source, f"model type {kind!r} has experts ({experts[0]}), which no formula covers; {_REMEDY}")
    fields = _Fields(config, source)
    name = config.get("_name_or_path")
    subject = name if isinstance(name, str) and name else kind
    if kind == "gpt2":
        return _gpt2(fields, subject)
    if kind in _LLAMA_LIKE:
        return _llama(fields, subject, qkv_bias=_LLAMA_LIKE[kind])
    if kind == "bert":
        return _bert(fields, subject)
    known = ", ".join(["gpt2", *_LLAMA_LIKE, "bert"])
    raise ConfigError(source, f"model type {kind!r} has no formula (known: {known}); {_REMEDY}")


class _Fields:
    """A configuration's fields, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number under one of the names."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return self._checked(name, value)
        if default is None:
            raise ConfigError(self.source, f'it has no "{names[0]}"')
        return default

    def optional(self, name: str) -> int | None:
        """A whole number, or ``None`` where the field is missing or null."""
        value = self.config.get(name)
        return None if value is None else self._checked(name, value)

    def _checked(self, name: str, value: object) -> int:
        try:
            return size_of(name, value)
        except ShapeError as error:
            raise ConfigError(self.source, str(error)) from None

    def flag(self, name: str, *, default: bool) -> bool:
        """A JSON boolean."""
        value = self.config.get(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(self.source, f'"{name}" is {value!r}, not true or false')
        return value

    def probability(self, name: str, default: float = 0.0) -> float:
        """A number of at least 0 and below 1."""
        value = self.config.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or not 0 <= value < 1
        ):
            raise ConfigError(self.source, f'"{name}" is {value!r}, not a probability below 1')
        return float(value)

    @property
    def quantization(self) -> str:
        """The method of ``quantization_config``, ``""`` without one."""
        value = self.config.get("quantization_config")
        if value is None:
            dtype = str(self.config.get("dtype", self.config.get("torch_dtype"))).removeprefix("torch.")
            return dtype[:40] if dtype.startswith(_NARROW) else ""
        return str(value.get("quant_method", "unknown"))[:40] if isinstance(value, dict) else "unknown"

    @property
    def dtype(self) -> str:
        """The dtype of the published weights: ``dtype``, in older files ``torch_dtype``."""
        value = self.config.get("dtype", self.config.get("torch_dtype"))
        if value is None:
            return "float32"
        name = str(value).removeprefix("torch.")
        if name.startswith(_NARROW):
            return "bfloat16"  # of activations; `quantization` says that the weights are narrower
        if name not in _DTYPES:
            known = ", ".join(sorted(set(_DTYPES.values())))
            raise ConfigError(self.source, f"its dtype {name[:40]!r} is none of {known}")
        return _DTYPES[name]


def _gpt2(fields: _Fields, subject: str) -> Architecture:
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    positions = fields.size("n_positions", "n_ctx", "max_position_embeddings")
    return Architecture(
        name=subject,
        family=Family.GPT2,
        layers=fields.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=_head_size(fields, hidden, heads),
        intermediate=fields.size("n_inner", default=4 * hidden),
        vocabulary=fields.size("vocab_size"),
        positions=positions,
        longest=positions,
        tied=fields.flag("tie_word_embeddings", default=True),
        residual_dropout=fields.probability("resid_pdrop", 0.1),
        attention_dropout=fields.probability("attn_pdrop", 0.1),
        composite_gelu=fields.config.get("activation_function", "gelu_new") in ("gelu_new", "gelu_fast"),
        dtype=fields.dtype,
        quantization=fields.quantization,
    )


def _llama(fields: _Fields, subject: str, *, qkv_bias: bool) -> Architecture:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    bias = fields.flag("attention_bias", default=False)
    windowed = fields.flag("use_sliding_window", default=True)
    return Architecture(
        name=subject,
        family=Family.LLAMA,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", default=heads),
        head_size=fields.optional("head_dim") or _head_size(fields, hidden, heads),
        intermediate=fields.size("intermediate_size"),
        vocabulary=fields.size("vocab_size"),
        longest=fields.optional("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias or bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        attention_dropout=fields.probability("attention_dropout"),
        window=fields.optional("sliding_window") if windowed else None,
        dtype=fields.dtype,
        quantization=fields.quantization,
    )


def _bert(fields: _Fields, subject: str) -> Architecture:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    positions = fields.size("max_position_embeddings", default=512)
    if fields.size("type_vocab_size", default=2) != 2:
        raise ConfigError(fields.source, '"type_vocab_size" is not 2, as in every published BERT; ' + _REMEDY)
    return Architecture(
        name=subject,
        family=Family.BERT,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=_head_size(fields, hidden, heads),
        intermediate=fields.size("intermediate_size"),
        vocabulary=fields.size("vocab_size"),
        positions=positions,
        longest=positions,
        tied=fields.flag("tie_word_embeddings", default=True),
        residual_dropout=fields.probability("hidden_dropout_prob", 0.1),
        attention_dropout=fields.probability("attention_probs_dropout_prob", 0.1),
        dtype=fields.dtype,
        quantization=fields.quantization,
    )


def _head_size(fields: _Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(
            fields.source, f"{heads} heads do not divide the hidden size {hidden}, and it has no head_dim"
        )
    return hidden // heads
