"""Every kernel compiles for every target within the chip's limits, by what the binaries themselves say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton_process

from runtime.kernels.triton.offline import SHARED_LIMIT_NBYTES, TARGETS, sampled
from runtime.kernels.triton.registry import Kernel, kernels

KERNELS = kernels()
ROOT = Path(__file__).resolve().parents[2]
MODULE = "runtime.kernels.triton.offline"


def _compile(cache: Path, *arguments: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    lines = triton_process.run("-m", MODULE, *arguments, cache=cache).splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["kernel"], row["configuration"], row["target"]): row for row in rows}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The largest configuration of every kernel, for every target."""
    return _compile(tmp_path_factory.mktemp("triton"), "--sample", "--workers", "2")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Every configuration, for every target."""
    return _compile(tmp_path_factory.mktemp("triton"), "--workers", "2")


def _check(kernel: Kernel, row: dict[str, Any]) -> None:
    assert row["registers"] > 0
    assert row["shared_nbytes"] <= SHARED_LIMIT_NBYTES[row["target"]]
    assert row["spill_nbytes"] <= kernel.spill_nbytes
    if kernel.matrix and "fp32" not in row["configuration"]:
        assert row["matrix"]


def test_names_are_unique():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        names = [configuration.name for configuration in kernel.configurations]
        assert names
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_largest_configuration_fits_every_target(kernel, sample):
    for configuration in sampled(kernel):
        for target in TARGETS:
            _check(kernel, sample[kernel.name, configuration.name, target])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_configuration_fits_every_target(kernel, everything):
    for configuration in kernel.configurations:
        for target in TARGETS:
            _check(kernel, everything[kernel.name, configuration.name, target])


def _table() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import kernel_table
    finally:
        sys.path.pop(0)
    return kernel_table


def test_the_page_lists_every_kernel():
    table = _table()
    listed = [(name, dtype, count) for name, dtype, count, *_ in table.parse(table.PAGE.read_text(encoding="utf-8"))]
    assert sorted(set(listed)) == sorted(table.listing(KERNELS)), "run tools/kernel_table.py"


def test_the_page_covers_the_sample(sample):
    """No configuration takes more registers or shared memory than the page says."""
    table = _table()
    page = {(*row[:2], row[3]): row for row in table.parse(table.PAGE.read_text(encoding="utf-8"))}
    for row in sample.values():
        *_, registers, spilled, shared, _ = page[row["kernel"], table.dtype(row["configuration"]), row["target"]]
        assert row["registers"] <= registers, "run tools/kernel_table.py"
        assert row["spill_nbytes"] <= spilled, "run tools/kernel_table.py"
        assert row["shared_nbytes"] <= shared, "run tools/kernel_table.py"


@pytest.mark.slow
def test_the_page_is_what_compiling_gives(everything):
    table = _table()
    assert table.PAGE.read_text(encoding="utf-8") == table.render(list(everything.values())), (
        "run tools/kernel_table.py"
    )
