"""``arenaplan.rms_norm`` and its backward: loops over rows compiled for ATen's threads, or ATen's calls on chunks.

In float32 (float64 for float64 operands) whatever the dtypes of the operands, each rounded once; the compiled loops
form sums in float64. The rows fall into a number of parts that does not depend on threads, each summed in order, so
the same inputs give the same bits. The result may lie on x, the gradient of x on x or on the incoming gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from planner.graph import Operation
from planner.operators import rms_parts
from runtime.errors import ArenaError
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context
from runtime.kernels.rms_norm_source import loop
from runtime.team import Loop

_ATEN = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Operands of a normalisation or its backward, as matrices (rows, width), lines (width), and columns (rows).

    Attributes:
        x, weight, rstd: as the operator's arguments.
        given: the incoming gradient of a backward.
        out: the result, or the gradient of x; ``None`` where nobody wants it.
        to_weight: the gradient of the weight.
        scratch: what `planner.operators.workspaces` lists.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    rstd: torch.Tensor
    out: torch.Tensor
    given: torch.Tensor | None
    to_weight: torch.Tensor | None
    scratch: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.rstd.dtype

    @property
    def parts(self) -> int:
        """The parts the rows fall into."""
        return rms_parts(self.x.shape[0])


def checked_rms_norm(operation: Operation, context: Context) -> tuple[Rows, float] | None:
    """The operands of a forward, and eps; ``None`` if they are empty.

    Raises:
        ArenaError: they do not fit each other.
    """
    source, shape, weight, eps = operation.arguments
    out, rstd = (None if index is None else context.views[index] for index in operation.outputs)
    scratch = tuple(context.views[index] for index in operation.workspaces)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise ArenaError(f"operation {operation.name}: eps is {eps!r}")
    line = None if weight is None else context.tensor(weight)
    rows = _rows(operation, shape, (context.tensor(source), line, rstd, out, None, None), scratch)
    return None if rows is None else (rows, float(eps))


def checked_rms_norm_backward(operation: Operation, context: Context) -> Rows | None:
    """The operands of a backward; ``None`` if they are empty. Raises as `checked_rms_norm`."""
    given, source, shape, rstd, weight = operation.arguments
    out, to_weight = (None if index is None else context.views[index] for index in operation.outputs)
    scratch = tuple(context.views[index] for index in operation.workspaces)
    line = None if weight is None else context.tensor(weight)
    tensors = (context.tensor(source), line, context.tensor(rstd), out, context.tensor(given), to_weight)
    return _rows(operation, shape, tensors, scratch)


def _rows(
    operation: Operation, shape: object, tensors: tuple[torch.Tensor | None, ...], scratch: tuple[torch.Tensor, ...]
) -> Rows | None:
    x, weight, rstd, out, given, to_weight = tensors
    width = prod(size for size in shape if isinstance(size, int)) if isinstance(shape, tuple) else 0
    if x is None or rstd is None or out is None or not _fit(x, rstd, (out, given), (weight, to_weight), width):
        raise ArenaError(f"operation {operation.name}: its tensors do not fit a normalisation over {shape!r}")
    if x.numel() == 0:
        return None
    flat = [None if line is None else line.view(-1) for line in (weight, to_weight)]
    gradient = None if given is None else given.view(-1, width)
    return Rows(x.view(-1, width), flat[0], rstd.view(-1), out.view(-1, width), gradient, flat[1], scratch)


def _fit(
    x: torch.Tensor,
    rstd: torch.Tensor,
    matrices: tuple[torch.Tensor | None, ...],
    lines: tuple[torch.Tensor | None, ...],
    width: int,
) -> bool:
    """Whether all are dense, matrices are like x, lines have one number a column, and ``rstd`` one a row."""
    present = [x, rstd, *(tensor for tensor in (*matrices, *lines) if tensor is not None)]
    if not width or not all(tensor.is_contiguous() and tensor.dtype in _FLOATS for tensor in present):
        return False
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    alike = all(matrix is None or matrix.shape == x.shape for matrix in matrices)
    fits = all(line is None or line.numel() == width for line in lines)
    return alike and fits and rstd.dtype == wide and rstd.numel() * width == x.numel()


def bind_rms_norm(operation: Operation, context: Context) -> list[Call]:
    """``rstd = (mean x² + eps)^−½``, ``y = x · rstd · weight`` over the last dimensions.

    Raises:
        ArenaError: the tensors do not fit each other.
    """
    found = checked_rms_norm(operation, context)
    if found is None:
        return []
    rows, eps = found
    lines, line = rows.scratch
    arrays = (rows.x, rows.weight, rows.out, rows.rstd, lines[0, : rows.parts])
    compiled = loop("forward", arrays, rows.parts, eps)
    return [compiled] if compiled is not None else _chunked(rows, eps, lines[0], line[0], context)


def bind_rms_norm_backward(operation: Operation, context: Context) -> list[Call]:
    """``∇x = rstd · (g − n · mean(g · n))``, ``g = ∇y · weight``, ``n = x · rstd``; ``∇weight = Σ ∇y · n``.

    Raises:
        ArenaError: the tensors do not fit each other.
    """
    rows = checked_rms_norm_backward(operation, context)
    if rows is None:
        empty = context.outputs(operation)
        return [output.zero_ for output in empty if output.numel()]
    sums, lines, *_ = rows.scratch
    parts = sums[: rows.parts]
    pair = (lines[0, : rows.parts], lines[1, : rows.parts])
    arrays = (rows.given, rows.x, rows.weight, rows.rstd, rows.out, parts, *pair)
    compiled: Loop | None = loop("backward", arrays, rows.parts, None if rows.to_weight is None else 1.0)
    if compiled is None:
        return _chunked_backward(rows)
    if rows.to_weight is None:
        return [compiled]
    total = sums[rows.parts]
    return [
        compiled,
        partial(_ATEN.sum.IntList_out, parts, [0], False, out=total),
        partial(rows.to_weight.copy_, total),
    ]


class _Chunks:
    """Chunks of rows, and copies of their operands in the dtype that is computed in."""

    def __init__(self, rows: Rows, size: int) -> None:
        count = rows.x.shape[0]
        self.dtype = rows.dtype
        self.slices = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        self.calls: list[Call] = []

    def wide(self, tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or its copy at ``place``."""
        if tensor.dtype == self.dtype:
            return tensor
        self.calls.append(partial(place.copy_, tensor))
        return place


