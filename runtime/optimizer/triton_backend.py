"""The update on a GPU through `triton_kernel` and `triton_check`: tables and settings on the device, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.kernels.triton.launch import Launch, ceil_div
from runtime.optimizer import codes
from runtime.optimizer.aten import mix_number
from runtime.optimizer.messages import to_device
from runtime.optimizer.precision import KINDS
from runtime.optimizer.triton_check import (
    COUNTED,
    PROGRAMS,
    advance_kernel,
    advance_setting,
    scan_kernel,
    scan_setting,
)
from runtime.optimizer.triton_kernel import BLOCKS, update_kernel, update_setting, vector_of
from runtime.optimizer.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A workspace's table on the device, its addresses as 64-bit offsets in elements from two tensors.

    Attributes:
        table: int64, a row for each program of an update.
        parameters, gradients: what the first two columns count from.
        vector: what those columns are multiples of, in elements, up to the widest load.
    """

    table: torch.Tensor
    parameters: torch.Tensor
    gradients: torch.Tensor
    vector: int

    def __len__(self) -> int:
        return len(self.table)

    @property
    def programs(self) -> int:
        """Programs of a scan, and its partial results."""
        return min(len(self), PROGRAMS)

    @classmethod
    def of(cls, workspace: Workspace) -> Rows | None:
        """Of what the workspace collected; ``None`` if that is nothing."""
        if not len(workspace.table):
            return None
        size = workspace.dtype.itemsize
        bases = _bases(workspace)
        table = workspace.table.copy()
        for column, base in ((codes.PARAMETER, bases[0]), (codes.GRADIENT, bases[1])):
            table[:, column] = (table[:, column] - base.data_ptr()) // size
        vector = vector_of(KINDS[workspace.dtype])
        offsets = table[:, [codes.PARAMETER, codes.GRADIENT]]
        aligned = all(base.data_ptr() % 16 == 0 for base in bases) and not (offsets % vector).any()
        return cls(to_device(table, workspace.device), *bases, vector if aligned else 1)


class TritonBackend:
    """Everything on the device of the parameters; nothing waits for it.

    Attributes:
        launches: kernels launched so far, of each kind.
    """

    host = False
    chunk = BLOCKS * codes.TILE

    def __init__(self) -> None:
        self.launches = {"scan": 0, "update": 0}
        self._table: Any = None
        self._rows: Rows | None = None
        self._settings: tuple[bytes, torch.Tensor] | None = None

    def scan(self, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        """How many parts hold an infinity or NaN, and Σ gradient², both float64: on the device."""
        rows = self._prepare(workspace)
        count = 0 if rows is None else rows.programs
        overflows, squares = torch.zeros(2, count, dtype=torch.float64, device=workspace.device).unbind()
        if rows is not None:
            scan_launch(workspace, rows, overflows, squares)()
            self.launches["scan"] += 1
        return overflows.sum(), squares.sum()

    def update(self, workspace: Workspace, rule: int, settings: Any, signal: torch.Tensor, seed: int) -> None:
        """One launch: every row of the table, whatever parameters and groups they belong to."""
        rows = self._prepare(workspace)
        if rows is None:
            return
        key = settings.tobytes()
        if self._settings is None or self._settings[0] != key:
            self._settings = (key, to_device(settings, workspace.device))
        update_launch(workspace, rows, rule, self._settings[1], signal, seed)()
        self.launches["update"] += 1

    def _prepare(self, workspace: Workspace) -> Rows | None:
        if self._table is not workspace.table:
            self._table, self._rows = workspace.table, Rows.of(workspace)
        return self._rows


def scan_launch(
    workspace: Workspace,
    rows: Rows,
    overflows: torch.Tensor,
    squares: torch.Tensor,
    told: torch.Tensor | None = None,
) -> Launch:
    """The look over a workspace's gradients, its ``rows.programs`` partial results into two float64 tensors.

    ``told`` is a control block; without one it looks in any case.
    """
    chosen = scan_setting(KINDS[workspace.dtype], rows.vector, told=told is not None)
    given = squares if told is None else told
    arguments = (rows.gradients, rows.table, len(rows), overflows, squares, given)
    return Launch(scan_kernel, (rows.programs,), arguments, chosen)


def update_launch(
    workspace: Workspace, rows: Rows, rule: int, settings: torch.Tensor, signal: torch.Tensor, seed: int
) -> Launch:
    """The update of a workspace's rows; ``signal`` is whether a gradient overflowed, and the factor, both float64."""
    names = [name for name, _ in workspace.moments]
    blocks = workspace.blocks
    unused = workspace.steps
    kept = blocks.get("master", blocks.get("remainder", unused))
    moments = [blocks[name] for name in names] + [unused] * (2 - len(names))
    scales = [blocks.get(f"{name}_scales", unused) for name in names] + [unused] * (2 - len(names))
    chosen = update_setting(
        KINDS[workspace.dtype],
        workspace.master,
        workspace.states if names else codes.FULL,
        rule,
        buffer=bool(names),
        vector=rows.vector,
    )
    arguments = (
        *(rows.parameters, rows.gradients, kept, *moments, *scales, rows.table),
        *(settings, workspace.steps, signal, mix_number(seed + 0x9E3779B9)),
    )
    return Launch(update_kernel, (len(rows),), arguments, chosen)


def advance_launch(workspace: Workspace, signal: torch.Tensor) -> Launch:
    """Count the step of the parameters that have gradients now."""
    taking = to_device(workspace.active.astype(np.float32), workspace.device)
    count = len(workspace.slots)
    return Launch(
        advance_kernel, (ceil_div(count, COUNTED),), (workspace.steps, taking, signal, count), advance_setting()
    )


def _bases(workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors to count offsets from: the workspaces, or any parameter and gradient where there are none."""
    parameters, gradients = workspace.parameters, workspace.gradients
    if parameters is None:
        parameters = next(slot.parameter.data for slot in workspace.slots if slot.segment.length)
    if gradients is None:
        gradients = next(
            parameter.grad
            for slot in workspace.slots
            if slot.segment.length
            for parameter in slot.parameters
            if parameter.grad is not None
        )
    kind = torch.float32 if workspace.dtype is torch.float32 else torch.int16
    return _flat(parameters).view(kind), _flat(gradients).view(kind)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((1,), (1,))
