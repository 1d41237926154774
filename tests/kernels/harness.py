"""Run one operation's kernel on tensors that lie in poisoned memory, and count what it allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.graph import Argument, Dtype, Operation, Tensor, TensorRef, dense_strides
from planner.operators import unplanned_nbytes, workspaces
from runtime.kernels import Context, bind
from runtime.measure import allocations

GUARD = 64
POISON = 0xFF


def plane_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a transposed layout with gaps: the last dimension is the outermost, every element a step of two."""
    return tuple(stride * 2 for stride in reversed(dense_strides(tuple(reversed(shape)))))


@dataclass
class Bench:
    """Tensors by index, as a plan has them, each in a poisoned block with guards on both sides."""

    tensors: list[Tensor] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    blocks: list[torch.Tensor] = field(default_factory=list)

    def place(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, strided: bool = False, over: int | None = None
    ) -> int:
        """A tensor in memory of its own, or on the memory of tensor ``over``."""
        index = len(self.tensors)
        name = str(dtype).removeprefix("torch.")
        if over is not None:
            self.tensors.append(
                Tensor(f"t{index}", index, 0, self.tensors[over].shape, self.tensors[over].strides, name)
            )
            self.blocks.append(self.blocks[over])
            target = self.views[over]
            self.views.append(target if target.dtype == dtype else target.view(dtype))
            return index
        strides = plane_strides(shape) if strided else dense_strides(shape)
        tensor = Tensor(f"t{index}", index, 0, shape, strides, name)
        block = torch.full((tensor.end + 2 * GUARD,), POISON, dtype=torch.uint8)
        self.tensors.append(tensor)
        self.blocks.append(block)
        self.views.append(block[GUARD : GUARD + tensor.end].view(dtype).as_strided(shape, strides))
        return index

    def guards(self) -> list[torch.Tensor]:
        """The bytes round every tensor, and the gaps inside it."""
        outside = []
        for tensor, block in zip(self.tensors, self.blocks, strict=True):
            mask = torch.ones(len(block), dtype=torch.bool)
            inner = mask[GUARD : GUARD + tensor.end]
            used = torch.zeros(tensor.end // max(tensor.itemsize, 1), dtype=torch.bool)
            used.as_strided(tensor.shape, tensor.strides).fill_(True)
            inner[used.repeat_interleave(tensor.itemsize)] = False
            outside.append(block[mask])
        return outside


@dataclass(frozen=True)
class Outcome:
    """Results of one operation, bytes it allocated when run again, and bytes the facts say it does."""

    results: list[torch.Tensor]
    allocated_nbytes: int
    unplanned_nbytes: int


def perform(
    operator: str,
    values: Sequence[Any],
    keywords: dict[str, Any],
    expected: Sequence[torch.Tensor | None],
    *,
    strided: bool = False,
    overwrite: int | None = None,
    mutated: int | None = None,
    mutates: tuple[int, ...] = (),
    count: bool = True,
) -> Outcome:
    """Run ``operator`` on ``values``; results are shaped like ``expected``.

    Args:
        strided: lay every operand and result of two or more dimensions out transposed, with gaps.
        overwrite: the operand that the first result is written onto.
        mutated: the operand that the operator changes by its own definition, and that is its result.
        mutates: operands that it changes beside its results; they come first in ``expected``.
        count: run a second time under the profiler.
    """
    bench = Bench()
    loads: list[tuple[int, torch.Tensor]] = []

    def argument(value: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            index = bench.place(tuple(value.shape), value.dtype, strided=strided and value.dim() > 1)
            loads.append((index, value))
            return TensorRef(index)
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if isinstance(value, (list, tuple)):
            return tuple(argument(item) for item in value)
        return value

    arguments = tuple(argument(value) for value in values)
    named = tuple((name, argument(value)) for name, value in sorted(keywords.items()))
    outputs: list[int | None] = []
    changed = (mutated,) if mutated is not None else mutates
    for position, wanted in enumerate(expected):
        over = arguments[overwrite] if overwrite is not None and position == len(changed) else None
        if position < len(changed):
            target = arguments[changed[position]]
            outputs.append(target.tensor if isinstance(target, TensorRef) else None)
        elif wanted is None:
            outputs.append(None)
        else:
            base = over.tensor if isinstance(over, TensorRef) else None
            outputs.append(
                bench.place(tuple(wanted.shape), wanted.dtype, strided=strided and wanted.dim() > 1, over=base)
            )
    operation = Operation("op", operator, arguments, named, tuple(outputs))
    scratch = [bench.place(s.shape, getattr(torch, s.dtype)) for s in workspaces(operation, bench.tensors)]
    operation = Operation("op", operator, arguments, named, tuple(outputs), tuple(scratch))
    calls = bind(operation, Context(bench.views))

    def load() -> None:
        for index, value in loads:
            bench.views[index].copy_(value)

    def run() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    before = [guard.clone() for guard in bench.guards()]
    load()
    run()
    for one, two in zip(before, bench.guards(), strict=True):
        if not torch.equal(one, two):
            raise AssertionError(f"{operator} wrote outside its tensors")
    results = [bench.views[index].clone() for index in outputs if index is not None]
    load()
    unplanned = unplanned_nbytes(operation, bench.tensors)
    return Outcome(results, allocations(run).nbytes if count else unplanned, unplanned)
