"""Train for a chip that is not there, with every way from a tensor to the host closed, and print what is launched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from launch_recorder import install
from planned_helpers import data, loss32
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from runtime import TrainingStep
from runtime.optimizer import FusedAdamW

#: Methods that hand a tensor's numbers to the host.
READS = "item tolist numpy cpu __bool__ __float__ __int__ __index__ __array__ nonzero equal".split()
#: Operators of ATen that wait, whoever calls them.
WAITING = {"aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.item", "aten._to_copy"}


class WaitError(AssertionError):
    """The host would wait for the device."""


class _Watch(TorchDispatchMode):
    """Refuse operators that wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) in WAITING:
            raise WaitError(str(func))
        return func(*args, **(kwargs or {}))


def _refuse(*_: Any, **__: Any) -> Any:
    raise WaitError("a tensor is read")


@contextmanager
def closed() -> Iterator[None]:
    """Every way from a tensor to the host refuses."""
    with mock.patch.multiple(torch.Tensor, **dict.fromkeys(READS, _refuse)), _Watch():
        yield


class Mixed(nn.Module):
    """Parameters of two dtypes, in two groups: two updates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(6, 17).half(), nn.Linear(17, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x.half()).float())


def steps_of(recorder: Any, model: nn.Module, precision: str) -> dict[str, Any]:
    optimizer = FusedAdamW(
        [{"params": list(model.parameters())[:1], "lr": 0.1}, {"params": list(model.parameters())[1:]}],
        max_grad_norm=1.0,
        master="split",
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    example = data(0)
    step = TrainingStep(model, loss32, example, optimizer=optimizer, precision=precision, kernels="triton")
    step(example)
    launches = []
    with closed():
        for _ in range(3):
            first = len(recorder.launches)
            step(example)
            schedule.step()
            launches.append([name for name, _, _ in recorder.launches[first:]])
    with closed():
        try:
            looked = step.stepped
        except WaitError as error:
            looked = str(error)
    return {"steps": launches, "looked": looked}


def main() -> None:
    recorder = install(GPUTarget("cuda", 90, 32))
    net = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3))
    cases = {"fp16": (net, "fp16"), "mixed": (Mixed(), "fp32")}
    print(json.dumps({name: steps_of(recorder, *case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
