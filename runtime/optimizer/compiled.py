"""The update on a CPU through numba, on as many threads as torch has: each element of memory is touched once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from runtime import team
from runtime.optimizer import codes
from runtime.optimizer.precision import KINDS
from runtime.optimizer.workspace import Workspace

#: Elements below which handing work to another thread costs more than it saves.
PIECE = 2**18


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

        return any(_spread(workspace.table, lambda *rows: overflowed(KINDS[workspace.dtype], workspace.table, *rows)))

    def squares(self, workspace: Workspace) -> float:
        """Σ gradient² over the table."""
        from runtime.optimizer.update_kernel import sum_of_squares

        squares = sum_of_squares(KINDS[workspace.dtype])
        return float(sum(_spread(workspace.table, lambda *rows: squares(workspace.table, *rows))))

    def update(self, workspace: Workspace, rule: int, settings: Any, scale: float, seed: int) -> None:
        """One launch: every row of the table, whatever parameters and groups they belong to."""
        from runtime.optimizer.update_kernel import update_adam, update_sgd

        kernel = (update_adam if rule == codes.ADAM else update_sgd)(KINDS[workspace.dtype], workspace.master)
        blocks = workspace.blocks
        kept = blocks.get("master", blocks.get("remainder"))
        names = [name for name, _ in workspace.moments]
        moments = [blocks[name] for name in names] + [None] * (2 - len(names))
        scales = [blocks.get(f"{name}_scales") for name in names] + [None] * (2 - len(names))
        addresses = [0 if block is None else block.data_ptr() for block in (kept, *moments, *scales)]
        steps = workspace.steps.numpy()
        fixed = (workspace.states, workspace.table, settings, steps)
        _spread(workspace.table, lambda *rows: kernel(*fixed, scale, seed, *addresses, *rows))


def _spread(table: Any, work: Callable[[int, int], Any]) -> list[Any]:
    """Call ``work`` on ranges of rows that cover the table, side by side; what each gave, in no order."""
    return _share(table[:, codes.LENGTH], work)


def touch(rewritten: torch.Tensor, read: torch.Tensor) -> None:
    """Read and write one FP32 tensor in place and read another, split as an update is: the memory's own speed."""
    from runtime.optimizer.update_kernel import add_one, largest_bits

    for tensor, kernel in ((rewritten, add_one), (read, largest_bits)):
        address, length, chunk = tensor.data_ptr(), tensor.numel(), codes.CPU_CHUNK
        lengths = np.full(-(-length // chunk), chunk)
        _share(lengths, partial(_rows, kernel, address, length, chunk))


def _rows(kernel: Callable[..., Any], address: int, length: int, chunk: int, begin: int, end: int) -> Any:
    return kernel(address, begin * chunk, min(end * chunk, length))


def _share(lengths: Any, work: Callable[[int, int], Any]) -> list[Any]:
    starts = lengths.cumsum() - lengths
    total = int(lengths.sum())
    if total < PIECE:
        return [work(0, len(lengths))]
    results: list[Any] = []

    def take(member: int, members: int) -> None:
        begin, end = (int(starts.searchsorted(total * number / members)) for number in (member, member + 1))
        if end > begin:
            results.append(work(begin, end))

    team.run(take)
    return results
