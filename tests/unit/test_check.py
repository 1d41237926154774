"""What a plan is compared with, and where nothing can be compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

from planner.pipeline import plan
from planner.trace import trace
from runtime.check import Check, draws_masks
from runtime.cli.output import print_plan


@pytest.mark.parametrize("mode", ["forward", "joint", "backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_backward_is_handed_its_masks_the_others_draw_them(mode: str, dropout: float) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout))
    graph = trace(module, (torch.ones(2, 4),), mode=mode)
    assert draws_masks(graph) == (dropout > 0 and mode != "backward")


def test_a_run_that_was_not_compared_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(trace(nn.Linear(4, 4), (torch.ones(2, 4),), loss=lambda y: F.relu(y).sum()))
    check = Check(0.0, 0.0, "", 1e-5, 0, 0.1, 0, 0.1, compared=False)
    assert check.passed
    assert check.fields()["compared"] is False
    assert check.fields()["max_rel_error"] is None
    print_plan("a plan", planned, check)
    assert "not compared" in " ".join(capsys.readouterr().out.split())
    assert not Check(0.0, 0.1, "output.0", 1e-5, 0, 0.1, 0, 0.1).passed
