"""``arenaplan.check_gradients`` and ``arenaplan.update`` as launches; what decides lies on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.graph import Operation
from runtime.errors import ArenaError
from runtime.kernels.binding import Call, Context
from runtime.kernels.triton.launch import Launch, ceil_div
from runtime.kernels.update import checked_check, checked_update
from runtime.optimizer import codes
from runtime.optimizer.precision import KINDS
from runtime.optimizer.triton_backend import Rows, TritonBackend, advance_launch, scan_launch, update_launch
from runtime.optimizer.triton_check import PARTS, PROGRAMS, decide_kernel, decide_setting
from runtime.optimizer.workspace import Workspace


def _backend_for(_device: torch.device, _dtype: torch.dtype) -> TritonBackend:
    return TritonBackend()


def _takes(operation: Operation, spaces: Sequence[Workspace]) -> bool:
    """Whether the kernels take these dtypes; where they do not, there is another form on a CPU only."""
    wrong = [space for space in spaces if space.dtype not in KINDS]
    if wrong and wrong[0].device.type != "cpu":
        raise ArenaError(
            f"operation {operation.name}: parameters of {wrong[0].dtype} are updated in a plan on a CPU only; "
            "use float32, or step the optimizer behind the plan"
        )
    return not wrong


def bind_check(operation: Operation, context: Context) -> list[Call] | None:
    """A scan of each dtype, and one program that draws the conclusions and adapts the loss scale."""
    found = checked_check(operation, context, _backend_for)
    if not _takes(operation, found.spaces):
        return None
    overflows, squares = torch.zeros(2, PARTS, dtype=torch.float64, device=found.control.device).unbind()
    calls: list[Call] = []
    for number, space in enumerate(found.spaces):
        rows = Rows.of(space)
        if rows is not None:
            part = slice(number * PROGRAMS, number * PROGRAMS + rows.programs)
            calls.append(scan_launch(space, rows, overflows[part], squares[part], found.control))
    scale = overflows if found.scale is None else found.scale.view(1)
    arguments = (overflows, squares, found.control, scale, len(found.spaces) * PROGRAMS)
    calls.append(Launch(decide_kernel, (1,), arguments, decide_setting(scaled=found.scale is not None)))
    return calls


def bind_update(operation: Operation, context: Context) -> list[Call] | None:
    """One launch for all parameters of a dtype, and one that counts their steps; nothing on overflow."""
    found = checked_update(operation, context, _backend_for)
    if not _takes(operation, [found.space]):
        return None
    rows = Rows.of(found.space)
    launches = (
        []
        if rows is None
        else [update_launch(found.space, rows, found.rule, found.settings, found.control, found.seed)]
    )
    return [*launches, advance_launch(found.space, found.control)]


def scratch_nbytes(lengths: Sequence[Sequence[int]]) -> int:
    """Bytes that the launches hold besides the arena, given the elements of each parameter of each dtype.

    The tables of check and update, eight bytes a column; which parameters take part; the partial results.
    """
    rows = sum(ceil_div(length, TritonBackend.chunk) for each in lengths for length in each)
    return 2 * rows * codes.COLUMNS * 8 + 4 * sum(len(each) for each in lengths) + 2 * PARTS * 8
