"""Every operation names the submodule and the user's line it comes from, in the backward those of its forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner import Plan, plan, trace
from planner.errors import TraceError
from planner.graph import Graph, Operation
from planner.plan_file import load_plan, save_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.dense = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.dense(self.norm(x)))


class Net(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def joint(*, recompute: bool = False) -> Graph:
    return trace(Net(recompute=recompute), (torch.randn(4, 8),), loss=lambda y: y.square().mean(), mode="joint")


def modules(graph: Graph, operator: str) -> list[str]:
    return [operation.module for operation in graph.operations if operation.operator.startswith(f"aten.{operator}.")]


@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_name_their_submodules(recompute):
    graph = joint(recompute=recompute)
    layers = ["blocks.0", "blocks.1"]
    again = ["blocks.1", "blocks.0"] if recompute else []
    assert modules(graph, "tanh") == layers + again
    assert modules(graph, "native_layer_norm") == [f"{name}.norm" for name in layers + again]
    assert modules(graph, "tanh_backward") == ["blocks.1", "blocks.0"]
    assert modules(graph, "native_layer_norm_backward") == ["blocks.1.norm", "blocks.0.norm"]
    # Gradients of weight and input of a layer; the first layer's input is normalised, so it has both as well.
    dense = ["head", "head", *["blocks.1.dense"] * 2, *["blocks.0.dense"] * 2]
    assert modules(graph, "mm") == dense


def test_the_backward_has_the_source_line_of_its_forward():
    graph = joint()
    lines = {operation.name: operation.source for operation in graph.operations if operation.module.startswith("b")}
    first = Block.forward.__code__.co_firstlineno
    assert set(lines.values()) == {f"{Path(__file__).name}:{first + 1}"}


def test_hooks_do_not_stay_behind():
    from torch.nn.modules import module as hooks

    before = dict(hooks._global_forward_pre_hooks), dict(hooks._global_forward_hooks)
    joint()
    with pytest.raises(TraceError, match="normalized_shape"):
        trace(Net(), (torch.randn(4, 9),), mode="forward")
    assert (hooks._global_forward_pre_hooks, hooks._global_forward_hooks) == before


def test_a_function_has_no_submodules():
    graph = trace(lambda x: (x @ x).relu(), (torch.randn(3, 3, requires_grad=True),))
    assert {operation.module for operation in graph.operations} == {""}


def test_the_module_survives_planning_and_the_plan_file(tmp_path):
    made = plan(joint())
    assert {operation.module for operation in made.graph.operations} >= {"blocks.0.norm", "blocks.1.dense", "head"}
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made


def test_files_without_modules_are_read_and_written_as_before(tmp_path):
    made = plan(joint())
    bare = Plan.load(_saved(made, tmp_path / "with.json"))
    operations = tuple(_without_module(operation) for operation in bare.graph.operations)
    old = replace(bare, graph=replace(bare.graph, operations=operations))
    path = _saved(old, tmp_path / "without.json")
    assert '"module"' not in path.read_text()
    assert load_plan(path) == old


def _saved(made: Plan, path: Path) -> Path:
    save_plan(made, path)
    return path


def _without_module(operation: Operation) -> Operation:
    return replace(operation, module="")