def _chunked(rows: Rows, eps: float, plane: torch.Tensor, line: torch.Tensor, context: Context) -> list[Call]:
    """The forward by ATen's out-forms, one chunk after the other."""
    width = rows.x.shape[1]
    work = _Chunks(rows, len(plane))
    calls = work.calls
    weight = None if rows.weight is None else work.wide(rows.weight, line)
    epsilon = scalar(eps, rows.dtype, context)
    for part in work.slices:
        place = plane[: part.stop - part.start]
        final, column = rows.out[part], rows.rstd[part].unsqueeze(1)
        x = work.wide(rows.x[part], place)
        y = final if final.dtype == rows.dtype else place
        calls += [
            partial(_ATEN.linalg_vector_norm.out, x, 2, [1], True, out=column),
            partial(_ATEN.addcmul.out, epsilon, column, column, value=1 / width, out=column),
            partial(_ATEN.rsqrt.out, column, out=column),
            partial(_ATEN.mul.out, x, column, out=y),
        ]
        if weight is not None:
            calls.append(partial(_ATEN.mul.out, y, weight, out=y))
        if y is not final:
            calls.append(partial(final.copy_, y))
    return calls


def _chunked_backward(rows: Rows) -> list[Call]:
    """The backward by ATen's out-forms, one chunk after the other."""
    given = rows.given
    if given is None:
        raise ArenaError("a backward needs an incoming gradient")
    _, planes, lines, numbers = rows.scratch
    width = rows.x.shape[1]
    work = _Chunks(rows, len(numbers))
    calls = work.calls
    weight = None if rows.weight is None else work.wide(rows.weight, lines[0])
    total = None
    if rows.to_weight is not None:
        total = rows.to_weight if rows.to_weight.dtype == rows.dtype else lines[1]
    for part in work.slices:
        size = part.stop - part.start
        normal, product, turned = planes[0, :size], planes[1, :size], numbers[:size]
        column, final = rows.rstd[part].unsqueeze(1), rows.out[part]
        x, dy = work.wide(rows.x[part], normal), work.wide(given[part], product)
        calls += [
            partial(_ATEN.mul.out, x, column, out=normal),
            partial(_ATEN.mul.out, dy, normal, out=product),
        ]
        if total is not None:
            target = total if part.start == 0 else lines[2]
            calls.append(partial(_ATEN.sum.IntList_out, product, [0], False, out=target))
            if target is not total:
                calls.append(partial(_ATEN.add.out, total, target, out=total))
        if weight is not None:
            calls.append(partial(_ATEN.mv.out, product, weight, out=turned.view(-1)))
        else:
            calls.append(partial(_ATEN.sum.IntList_out, product, [1], True, out=turned))
        dy = work.wide(given[part], product)
        dx = final if final.dtype == rows.dtype else product
        if weight is not None:
            calls.append(partial(_ATEN.mul.out, dy, weight, out=dx))
        elif dx is not dy:
            calls.append(partial(dx.copy_, dy))
        calls += [
            partial(_ATEN.addcmul.out, dx, normal, turned, value=-1 / width, out=dx),
            partial(_ATEN.mul.out, dx, column, out=dx),
        ]
        if dx is not final:
            calls.append(partial(final.copy_, dx))
    if total is not None and rows.to_weight is not None and total is not rows.to_weight:
        calls.append(partial(rows.to_weight.copy_, total))
    return calls
