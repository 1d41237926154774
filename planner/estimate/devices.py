"""The memory of common GPUs, as their vendors state it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its nominal memory in bytes."""

    name: str
    nbytes: int


def _gpu(name: str, gibibytes: int) -> Gpu:
    return Gpu(name, gibibytes * 2**30)


#: Nominal capacities from the vendors' data sheets (NVIDIA T4, V100, L4, A10, RTX 4090, RTX 5090, A6000, L40S, A100,
#: H100, H200, B200; AMD Instinct MI210, MI250X per die, MI300X), read as GiB; drivers report up to 4 % less, more with
#: error correction on GDDR memory. Smallest first.
GPUS: tuple[Gpu, ...] = (
    _gpu("T4, V100 16 GB, RTX 4080", 16),
    _gpu("L4, A10, RTX 3090, RTX 4090", 24),
    _gpu("V100 32 GB, RTX 5090", 32),
    _gpu("A100 40 GB", 40),
    _gpu("L40S, RTX A6000, RTX 6000 Ada", 48),
    _gpu("MI210, MI250X (one die)", 64),
    _gpu("A100 80 GB, H100", 80),
    _gpu("H200", 141),
    _gpu("B200", 180),
    _gpu("MI300X", 192),
)
