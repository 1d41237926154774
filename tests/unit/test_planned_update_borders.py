"""The planned update at its borders: what is refused, plan files, 16-bit models of every kind."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn
from typer.testing import CliRunner

from planner.graph import TensorRef
from runtime import ArenaRuntime, TrainingStep
from runtime.cli import app
from runtime.errors import ArenaError, InputError, OptimizerError
from runtime.measure import allocations
from runtime.optimizer import FusedAdamW, FusedSGD
from tests.planned_helpers import data, loss32, net

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_cannot_be_planned_is_refused() -> None:
    model = net()
    step = TrainingStep(model, loss32, data(0), optimizer=FusedAdamW(model.parameters()))
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    with pytest.raises(InputError, match="zero_grad"):
        step(data(0))
    first.grad = None
    step(data(0))
    stranger = nn.Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match="no parameter of the model"):
        TrainingStep(model, loss32, data(0), optimizer=FusedSGD([*net().parameters(), stranger]))
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    tied[1].weight = nn.Parameter(tied[0].weight.data)
    with pytest.raises(OptimizerError, match="two Parameters over the same memory"):
        TrainingStep(tied, loss32, data(0), optimizer=FusedSGD(tied.parameters()))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fused_attention_convolutions_and_batch_norms_in_16_bits(precision: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.norm = nn.Conv1d(6, 16, 3, padding=1), nn.BatchNorm1d(16)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.conv(x)).relu().transpose(1, 2)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2)).mean(1)

    x, target = torch.randn(4, 6, 10), torch.randint(0, 3, (4,))
    losses = {}
    for kind in ("fp32", precision):
        model = Mixed()
        optimizer = FusedAdamW(model.parameters(), lr=0.01)
        step = TrainingStep(model, F.cross_entropy, (x, target), optimizer=optimizer, precision=kind, attention="fused")
        losses[kind] = [step((x, target)).item() for _ in range(5)]
        assert step.stepped
        buffers = dict(model.named_buffers())
        assert buffers["norm.running_mean"].dtype is torch.float32
        assert int(buffers["norm.num_batches_tracked"]) == 5
    assert losses["fp32"][-1] < losses["fp32"][0]
    assert losses[precision] == pytest.approx(losses["fp32"], abs=0.02)


@pytest.mark.parametrize("change", ["block", "groups", "gradient", "rule", "states", "steps", "control"])
def test_a_plan_whose_update_does_not_fit_its_memory_is_refused(change: str) -> None:
    """The kernels go by addresses: a plan file must not send them outside the arena."""
    model = net()
    made = TrainingStep(model, loss32, data(0), optimizer=FusedAdamW(model.parameters())).plan
    graph = made.graph
    update = graph.operations[-1]
    arguments, keywords = list(update.arguments), dict(update.keywords)
    names = {tensor.name: TensorRef(index) for index, tensor in enumerate(graph.tensors)}
    match change:
        case "block":
            arguments[2] = (names["optimizer.control"], *arguments[2][1:])
        case "groups":
            keywords["groups"] = (1, *keywords["groups"][1:])
        case "gradient":
            arguments[1] = (arguments[1][1], *arguments[1][1:])
        case "rule":
            keywords["rule"] = "sgd"
        case "states":
            keywords["states"] = "8bit"
        case "steps":
            arguments[3] = names["optimizer.settings"]
        case "control":
            arguments[5] = names["optimizer.settings"]
    written = tuple(item.tensor for item in (*arguments[0], *arguments[2], arguments[3]))
    broken = replace(
        update, arguments=tuple(arguments), keywords=tuple(sorted(keywords.items())), outputs=tuple(set(written))
    )
    operations = (*graph.operations[:-1], broken)
    with pytest.raises(ArenaError, match="plan again"):
        ArenaRuntime(replace(made, graph=replace(graph, operations=operations)))


def test_the_command_runs_a_saved_step_and_checks_it(tmp_path: Path) -> None:
    """States that a plan changes are not shared between the run and the one it is compared with."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = FusedAdamW(model.parameters(), max_grad_norm=1.0)
    step = TrainingStep(model, loss32, data(0), optimizer=optimizer, precision="fp16")
    step.plan.save(tmp_path / "step.json")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "step.json"), "--check", "--json"])
    assert result.exit_code == 0, result.stderr
    fields = json.loads(result.stdout)
    assert (fields["differing"], fields["allocator_calls"]) == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_models_train_in_fp16(family: str, attention: str) -> None:
    """Dict batches and a loss inside of the model; beside FP32 in eager PyTorch. Measured: 5e-4 at most."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
        "attn_implementation": attention,
    }
    torch.manual_seed(0)
    if family == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, **dropouts, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, **heads, **sizes)
        model = transformers.LlamaForCausalLM(config)

    def example(number: int) -> dict[str, torch.Tensor]:
        start = torch.randint(0, 64, (4, 1), generator=torch.Generator().manual_seed(number))
        ids = (start + torch.arange(16)) % 64
        return {"input_ids": ids, "labels": ids.clone()}

    eager = copy.deepcopy(model)
    reference = torch.optim.AdamW(eager.parameters(), lr=3e-3)
    step = TrainingStep(model, None, example(0), optimizer=FusedAdamW(model.parameters(), lr=3e-3), precision="fp16")
    losses = []
    for number in range(30):
        loss = eager(**example(number)).loss
        loss.backward()
        reference.step()
        reference.zero_grad()
        losses.append(loss.item())
        assert step(example(number)).item() == pytest.approx(loss.item(), abs=3e-3)
        assert step.stepped
    assert losses[-1] < losses[0] - 1
    last = example(0)
    assert allocations(lambda: step(last)).calls == 0


def test_a_state_loaded_with_another_seed_is_planned_with_it() -> None:
    """The seed of random rounding is part of the plan."""
    ends = []
    for seed in (3, 7):
        model = net(torch.bfloat16)
        optimizer = FusedAdamW(model.parameters(), lr=0.01, master="stochastic", seed=seed)
        step = TrainingStep(model, loss32, data(0, dtype=torch.bfloat16), optimizer=optimizer)
        if seed == 3:
            other = FusedAdamW(net(torch.bfloat16).parameters(), lr=0.01, master="stochastic", seed=7)
            optimizer.load_state_dict(other.state_dict())
        for number in range(3):
            step(data(number, dtype=torch.bfloat16))
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))
