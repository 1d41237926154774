"""Small models built from code, each with inputs and a loss: what people train, at a size a test can afford."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Case:
    """A module in training mode, its keyword inputs for a seed, and the scalar loss of its output."""

    module: nn.Module
    inputs: Callable[[int], dict[str, Any]]
    loss: Callable[[Any], torch.Tensor]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(vocabulary: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda seed: torch.randint(0, vocabulary, shape, generator=_generator(seed))


def next_token_loss(logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every position's logits against a fixed token, so that no target is an input."""
    targets = torch.arange(logits.shape[0] * logits.shape[1]) % logits.shape[-1]
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)


def _logits_loss(output: Any) -> torch.Tensor:
    return next_token_loss(output.logits)


def _own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def gpt2(attention: str = "sdpa", *, labels: bool = False) -> Case:
    """Two layers of Hugging Face's GPT-2: tied embeddings, tanh GELU, dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=67, n_positions=32, n_embd=24, n_layer=2, n_head=3, use_cache=False, attn_implementation=attention
    )
    return _language_model(GPT2LMHeadModel(config), 67, 12, labels=labels)


def bert(attention: str = "sdpa", *, labels: bool = False) -> Case:
    """Two layers of Hugging Face's BERT with its masked-language head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=67,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    case = _language_model(BertForMaskedLM(config), 67, 12, labels=labels)

    def inputs(seed: int) -> dict[str, Any]:
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 9:] = 0
        return {**case.inputs(seed), "attention_mask": mask}

    return Case(case.module, inputs, case.loss)


def llama(attention: str = "sdpa", *, labels: bool = False) -> Case:
    """Two layers of Hugging Face's Llama: grouped queries, rotary positions, RMSNorm, SwiGLU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        use_cache=False,
        attn_implementation=attention,
    )
    return _language_model(LlamaForCausalLM(config), 67, 12, labels=labels)


def _language_model(module: nn.Module, vocabulary: int, length: int, *, labels: bool) -> Case:
    draw = _tokens(vocabulary, 2, length)

    def inputs(seed: int) -> dict[str, Any]:
        tokens = {"input_ids": draw(seed)}
        return {**tokens, "labels": draw(seed + 100)} if labels else tokens

    return Case(module.train(), inputs, _own_loss if labels else _logits_loss)


def vit(attention: str = "sdpa", *, labels: bool = False) -> Case:
    """Two layers of Hugging Face's ViT with its classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation=attention,
    )
    config.problem_type = "single_label_classification"

    def inputs(seed: int) -> dict[str, Any]:
        pixels = {"pixel_values": torch.randn(2, 3, 16, 16, generator=_generator(seed))}
        return {**pixels, "labels": torch.tensor([seed % 5, 3])} if labels else pixels

    def loss(output: Any) -> torch.Tensor:
        return functional.cross_entropy(output.logits, torch.tensor([1, 4]))

    return Case(ViTForImageClassification(config).train(), inputs, _own_loss if labels else loss)


def t5(attention: str = "eager", *, labels: bool = False) -> Case:
    """Two encoder and two decoder layers of Hugging Face's T5: relative positions, cross attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=67,
        d_model=24,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation=attention,
    )
    draw = _tokens(67, 2, 10)

    def inputs(seed: int) -> dict[str, Any]:
        target = "labels" if labels else "decoder_input_ids"
        return {"input_ids": draw(seed), target: draw(seed + 100)[:, :7].contiguous()}

    return Case(T5ForConditionalGeneration(config).train(), inputs, _own_loss if labels else _logits_loss)


def encoder(norm_first: bool = False, activation: str = "gelu") -> Case:
    """``nn.TransformerEncoder`` in training mode, with a padding mask."""
    layer = nn.TransformerEncoderLayer(
        24, 3, 40, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
    )
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()

    def inputs(seed: int) -> dict[str, Any]:
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[0, 7:] = True
        return {"src": torch.randn(2, 9, 24, generator=_generator(seed)), "src_key_padding_mask": padding}

    return Case(module, inputs, lambda output: output.square().mean())


def multihead(boolean: bool) -> Case:
    """``nn.MultiheadAttention`` with a causal mask, boolean or added."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 3, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            mixed, weights = self.attention(x, x, x, attn_mask=mask)
            return mixed.sin().sum() + weights.square().sum()

    causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
    mask = causal if boolean else torch.zeros(9, 9).masked_fill(causal, float("-inf"))

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": torch.randn(2, 9, 24, generator=_generator(seed)), "mask": mask.clone()}

    return Case(Attend().train(), inputs, lambda output: output)


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(out)
        self.two = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_two(self.two(functional.relu(self.norm_one(self.one(x)), inplace=True)))
        return functional.relu(y + self.short(x))


