"""Layer normalisation and its backward, row by row or in chunks of rows that stay in cache.

Compiled loops over rows sum in float64. Without numba, and in 16 bits, the same is done by calls of ATen in the dtype
of the operands (float32 for 16-bit ones). The result may be written onto the input; the gradient
of the input onto the incoming gradient or onto the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch

from planner.graph import Operation
from planner.operators import chunk_rows
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context
from runtime.kernels.compiled import array, compilable, compiled

_ATEN = torch.ops.aten


class _Rows:
    """Row-by-row operands of one normalisation and the scratch it works in."""

    def __init__(self, operation: Operation, context: Context, source: torch.Tensor, width: int) -> None:
        self.width = width
        self.rows = source.numel() // max(width, 1)
        self.chunk = chunk_rows(self.rows, width)
        self.planes, self.numbers, self.padded = (context.views[index] for index in operation.workspaces)
        self.lines = self.padded[:, :width]
        self.dtype = self.planes.dtype
        self.calls: list[Call] = []

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense tensor as rows of the normalised elements."""
        return tensor.view(self.rows, self.width)

    def column(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with one number a row."""
        return tensor.view(self.rows, 1)

    def widened(self, tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or its copy in the accumulation dtype at ``place``."""
        if tensor.dtype == self.dtype:
            return tensor
        self.calls.append(partial(place.copy_, tensor))
        return place

    def slices(self) -> list[slice]:
        return [slice(first, min(first + self.chunk, self.rows)) for first in range(0, self.rows, self.chunk)]


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _width(shape: object) -> int:
    return prod(size for size in shape if isinstance(size, int)) if isinstance(shape, (list, tuple)) else 0


def bind_layer_norm(operation: Operation, context: Context) -> list[Call]:
    """``y = (x − mean) · rstd · weight + bias``, ``rstd = (Σ(x − mean)²/D + eps)^−½`` over the last dimensions."""
    outputs = [None if index is None else context.views[index] for index in operation.outputs]
    result, mean, rstd = outputs
    source = _tensor(context.value(operation.arguments[0]))
    weight, bias = (_tensor(context.value(argument)) for argument in operation.arguments[2:4])
    eps = operation.arguments[4]
    if result is None or mean is None or rstd is None or source is None or result.numel() == 0:
        return []
    work = _Rows(operation, context, source, _width(operation.arguments[1]))
    loop = compiled("normalise_rows") if compilable(source, weight, bias, result, mean, rstd) else None
    if loop is not None:
        return _looped(loop, work, source, weight, bias, result, mean, rstd, eps)
    if weight is not None:
        weight = work.widened(weight.view(-1), work.lines[0])
    if bias is not None:
        bias = work.widened(bias.view(-1), work.lines[1])
    count = scalar(work.width, work.dtype, context)
    epsilon = scalar(eps, work.dtype, context)  # type: ignore[arg-type]
    calls = work.calls
    for part in work.slices():
        size = part.stop - part.start
        x = work.widened(work.matrix(source)[part], work.planes[0, :size])
        final, means, rstds = work.matrix(result)[part], work.column(mean)[part], work.column(rstd)[part]
        y = final if final.dtype == work.dtype else work.planes[0, :size]
        m = means if means.dtype == work.dtype else work.numbers[0, :size]
        r = rstds if rstds.dtype == work.dtype else work.numbers[1, :size]
        calls += [
            partial(_ATEN.sum.IntList_out, x, [1], True, out=m),
            partial(_ATEN.div.out, m, count, out=m),
            partial(_ATEN.sub.out, x, m, out=y),
            partial(_ATEN.linalg_vector_norm.out, y, 2, [1], True, out=r),
            partial(_ATEN.addcmul.out, epsilon, r, r, value=1 / work.width, out=r),
            partial(_ATEN.rsqrt.out, r, out=r),
            partial(_ATEN.mul.out, y, r, out=y),
        ]
        if weight is not None and bias is not None:
            calls.append(partial(_ATEN.addcmul.out, bias, y, weight, out=y))
        elif weight is not None:
            calls.append(partial(_ATEN.mul.out, y, weight, out=y))
        elif bias is not None:
            calls.append(partial(_ATEN.add.out, y, bias, out=y))
        calls += [
            partial(place.copy_, value) for place, value in ((final, y), (means, m), (rstds, r)) if place is not value
        ]
    return calls


def _looped(
    loop: Callable[..., object],
    work: _Rows,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: object,
) -> list[Call]:
    """One compiled call; a missing weight or bias is a line of ones or zeros."""
    calls: list[Call] = []
    lines = []
    for given, place, value in ((weight, 0, 1), (bias, 1, 0)):
        line = work.lines[place] if given is None else given.view(-1)
        if given is None:
            calls.append(partial(line.fill_, value))
        lines.append(array(line))
    statistics = (array(tensor.view(-1)) for tensor in (mean, rstd))
    matrices = array(work.matrix(source)), array(work.matrix(result))
    return [*calls, partial(loop, matrices[0], *lines, matrices[1], *statistics, eps)]


def _looped_backward(
    loop: Callable[..., object],
    work: _Rows,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    outputs: list[torch.Tensor | None],
) -> list[Call]:
    """One compiled call, whose float64 sums over rows are then copied out."""
    gradient, source, mean, rstd, weight = operands
    to_source, *rest = outputs
    calls: list[Call] = []
    line = work.lines[0] if weight is None else weight.view(-1)
    if weight is None:
        calls.append(partial(line.fill_, 1))
    sums = work.padded[1:5].view(-1).view(torch.float64)[: 2 * work.width].view(2, work.width)
    target = work.matrix(source if to_source is None else to_source)
    matrices = (array(work.matrix(gradient)), array(work.matrix(source)))
    statistics = (array(mean.view(-1)), array(rstd.view(-1)), array(line))
    scratch = (array(sums), array(work.padded[5]))
    calls.append(partial(loop, *matrices, *statistics, array(target), *scratch, to_source is not None))
    for output, total in zip(rest, sums, strict=True):
        if output is not None:
            calls.append(partial(output.view(-1).copy_, total))
    return calls


def bind_layer_norm_backward(operation: Operation, context: Context) -> list[Call]:
    """``∇x = rstd (g − mean(g) − x̂ mean(g x̂))``, ``g = ∇y · weight``; ``∇weight = Σ ∇y · x̂``; ``∇bias = Σ ∇y``."""
    gradient, source = (_tensor(context.value(argument)) for argument in operation.arguments[:2])
    mean, rstd, weight = (_tensor(context.value(argument)) for argument in operation.arguments[3:6])
    outputs = [None if index is None else context.views[index] for index in operation.outputs]
    to_source, to_weight, to_bias = outputs
    if gradient is None or source is None or mean is None or rstd is None or source.numel() == 0:
        return [output.zero_ for output in outputs if output is not None]
    work = _Rows(operation, context, source, _width(operation.arguments[2]))
    lines = work.lines
    loop = compiled("normalise_rows_backward") if compilable(gradient, source, mean, rstd, weight) else None
    if loop is not None:
        return _looped_backward(loop, work, (gradient, source, mean, rstd, weight), outputs)
    if weight is not None:
        weight = work.widened(weight.view(-1), lines[0])
    calls = work.calls
    sums = [
        None if output is None else output.view(-1) if output.dtype == work.dtype else lines[place]
        for output, place in ((to_weight, 1), (to_bias, 2))
    ]
    for part in work.slices():
        size = part.stop - part.start
        normal, product, dy = (work.planes[place, :size] for place in range(3))
        one, two, means, rstds = (work.numbers[place, :size] for place in range(4))
        dy = work.widened(work.matrix(gradient)[part], dy)
        means = work.widened(work.column(mean)[part], means)
        rstds = work.widened(work.column(rstd)[part], rstds)
        x = work.widened(work.matrix(source)[part], normal)
        calls += [
            partial(_ATEN.sub.out, x, means, out=normal),
            partial(_ATEN.mul.out, normal, rstds, out=normal),
            partial(_ATEN.mul.out, dy, normal, out=product),
        ]
        for total, summed in zip(sums, (product, dy), strict=True):
            if total is not None and part.start == 0:
                calls.append(partial(_ATEN.sum.IntList_out, summed, [0], False, out=total))
            elif total is not None:
                calls += [
                    partial(_ATEN.sum.IntList_out, summed, [0], False, out=lines[3]),
                    partial(_ATEN.add.out, total, lines[3], out=total),
                ]
        if to_source is None:
            continue
        final = work.matrix(to_source)[part]
        dx = final if final.dtype == work.dtype else product
        if weight is None:
            calls += [
                partial(_ATEN.sum.IntList_out, dy, [1], True, out=one),
                partial(_ATEN.sum.IntList_out, product, [1], True, out=two),
                partial(_ATEN.sub.out, dy, one, alpha=1 / work.width, out=dx),
            ]
        else:
            calls += [
                partial(_ATEN.mv.out, dy, weight, out=one.view(-1)),
                partial(_ATEN.mv.out, product, weight, out=two.view(-1)),
                partial(_ATEN.mul.out, dy, weight, out=dx),
                partial(_ATEN.sub.out, dx, one, alpha=1 / work.width, out=dx),
            ]
        calls += [
            partial(_ATEN.addcmul.out, dx, normal, two, value=-1 / work.width, out=dx),
            partial(_ATEN.mul.out, dx, rstds, out=dx),
        ]
        if final is not dx:
            calls.append(partial(final.copy_, dx))
    for output, total in zip((to_weight, to_bias), sums, strict=True):
        if output is not None and total is not None and output.dtype != work.dtype:
            calls.append(partial(output.view(-1).copy_, total))
    return calls
