"""The errors the runtime raises on purpose: one class per cause, facts as attributes, the remedy in the message."""

from __future__ import annotations


class ArenaError(Exception):
    """Base of every error the runtime raises on purpose."""


class ArenaMemoryError(ArenaError):
    """The arena cannot be allocated: too little memory, or no such device."""


class UnknownOperatorError(ArenaError):
    """A plan names an operator that the runtime's table does not have."""

    def __init__(self, operator: str, operation: str) -> None:
        self.operator = operator
        self.operation = operation
        super().__init__(
            f"operation {operation}: the runtime offers no operator {operator!r}; plan again with this version"
        )


class InputError(ArenaError):
    """An input does not match what the plan was made for."""

    def __init__(self, name: str, cause: str) -> None:
        self.name = name
        super().__init__(f"{name}: {cause}")


class OptimizerError(ArenaError, ValueError):
    """An optimizer was asked for something it does not do: an unknown choice, an option, a parameter it cannot link."""


class SparseGradientError(ArenaError, RuntimeError):
    """A parameter has a sparse gradient."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name} has a sparse gradient, which the fused update does not take: "
            "build its embedding with sparse=False, or give it an optimizer of its own (torch.optim.SparseAdam)"
        )


class LossScaleWarning(UserWarning):
    """The loss scale has reached its floor and gradients still overflow."""
