"""Rewrite the tables of ``docs/estimate.md``: predicted and measured memory of training steps, other estimators beside.

Every step is measured on the CPU (two steps of AdamW, float32); nothing is downloaded, weights are random. The large
models need 4 GB of memory and a few minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from planner import plan, trace  # noqa: E402
from planner.estimate import Architecture, preset, read_config, traced, training  # noqa: E402
from planner.report.facts import size_text  # noqa: E402
from planner.trace.eager import eager_memory  # noqa: E402
from runtime.arena import Arena  # noqa: E402
from runtime.measure import allocations  # noqa: E402
from tests.models.measured import OPTIMIZERS, eager_step_nbytes  # noqa: E402
from tests.models.zoo import CASES  # noqa: E402

PAGE = ROOT / "docs" / "estimate.md"
TRACED = ("<!-- traced models: tools/estimate_table.py -->", "<!-- end of traced models -->")
FORMULAS = ("<!-- closed forms: tools/estimate_table.py -->", "<!-- end of closed forms -->")
ADAMW = ("adamw", "foreach")


def deepspeed_nbytes(elements: int, gpus: int = 1) -> int:
    """DeepSpeed, "Memory Requirements", ZeRO-2 without offload: 4 · params + 16 · params / GPUs."""
    return 4 * elements + 16 * elements // gpus


def accelerate_nbytes(model_nbytes: int) -> int:
    """Four times the model, buffers included: accelerate 1.15 ``estimate-memory``, "Training using Adam", float32."""
    return 4 * model_nbytes


def model_nbytes(module: nn.Module) -> int:
    """Parameters and buffers, tied ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


def off(predicted: int, measured: int) -> str:
    """The error as a percentage."""
    return f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−")


def traced_table() -> str:
    """One row for each model of the test suite."""
    rows = [
        "| model | eager, measured | predicted | off | DeepSpeed's | accelerate's | arena, predicted | allocated |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, build in CASES.items():
        torch.manual_seed(0)
        case = build()
        inputs = case.inputs(0)
        made = plan(trace(case.module, inputs, loss=case.loss, mode="joint"), time_limit=2)
        found = traced(name, made, eager_memory(case.module, inputs, loss=case.loss))
        elements = sum(parameter.numel() for parameter in case.module.parameters())
        others = (deepspeed_nbytes(elements), accelerate_nbytes(model_nbytes(case.module)))
        kept: list[Arena] = []
        block = allocations(lambda made=made, kept=kept: kept.append(Arena(made.arena_nbytes, made.alignment)))
        allocated = block.held_nbytes - made.alignment
        measured = eager_step_nbytes(case.module, inputs, case.loss, OPTIMIZERS[ADAMW])
        predicted = found.eager_nbytes or 0
        cells = [f"{measured:,}", f"{predicted:,}", off(predicted, measured)]
        cells += [f"{nbytes:,} ({off(nbytes, measured)})" for nbytes in others]
        outside = sum(entry.nbytes for entry in made.unplanned)
        cells += [f"{made.arena_nbytes:,}{' and convolutions' if outside else ''}", f"{allocated:,}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr)
    return "\n".join(rows)


def large() -> list[tuple[str, Architecture, Callable[[], nn.Module], int, int, str]]:
    """Name, sizes, module, batch, length and attention of the models whose closed form is measured."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    still = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}

    def of(config: Any) -> Architecture:
        path = ROOT / "build" / "config.json"
        path.parent.mkdir(exist_ok=True)
        config.to_json_file(path)
        found = read_config(path)
        path.unlink()
        return found

    gpt2, bert = GPT2Config(use_cache=False, attn_implementation="eager"), BertConfig(attn_implementation="eager")
    llama = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32000, max_position_embeddings=2048, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    qwen = Qwen2Config(
        hidden_size=448, intermediate_size=1216, num_hidden_layers=6, num_attention_heads=7, num_key_value_heads=1,
        vocab_size=20000, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    fused = GPT2Config(n_layer=6, use_cache=False, attn_implementation="sdpa", **still)
    return [
        ("GPT-2 (the preset)", preset("gpt2"), lambda: GPT2LMHeadModel(gpt2), 1, 512, "materialized"),
        ("GPT-2, 6 layers, fused attention", of(fused), lambda: GPT2LMHeadModel(fused), 1, 1024, "fused"),
        ("BERT base (the preset)", preset("bert-base"), lambda: BertForMaskedLM(bert), 2, 256, "materialized"),
        ("Llama, 8 layers of 512, K = 2", of(llama), lambda: LlamaForCausalLM(llama), 2, 768, "fused"),
        ("Qwen2, 6 layers of 448, K = 1, tied", of(qwen), lambda: Qwen2ForCausalLM(qwen), 2, 768, "fused"),
    ]


def formula_table() -> str:
    """One row for each model that is estimated from its sizes alone."""
    rows = [
        "| model | batch × length | parameters | eager, measured | predicted | off | DeepSpeed's | accelerate's |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, model, build, batch, length, attention in large():
        torch.manual_seed(0)
        module = build().train()
        tokens = torch.randint(0, model.vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        found = training(
            model, batch=batch, length=length, precision="fp32", attention=attention, device="cpu", logits_held=False
        )
        others = (deepspeed_nbytes(model.parameters), accelerate_nbytes(model_nbytes(module)))
        measured = eager_step_nbytes(module, inputs, lambda output: output.loss, OPTIMIZERS[ADAMW])
        cells = [f"{batch} × {length}", f"{model.parameters:,}", size_text(measured), size_text(found.total_nbytes)]
        cells += [off(found.total_nbytes, measured)]
        cells += [f"{size_text(nbytes)} ({off(nbytes, measured)})" for nbytes in others]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr)
    return "\n".join(rows)


def replaced(page: str, marks: tuple[str, str], table: str) -> str:
    """The page with what stands between two marks replaced."""
    before, rest = page.split(marks[0])
    _, after = rest.split(marks[1])
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{after}"


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for marks, table in ((TRACED, traced_table), (FORMULAS, formula_table)):
        made = table()  # minutes; the page is read afterwards
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), marks, made), encoding="utf-8")


if __name__ == "__main__":
    main()
