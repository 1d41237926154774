"""The update on a CPU through numba, on as many threads as torch has: each element of memory is touched once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from runtime import team
from runtime.optimizer import codes, words
from runtime.optimizer.precision import KINDS
from runtime.optimizer.workspace import Workspace

#: Elements below which a second thread has nothing to do: a row of the table is one thread's.
PIECE = 2 * codes.CPU_CHUNK


@cache
def available() -> bool:
    """Whether numba is installed and the processor converts float16 by itself (all of the last ten years do)."""
    try:
        import llvmlite.binding as llvm
        import numba  # noqa: F401
    except ImportError:
        return False
    if not llvm.get_process_triple().startswith(("x86", "i386", "i686")):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c", False))


class CompiledBackend:
    """Compiles at first use, then from disk."""

    host = True
    chunk = codes.CPU_CHUNK

    def overflow(self, workspace: Workspace) -> bool:
        """Whether a gradient in the table is infinite or NaN."""
        from runtime.optimizer.update_kernel import overflowed

        return bool(_launch(overflowed(KINDS[workspace.dtype]), workspace.table).any())

    def squares(self, workspace: Workspace) -> float:
        """Σ gradient² over the table."""
        from runtime.optimizer.update_kernel import sum_of_squares

        return float(_launch(sum_of_squares(KINDS[workspace.dtype]), workspace.table).sum())

    def update(self, workspace: Workspace, rule: int, settings: Any, scale: float, seed: int) -> None:
        """One launch: every row of the table, whatever parameters and groups they belong to."""
        from runtime.optimizer.update_kernel import update_adam, update_sgd

        function = (update_adam if rule == codes.ADAM else update_sgd)(KINDS[workspace.dtype], workspace.master)
        blocks = workspace.blocks
        names = [name for name, _ in workspace.moments]
        moments = [blocks[name] for name in names] + [None] * (2 - len(names))
        scales = [blocks.get(f"{name}_scales") for name in names] + [None] * (2 - len(names))
        held = (blocks.get("master", blocks.get("remainder")), *moments, *scales)
        steps = workspace.steps.numpy()
        given = np.zeros(words.COUNT, dtype=np.int64)
        given[words.SETTINGS], given[words.GROUPS] = settings.ctypes.data, len(settings)
        given[words.STEPS], given[words.PARAMETERS] = steps.ctypes.data, len(steps)
        given[words.MOMENTS], given[words.SEED] = workspace.states, seed & 0xFFFFFFFF
        given[words.SCALE : words.SCALE + 1].view(np.float64)[0] = scale
        given[words.KEPT :] = [0 if block is None else block.data_ptr() for block in held]
        _launch(function, workspace.table, given)


def touch(rewritten: torch.Tensor, read: torch.Tensor) -> None:
    """Read and write one FP32 tensor in place and read another, split as an update is: the memory's own speed."""
    from runtime.optimizer.update_kernel import touched

    for tensor, gradient in ((rewritten, 0), (read, 1)):
        starts = np.arange(0, tensor.numel(), codes.CPU_CHUNK)
        table = np.zeros((len(starts), codes.COLUMNS), dtype=np.int64)
        table[:, codes.PARAMETER], table[:, codes.GRADIENT] = tensor.data_ptr() + 4 * starts, gradient
        table[:, codes.LENGTH] = np.minimum(tensor.numel() - starts, codes.CPU_CHUNK)
        _launch(touched(), table)


def _launch(function: int, table: Any, given: Any = None) -> Any:
    """Run a compiled loop over the rows of a table, on several threads if there is enough of it; their results."""
    given = np.zeros(words.COUNT, dtype=np.int64) if given is None else given
    members = torch.get_num_threads() if int(table[:, codes.LENGTH].sum()) >= PIECE else 1
    results = np.zeros(members)
    given[words.RESULTS], given[words.TABLE], given[words.ROWS] = results.ctypes.data, table.ctypes.data, len(table)
    team.share(function, given, members)
    return results
