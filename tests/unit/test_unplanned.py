"""What a plan lists as allocated outside the arena depends on the device it is made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.operators import MATMUL
from planner.pipeline import plan
from planner.trace import trace


@pytest.mark.parametrize(
    ("device", "dtype", "listed"),
    [
        ("cpu", torch.float16, [MATMUL]),
        ("cpu", torch.float32, []),
        ("cuda", torch.float16, []),
        ("cuda:1", torch.bfloat16, []),
    ],
)
def test_products_need_tiles_in_16_bits_on_a_cpu_alone(device: str, dtype: torch.dtype, listed: list[str]) -> None:
    graph = trace(nn.Linear(8, 4, dtype=dtype), (torch.ones(2, 8, dtype=dtype),), mode="joint")
    made = plan(graph, device=device)
    assert [entry.operator for entry in made.unplanned] == listed
    assert made.placements == plan(graph).placements
