"""Compile kernels for targets that need not be there, and read what the binaries take of the chip.

``python -m runtime.kernels.triton.offline`` compiles every configuration of the registry and prints one JSON object a
line. It must run with Triton's interpreter off (``TRITON_INTERPRET=0``).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels.triton.registry import Configuration, Kernel, kernels

#: Targets every kernel is compiled for, by the name of the architecture.
TARGETS: Mapping[str, GPUTarget] = MappingProxyType(
    {
        "sm_80": GPUTarget("cuda", 80, 32),
        "sm_90": GPUTarget("cuda", 90, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
    }
)
#: Shared memory one block may use, bytes: CUDA C++ Programming Guide, "Technical Specifications per Compute
#: Capability" (163 and 227 KB); AMD Instinct MI300 ISA, "LDS" (64 KB).
SHARED_LIMIT_NBYTES: Mapping[str, int] = MappingProxyType({"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10})
#: Instructions of the matrix units in the assembly of each target.
_MATRIX_INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {"sm_80": r"\bmma\.sync", "sm_90": r"\bwgmma\.mma_async|\bmma\.sync", "gfx942": r"\bv_mfma_"}
)
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        kernel, configuration, target: which.
        registers: of one thread (vector registers on AMD).
        spill_nbytes: of one thread, in local memory (registers times four on AMD).
        shared_nbytes: of one block.
        matrix: whether it uses matrix (tensor-core) instructions.
    """

    kernel: str
    configuration: str
    target: str
    registers: int
    spill_nbytes: int
    shared_nbytes: int
    matrix: bool


def compile_for(kernel: Kernel, configuration: Configuration, target: str) -> Resources:
    """Compile one configuration; pointers count as multiples of 16, as those of an arena are."""
    kinds = configuration.signature
    constants = {**configuration.setting.constants, **{name: 1 for name, kind in kinds.items() if kind == "=1"}}
    signature: dict[str, Any] = {name: _type(kind) for name, kind in kinds.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    order = kernel.function.arg_names
    attributes = {
        path: _DIVISIBLE
        for name, kind in kinds.items()
        for path, item in _elements(order.index(name), kind)
        if item.startswith("*") or item.endswith("%16")
    }
    source = ASTSource(kernel.function, {name: signature[name] for name in order}, constants, attributes)
    options = configuration.setting.options()
    compiled = triton.compile(
        source,
        target=TARGETS[target],
        options={name: options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")},
    )
    cuda = TARGETS[target].backend == "cuda"
    assembly = compiled.asm["ptx" if cuda else "amdgcn"]
    registers, spilled = _cuda_usage(compiled.asm["cubin"]) if cuda else _amd_usage(assembly)
    return Resources(
        kernel.name,
        configuration.name,
        target,
        registers,
        spilled,
        compiled.metadata.shared,
        re.search(_MATRIX_INSTRUCTIONS[target], assembly) is not None,
    )


def _type(kind: str) -> str | tuple[str, ...]:
    """A type as Triton's signatures have it."""
    return tuple(kind.split(",")) if "," in kind else kind.removesuffix("%16")


def _elements(position: int, kind: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path and type of an argument, or of each element of a tuple."""
    items = kind.split(",")
    for place, item in enumerate(items):
        yield ((position,) if len(items) == 1 else (position, place)), item


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of one thread, by NVIDIA's own tool in Triton's package.

    Local memory holds spilled registers and stack frames; neither is wanted.
    """
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", shown)
    registers, stack, local = map(int, usage)
    return registers, max(stack, local)


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers of one lane, and bytes of scratch, from the metadata of the code object."""

    def number(field: str) -> int:
        (value,) = set(re.findall(rf"^\s*\.{field}:\s+(\d+)", assembly, re.MULTILINE))
        return int(value)

    return number("vgpr_count"), max(4 * number("vgpr_spill_count"), number("private_segment_fixed_size"))


def resources(
    chosen: tuple[Kernel, ...], targets: tuple[str, ...], *, workers: int = 1, sample: bool = False
) -> Iterator[Resources]:
    """Compile every configuration of the kernels (or one of each, a sample) for the targets."""
    jobs = [
        (kernel, configuration, target)
        for kernel in chosen
        for configuration in (sampled(kernel) if sample else kernel.configurations)
        for target in targets
    ]
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda job: compile_for(*job), jobs)


def sampled(kernel: Kernel) -> tuple[Configuration, ...]:
    """The last configuration of the first dtype: a table lists the largest tile last."""
    first = kernel.configurations[0].name.split(maxsplit=1)[0]
    return tuple(item for item in kernel.configurations if item.name.split(maxsplit=1)[0] == first)[-1:]


def rows(items: Iterator[Resources]) -> Iterator[dict[str, Any]]:
    """As plain dictionaries."""
    return (asdict(item) for item in items)


def main(arguments: list[str] | None = None) -> None:
    """Print one JSON object for each compiled configuration."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for targets that need not be there.")
    parser.add_argument("--kernel", action="append", help="only this one (repeatable)")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one (repeatable)")
    parser.add_argument("--sample", action="store_true", help="one configuration a kernel instead of all")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = tuple(kernel for kernel in kernels() if not options.kernel or kernel.name in options.kernel)
    targets = tuple(options.target or TARGETS)
    for row in rows(resources(chosen, targets, workers=options.workers, sample=options.sample)):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
