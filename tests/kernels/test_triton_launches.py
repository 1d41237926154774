"""What a planned step launches on a GPU, with a driver that only reports a target: kernels compile, nothing runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton_process


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    script = Path(__file__).with_name("recorded_step.py")
    return json.loads(triton_process.run(str(script), cache=tmp_path_factory.mktemp("triton")))


def test_every_step_launches_what_was_bound_in_order(recorded):
    first, second = recorded["steps"][:2]
    assert first == second
    names = [name for name, _, _ in first]
    assert names == [name for name, _ in recorded["bound"]]
    grids = [[*grid, *[1] * (3 - len(grid))] for _, grid in recorded["bound"]]
    assert grids == [grid for _, grid, _ in first]


def test_attention_launches_one_softmax_each_way_between_its_products(recorded):
    """B = 2, N = 3, L = 64, d = 32: rows of 64 in tiles of 4, one tile of 64 × 64 for each product of each head."""
    launches = [(name, tuple(grid)) for name, grid, _ in recorded["steps"][0]]
    assert launches.count(("softmax_kernel", (2 * 3 * 64 // 4, 1, 1))) == 1
    assert launches.count(("softmax_backward_kernel", (2 * 3 * 64 // 4, 1, 1))) == 1
    products = [grid for name, grid in launches if name == "matmul_kernel"]
    assert products
    assert set(products) == {(6, 1, 1)}
    order = [name for name, _ in launches]
    assert order.index("matmul_kernel") < order.index("softmax_kernel") < order.index("softmax_backward_kernel")


def test_a_view_that_is_not_aligned_is_compiled_anew(recorded):
    """So slots are kept aligned: 128 bytes on takes the same kernel, 2 bytes on another."""
    assert [count for (count,) in recorded["steps"][2:]] == [1, 1, 2]


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    script = Path(__file__).with_name("recorded_update.py")
    return json.loads(triton_process.run(str(script), cache=tmp_path_factory.mktemp("triton")))


def test_training_steps_launch_one_update_for_each_dtype_and_wait_for_nothing(updates):
    """Three steps with a schedule, while reading a tensor on the host is an error, as is looking at what they did."""
    for name, dtypes in (("fp16", 1), ("mixed", 2)):
        first, *others = updates[name]["steps"]
        assert others == [first, first]
        tail = ["scan_kernel"] * dtypes + ["decide_kernel"] + ["update_kernel", "advance_kernel"] * dtypes
        assert first[-len(tail) :] == tail
        assert first.count("update_kernel") == dtypes
        assert updates[name]["looked"] == "a tensor is read"
