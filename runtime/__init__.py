"""arenaplan's runtime: execute a plan out of one preallocated arena.

The public names are imported when they are first used: the commands that only read files need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.arena import Arena
    from runtime.executor import ArenaRuntime
    from runtime.mixed_precision import initialize
    from runtime.training import TrainingStep

_HOMES = {
    "Arena": "runtime.arena",
    "ArenaRuntime": "runtime.executor",
    "TrainingStep": "runtime.training",
    "initialize": "runtime.mixed_precision",
}


def __getattr__(name: str) -> Any:
    if name == "optimizer":
        return import_module("runtime.optimizer")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = ["Arena", "ArenaRuntime", "TrainingStep", "initialize"]
