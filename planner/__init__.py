"""arenaplan's planner: trace a training step, plan where every tensor lies, inspect and save the plan.

The public names are imported when they are first used: packing and inspecting need no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner import estimate as estimate
    from planner.pipeline import plan
    from planner.plan import Plan
    from planner.trace import trace
    from planner.verify import verify

_HOMES = {"Plan": "planner.plan", "plan": "planner.pipeline", "trace": "planner.trace", "verify": "planner.verify"}


class _Package(ModuleType):
    """The package, in which ``plan``, ``trace`` and ``verify`` are functions although submodules have these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return  # the import system binds every submodule it loads
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "estimate":
            return import_module("planner.estimate")
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value


sys.modules[__name__].__class__ = _Package

__all__ = ["Plan", "plan", "trace", "verify"]