def resnet() -> Case:
    """A small residual network with batch normalisation, max pooling and a pooled classifier."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        _Block(8, 8, 1),
        _Block(8, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    ).train()

    def inputs(seed: int) -> dict[str, Any]:
        return {"input": torch.randn(3, 3, 14, 14, generator=_generator(seed))}

    return Case(module, inputs, lambda output: functional.cross_entropy(output, torch.tensor([0, 2, 4])))


class _Mixing(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, patches))
        self.channels = nn.Sequential(nn.Linear(width, 36), nn.GELU(), nn.Linear(36, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


def mixer() -> Case:
    """An MLP-Mixer: patches by a linear map, token and channel mixing, mean pooling."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(48, 18)
            self.blocks = nn.Sequential(_Mixing(9, 18), _Mixing(9, 18))
            self.norm = nn.LayerNorm(18)
            self.head = nn.Linear(18, 5)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
            return self.head(self.norm(self.blocks(self.embed(patches))).mean(1))

    def inputs(seed: int) -> dict[str, Any]:
        return {"images": torch.randn(2, 3, 12, 12, generator=_generator(seed))}

    return Case(Mixer().train(), inputs, lambda output: functional.cross_entropy(output, torch.tensor([1, 3])))


def char_gpt() -> Case:
    """A character-level GPT of one's own: one embedding matrix for input and output, causal attention, dropout."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm_one, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = (
                part.view(batch, length, 3, -1).transpose(1, 2)
                for part in self.qkv(self.norm_one(x)).split(width, dim=2)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + functional.dropout(self.mlp(self.norm_two(x)), 0.1)

    class CharGPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(53, 24), nn.Embedding(16, 24)
            self.layers = nn.Sequential(Layer(24), Layer(24))
            self.norm = nn.LayerNorm(24)
            self.head = nn.Linear(24, 53, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            logits = self.head(self.norm(self.layers(x)))
            return functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1, ignore_index=-1
            )

    draw = _tokens(53, 2, 16)

    def inputs(seed: int) -> dict[str, Any]:
        targets = draw(seed + 100)
        targets[0, :3] = -1
        return {"tokens": draw(seed), "targets": targets}

    return Case(CharGPT().train(), inputs, lambda output: output)


CASES: dict[str, Callable[[], Case]] = {
    **{
        f"{family.__name__}-{attention}{'-labels' if labels else ''}": (
            lambda family=family, attention=attention, labels=labels: family(attention, labels=labels)
        )
        for family in (gpt2, bert, llama, vit, t5)
        for attention in ("eager", "sdpa")
        for labels in (False, True)
    },
    "encoder": encoder,
    "encoder-norm-first-relu": lambda: encoder(norm_first=True, activation="relu"),
    "multihead-boolean-mask": lambda: multihead(boolean=True),
    "multihead-float-mask": lambda: multihead(boolean=False),
    "resnet": resnet,
    "mixer": mixer,
    "char-gpt": char_gpt,
}


def build(name: str) -> Case:
    """A model by name, with the same weights every time; skips the test where its library is not installed."""
    if name.startswith(("gpt2", "bert", "llama", "vit", "t5")):
        pytest.importorskip("transformers", reason="Hugging Face models are not installed")
    torch.manual_seed(0)
    return CASES[name]()
