"""Bytes of a checkpoint, dtype by dtype, from the headers of its safetensors files; no tensor is read.

A file begins with the header's length as eight little-endian bytes, then a JSON object: for each tensor its ``dtype``,
``shape`` and ``data_offsets`` (https://huggingface.co/docs/safetensors, "Format"). An index names each tensor's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.estimate.config_file import ConfigError, read_json

#: Bits of an element of each dtype of the format.
BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)
#: The format's own limit on a header.
LARGEST_HEADER_NBYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint.

    Attributes:
        source: the file.
        tensors: how many.
        elements: of all tensors.
        nbytes: of all tensors.
        by_dtype: ``(dtype, bytes)``, largest first.
    """

    source: str
    tensors: int
    elements: int
    nbytes: int
    by_dtype: tuple[tuple[str, int], ...]

    @property
    def formula(self) -> str:
        """The bytes as a sum over dtypes."""
        return " + ".join(f"{dtype} {nbytes}" for dtype, nbytes in self.by_dtype) or "0"


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the dtypes and sizes of a ``.safetensors`` file, of an index, or of a directory that has either.

    Raises:
        ConfigError: no such checkpoint, or a file that breaks the format.
        OSError: it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        found = [file / name for name in ("model.safetensors.index.json", "model.safetensors")]
        file = next((item for item in found if item.is_file()), found[1])
    files = _indexed(file) if file.name.endswith(".json") else (file,)
    sizes: dict[str, int] = {}
    tensors = elements = 0
    for part in files:
        for name, entry in _header(part).items():
            if name == "__metadata__":
                continue
            dtype, count, nbytes = _tensor(part, name, entry)
            sizes[dtype] = sizes.get(dtype, 0) + nbytes
            tensors, elements = tensors + 1, elements + count
    by_dtype = tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
    return Checkpoint(str(file), tensors, elements, sum(sizes.values()), by_dtype)


def _indexed(index: Path) -> tuple[Path, ...]:
    """The files an index names, each once."""
    content = read_json(index, "an index of safetensors files", limit=LARGEST_HEADER_NBYTES)
    weights = content.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ConfigError(str(index), 'it has no "weight_map"; is it the index of a checkpoint?')
    files = []
    for name in sorted({str(item) for item in weights.values()}):
        if Path(name).name != name:
            raise ConfigError(str(index), f"it names a file elsewhere: {name[:80]!r}")
        if not (index.parent / name).is_file():
            raise ConfigError(str(index), f"{name} is not beside it; dtypes stand in the files' headers")
        files.append(index.parent / name)
    return tuple(files)


def _header(file: Path) -> dict[str, Any]:
    total = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if total < 8 or length > min(LARGEST_HEADER_NBYTES, total - 8):
            raise ConfigError(str(file), "not a safetensors file: its header is longer than the file")
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ConfigError(str(file), "not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise ConfigError(str(file), "not a safetensors file: its header is no JSON object")
    return header


def _tensor(file: Path, name: str, entry: Any) -> tuple[str, int, int]:
    """Dtype, elements and bytes of one entry; raise `ConfigError` where they contradict one another."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    whole = all(
        isinstance(items, list) and all(isinstance(item, int) and item >= 0 for item in items)
        for items in (shape, offsets)
    )
    if not isinstance(dtype, str) or dtype not in BITS or not whole or len(offsets) != 2:  # type: ignore[arg-type]
        raise ConfigError(str(file), f"tensor {name[:80]!r}: dtype, shape or data_offsets are missing or unknown")
    count = prod(shape)  # type: ignore[arg-type]
    nbytes = offsets[1] - offsets[0]  # type: ignore[index]
    if nbytes != -(-count * BITS[dtype] // 8):
        raise ConfigError(str(file), f"tensor {name[:80]!r}: {nbytes} bytes are not its shape in {dtype}")
    return dtype, count, nbytes
