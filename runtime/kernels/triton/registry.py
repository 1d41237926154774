"""Every Triton kernel with every configuration it may run in: what the compile tests go through.

A new operator's module lists its kernels in ``KERNELS`` and is named in `MODULES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from runtime.kernels.triton.launch import Setting

#: Modules of this project that define Triton kernels, each with a tuple ``KERNELS``.
MODULES: tuple[str, ...] = (
    "runtime.optimizer.triton_kernel",
    "runtime.optimizer.triton_check",
    "runtime.kernels.triton.dropout",
    "runtime.kernels.triton.softmax",
    "runtime.kernels.triton.matmul",
    "runtime.kernels.triton.norm",
    "runtime.kernels.triton.gelu",
    "runtime.kernels.triton.swiglu",
    "runtime.kernels.triton.cross_entropy",
    "runtime.kernels.triton.embedding",
    "runtime.kernels.triton.sums",
    "runtime.kernels.triton.pointwise",
    "runtime.kernels.triton.attention_launch",
)

#: Triton's names of the dtypes kernels are compiled for.
FLOATS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way a kernel is compiled.

    Attributes:
        name: unique within the kernel, for messages and the table of resources.
        signature: Triton type of every run-time argument by name, ``"*fp16"``, ``"i64"``, ``"fp32"``. As when launched,
            ``"=1"`` is an integer that is 1 and ``"i64%16"`` one that is a multiple of 16: each is compiled for itself.
            Types of a tuple stand behind one another with commas.
        setting: compile-time constants, warps and stages.
    """

    name: str
    signature: Mapping[str, str]
    setting: Setting


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and all its production configurations.

    Attributes:
        name: unique in the registry.
        function: the ``triton.jit`` function.
        configurations: everything the launchers may choose.
        matrix: whether 16-bit configurations must use tensor-core instructions.
        spill_nbytes: the most bytes of registers one thread may spill.
    """

    name: str
    function: Any
    configurations: tuple[Configuration, ...]
    matrix: bool = False
    spill_nbytes: int = 0


def signature(spec: str) -> dict[str, str]:
    """``"x:*fp16 n:i64"`` → ``{"x": "*fp16", "n": "i64"}``."""
    return dict(item.split(":") for item in spec.split())


def configurations(
    spec: str, settings: Iterable[Setting], dtypes: Iterable[str] = FLOATS, suffix: str = ""
) -> tuple[Configuration, ...]:
    """One configuration for each dtype, written ``T`` in the signature, and each setting."""
    return tuple(
        Configuration(f"{dtype} {describe(setting)}{suffix}", signature(spec.replace("*T", f"*{dtype}")), setting)
        for setting in settings
        for dtype in dtypes
    )


def describe(setting: Setting) -> str:
    """A setting as ``"BLOCK=1024 warps=4 stages=1"``."""
    constants = " ".join(f"{name}={int(value)}" for name, value in setting.constants.items())
    return f"{constants} warps={setting.num_warps} stages={setting.num_stages}"


def kernels() -> tuple[Kernel, ...]:
    """Every kernel, in the order of `MODULES`. Imports Triton."""
    found: list[Kernel] = []
    for module in MODULES:
        found += import_module(module).KERNELS
    return tuple(found)
