"""What a module takes and returns beside tensors of its own: inputs over the same memory, numbers, other objects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from planner import plan, trace
from planner.errors import TraceError
from runtime import ArenaRuntime
from runtime.cli import app

SHARED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, one, two):
        scores = self.table(one) if one.dtype == torch.int64 else one @ self.table.weight
        return (scores * (two[:, None] if one.dtype == torch.int64 else two.clamp(-9, 9))).sum()

def same():
    numbers = torch.tensor([1, 5, 3])
    return Model(), (numbers, numbers)

def by_name():
    numbers = torch.tensor([1, 5, 3])
    return Model(), {"one": numbers, "two": numbers}

def shifted():
    numbers = torch.tensor([1, 5, 3, 8])
    return Model(), (numbers[:-1], numbers[1:])

def transposed():
    square = torch.randn(9, 9)
    return Model(), (square, square.t())

def bits():
    square = torch.randn(9, 9)
    return Model(), (square, square.view(torch.int32))

def wanting_a_gradient():
    square = torch.randn(9, 9, requires_grad=True)
    return Model(), (square, square)
"""


CASES = [
    *((factory, "backward") for factory in ("same", "by_name", "transposed", "bits", "wanting_a_gradient")),
    *((factory, "joint") for factory in ("same", "by_name", "shifted", "transposed", "bits", "wanting_a_gradient")),
    *((factory, "forward") for factory in ("same", "by_name", "shifted", "transposed", "bits")),
]


@pytest.mark.parametrize(("factory", "pass_name"), CASES)
def test_inputs_over_the_same_memory_run_and_run_from_a_file(tmp_path: Path, factory: str, pass_name: str) -> None:
    """Labels that are the inputs, as language models are trained: copies of the inputs must share as they do."""
    (tmp_path / "model.py").write_text(SHARED)
    saved = tmp_path / "plan.json"
    arguments = ["plan", f"{tmp_path}/model.py:{factory}", "--pass", pass_name, "--run", "--steps", "2", "--json"]
    planned = CliRunner().invoke(app, [*arguments, "-o", str(saved)])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["max_rel_error"] <= 1e-5
    ran = CliRunner().invoke(app, ["run", str(saved), "--steps", "2", "--check", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["differing"] == []


class Kind(Enum):
    ONE = 1


@dataclass
class Pair:
    first: torch.Tensor


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.make = make

    def forward(self, x):
        return self.make(self.layer(x))


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("other", [3, 2.5, "text", True, None, Kind.ONE, torch.float32, range(3), ...])
def test_what_is_returned_beside_tensors_comes_back(other: object) -> None:
    module = Returns(lambda y: {"y": y, "other": (other, y.shape)})
    run = ArenaRuntime(plan(trace(module, (X,), mode="forward")))
    result = run(X)
    torch.testing.assert_close(result["y"], module(X)["y"].detach())
    assert result["other"] == (other, (2, 3))
    graph = trace(module, (X,), mode="backward")
    assert graph.forward is not None
    assert graph.forward(X)[0]["other"] == (other, (2, 3))


@pytest.mark.parametrize("mode", ["forward", "joint", "backward"])
@pytest.mark.parametrize(
    "make", [Pair, lambda y: (y, Pair(y)), lambda y: (y, {1}), lambda y: (y, object()), lambda y: (y, np.float32(2))]
)
def test_objects_that_may_hold_tensors_are_refused_by_their_type(make, mode: str) -> None:
    """A Hugging Face model's DynamicCache, or a dataclass."""
    with pytest.raises(TraceError, match=r"the output: it holds a \w+, which cannot be taken apart into tensors; "):
        trace(Returns(make), (X,), mode=mode)


@pytest.mark.parametrize("apart", [False, True])
def test_saved_parts_of_one_memory_are_refused_or_right(apart: bool) -> None:
    """A backward saves one tensor for each storage: of one part of it, the other part cannot be read."""
    numbers = torch.tensor([1, 5, 3, 8])
    one, two = (numbers[:-1].clone(), numbers[1:].clone()) if apart else (numbers[:-1], numbers[1:])
    table = nn.Embedding(9, 9)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, one, two):
            return (self.table(one) * two[:, None]).sum()

    if not apart:
        with pytest.raises(TraceError, match=r"none of them is all of it; pass copies of them \(clone\(\)\)"):
            trace(Model(), (one, two))
        return
    graph = trace(Model(), (one, two))
    Model()(one, two).backward()
    assert graph.forward is not None
    found = ArenaRuntime(plan(graph), state=dict(Model().named_parameters()))(
        *graph.forward(one, two)[1], torch.ones(())
    )
    torch.testing.assert_close(found["table.weight"], table.weight.grad)
