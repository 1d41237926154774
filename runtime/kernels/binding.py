"""What a kernel is bound with, and what binding gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from planner.graph import Argument, Operation, TensorRef
from runtime.errors import ArenaError

Call = Callable[[], object]


@dataclass(slots=True)
class Context:
    """The arena views of a plan's tensors, and scratch the calls share because they run one after the other.

    Attributes:
        views: one per tensor of the plan.
        scratch: float32 scratch outside the arena, by size in elements; listed in the plan as unplanned.
        triton: whether operations that have a Triton kernel run it.
    """

    views: list[torch.Tensor]
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)
    triton: bool = False

    def outputs(self, operation: Operation) -> list[torch.Tensor]:
        """Views of the tensors an operation writes, unused results left out."""
        return [self.views[index] for index in operation.outputs if index is not None]

    def tensor(self, argument: Argument) -> torch.Tensor:
        """The view an argument refers to."""
        if not isinstance(argument, TensorRef):
            raise ArenaError(f"argument {argument!r} should be a tensor")
        return self.views[argument.tensor]

    def value(self, argument: Argument) -> object:
        """The view an argument refers to, a list of them, or the plain value."""
        if isinstance(argument, TensorRef):
            return self.views[argument.tensor]
        if isinstance(argument, tuple):
            return [self.value(item) for item in argument]
        return argument


Binder = Callable[[Operation, Context], list[Call]]
