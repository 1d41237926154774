"""What a training step of eager PyTorch really holds, by the profiler's allocator events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from runtime.measure import allocations

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: The optimizers of the comparison, by the names the estimate gives them: ``(optimizer, update)``.
OPTIMIZERS: dict[tuple[str, str], Optimizers] = {
    ("adamw", "foreach"): lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    ("adamw", "loop"): lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    ("sgd", "loop"): lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False),
}


def storages_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(sizes.values())


def eager_step_nbytes(
    module: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor], optimizer: Optimizers
) -> int:
    """Most bytes held in two steps, parameters, buffers, inputs and the optimizer's state included.

    The state is made in the first step, inside the measurement: the profiler overlooks that memory is freed which was
    allocated before it began.
    """
    there = storages_nbytes([*module.parameters(), *module.buffers(), *inputs.values()])
    update = optimizer(module.parameters())

    def steps() -> None:
        for _ in range(2):
            loss(module(**inputs)).backward()
            update.step()
            update.zero_grad(set_to_none=True)

    return there + allocations(steps).peak_nbytes
