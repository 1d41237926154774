"""Warps and pipeline stages chosen by timing on the device: off unless ``ARENAPLAN_AUTOTUNE=1``, never interpreted.

Only how a kernel is compiled changes, not its tiles, so grids and workspaces stay what they are. The choice is made
once for a kernel, its constants, the dtypes of its operands and the class of their sizes, and kept on disk for the
device and the version of Triton: the same inputs give the same bits as long as that file is the same.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from runtime.kernels.triton.launch import INTERPRETED, Launch, Setting

#: Kernels that read no places from memory, so that any values will do to time them.
TUNED = frozenset(
    {
        "attention_delta_kernel",
        "attention_kernel",
        "attention_keys_kernel",
        "attention_queries_kernel",
        "matmul_kernel",
        "norm_backward_kernel",
        "norm_kernel",
        "pointwise_kernel",
        "softmax_backward_kernel",
        "softmax_kernel",
    }
)
#: How much faster another setting must be to take the place of the static one.
MARGIN = 0.97
MOST_WARPS, MOST_STAGES = 16, 4

Timer = Callable[[Launch], float]
#: Warps and stages.
Choice = tuple[int, int]


def enabled() -> bool:
    """Whether launches are to be tuned."""
    return os.environ.get("ARENAPLAN_AUTOTUNE") == "1" and not INTERPRETED and torch.cuda.is_available()


def candidates(setting: Setting) -> Iterator[Choice]:
    """The static choice, then half and twice its warps, then a stage less or more where there are several."""
    warps, stages = setting.num_warps, setting.num_stages
    yield warps, stages
    for other in (warps // 2, warps * 2):
        if 1 <= other <= MOST_WARPS:
            yield other, stages
    for other in (stages - 1, stages + 1) if stages > 1 else ():
        if 1 <= other <= MOST_STAGES:
            yield warps, other


def key_of(launch: Launch, device: str) -> str:
    """What a choice is kept under; sizes count by the power of two they are below."""
    kinds = []
    for argument in _flat(launch.arguments):
        if isinstance(argument, torch.Tensor):
            kinds.append(str(argument.dtype).removeprefix("torch."))
        elif isinstance(argument, int):
            kinds.append(f"2^{argument.bit_length()}")
        else:
            kinds.append("number")
    constants = " ".join(f"{name}={value}" for name, value in launch.setting.constants.items())
    return " | ".join((device, triton.__version__, _name(launch), constants, " ".join(kinds)))


def tuned(launch: Launch, timer: Timer, device: str, kept: dict[str, Choice]) -> Launch:
    """The launch with the fastest choice: the kept one if it is a candidate, else timed and added to ``kept``.

    The tensors it works on hold afterwards what they held before. A choice that does not compile or fit is passed over.
    """
    if _name(launch) not in TUNED:
        return launch
    key, choices = key_of(launch, device), tuple(dict.fromkeys(candidates(launch.setting)))
    if kept.get(key) in choices:
        return _with(launch, kept[key])
    tensors = [item for item in _flat(launch.arguments) if isinstance(item, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    best, fastest = choices[0], float("inf")
    for choice in choices:
        try:
            seconds = timer(_with(launch, choice))
        except (RuntimeError, triton.runtime.errors.OutOfResources, triton.CompilationError):
            continue
        if seconds < fastest * (MARGIN if choice != choices[0] else 1.0):
            best, fastest = choice, seconds
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)
    kept[key] = best
    return _with(launch, best)


def tune(
    program: list[Any], timer: Timer | None = None, path: Path | None = None, device: str | None = None
) -> list[Any]:
    """A bound program with its launches tuned; choices are read from and added to a file."""
    file = path or _default_path()
    name = torch.cuda.get_device_name() if device is None else device
    kept = read(file)
    known = dict(kept)
    chosen = [tuned(item, timer or _benchmark, name, kept) if isinstance(item, Launch) else item for item in program]
    if kept != known:
        write(file, kept)
    return chosen


def read(path: Path) -> dict[str, Choice]:
    """The choices in a file; what is damaged or of another kind counts as not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {
        key: (value[0], value[1])
        for key, value in items
        if isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)
    }


def write(path: Path, kept: dict[str, Choice]) -> None:
    """Replace the file whole; where it cannot be written, launches are timed again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            json.dump({key: list(kept[key]) for key in sorted(kept)}, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return


def _default_path() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "arenaplan" / "triton-settings.json"


def _benchmark(launch: Launch) -> float:
    milliseconds: float = triton.testing.do_bench(launch, warmup=5, rep=20, return_mode="median")
    return milliseconds / 1e3


def _with(launch: Launch, choice: Choice) -> Launch:
    warps, stages = choice
    return replace(launch, setting=replace(launch.setting, num_warps=warps, num_stages=stages))


def _name(launch: Launch) -> str:
    return str(launch.kernel.fn.__name__)


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _flat(argument)
        else:
            yield argument
