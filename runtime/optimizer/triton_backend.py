"""The update on a GPU through `triton_kernel`: tables and settings on the device, one launch for each dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runtime.kernels.triton.launch import Launch
from runtime.optimizer import codes
from runtime.optimizer.aten import mix_number
from runtime.optimizer.precision import KINDS
from runtime.optimizer.triton_kernel import (
    BLOCKS,
    scan_kernel,
    scan_setting,
    update_kernel,
    update_setting,
    vector_of,
)
from runtime.optimizer.workspace import Workspace


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
        self._rows: torch.Tensor | None = None
        self._bases: tuple[torch.Tensor, torch.Tensor] | None = None
        self._vector = 1
        self._settings: tuple[bytes, torch.Tensor] | None = None

    def scan(self, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        """How many rows hold an infinity or NaN, FP32, and Σ gradient², float64: on the device."""
        rows, (_, gradients) = self._prepare(workspace)
        overflows = torch.zeros(len(rows), dtype=torch.float32, device=workspace.device)
        squares = torch.zeros(len(rows), dtype=torch.float64, device=workspace.device)
        if len(rows):
            chosen = scan_setting(KINDS[workspace.dtype], self._vector)
            Launch(scan_kernel, (len(rows),), (gradients, rows, overflows, squares), chosen)()
            self.launches["scan"] += 1
        return overflows.sum(), squares.sum()

    def update(self, workspace: Workspace, rule: int, settings: Any, signal: torch.Tensor, seed: int) -> None:
        """One launch: every row of the table, whatever parameters and groups they belong to."""
        rows, (parameters, gradients) = self._prepare(workspace)
        if not len(rows):
            return
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
            vector=self._vector,
        )
        arguments = (
            *(parameters, gradients, kept, *moments, *scales, rows),
            *(self._on_device(settings, workspace), workspace.steps, signal, mix_number(seed + 0x9E3779B9)),
        )
        Launch(update_kernel, (len(rows),), arguments, chosen)()
        self.launches["update"] += 1

    def _prepare(self, workspace: Workspace) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The table on the device, its addresses as 64-bit offsets in elements from two base pointers."""
        if self._table is not workspace.table or self._rows is None or self._bases is None:
            self._table = workspace.table
            size = workspace.dtype.itemsize
            bases = _bases(workspace)
            table = workspace.table.copy()
            for column, base in ((codes.PARAMETER, bases[0]), (codes.GRADIENT, bases[1])):
                table[:, column] = (table[:, column] - base.data_ptr()) // size
            vector = vector_of(KINDS[workspace.dtype])
            offsets = table[:, [codes.PARAMETER, codes.GRADIENT]]
            aligned = all(base.data_ptr() % 16 == 0 for base in bases) and not (offsets % vector).any()
            self._vector = vector if aligned else 1
            self._rows = torch.from_numpy(table).to(workspace.device)
            self._bases = bases
        return self._rows, self._bases

    def _on_device(self, settings: Any, workspace: Workspace) -> torch.Tensor:
        """The table of groups with the logarithms of its betas, copied when it changed."""
        key = settings.tobytes()
        if self._settings is None or self._settings[0] != key:
            betas = np.clip(settings[:, [codes.BETA1, codes.BETA2]], np.finfo(np.float64).tiny, None)
            wide = np.concatenate((settings, np.log(betas)), axis=1)
            self._settings = (key, torch.from_numpy(wide).to(workspace.device))
        return self._settings[1]


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
