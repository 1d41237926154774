"""Batch normalisation and its backward, a few channels at a time in float64, as ATen accumulates.

The result may be written onto the input; the gradient of the input onto the incoming gradient or onto the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from planner.graph import Operation
from runtime.kernels.aten import scalar
from runtime.kernels.binding import Call, Context

_ATEN = torch.ops.aten


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _channels(tensor: torch.Tensor) -> torch.Tensor:
    """(N, C, …) as (N, C, rest)."""
    return tensor.view(tensor.shape[0], tensor.shape[1], -1)


def _groups(planes: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Channels that fit in the scratch, and two float64 views of it in the shape of their elements."""
    count, channels, rest = source.shape
    size = max(planes.shape[1] // (count * rest), 1)
    for first in range(0, channels, size):
        part = slice(first, min(first + size, channels))
        shape = (count, part.stop - part.start, rest)
        numel = count * shape[1] * rest
        yield part, planes[0, :numel].view(shape), planes[1, :numel].view(shape)


def _sum(values: torch.Tensor, total: torch.Tensor) -> Call:
    return partial(_ATEN.sum.IntList_out, values, [0, 2], True, out=total)


def bind_batch_norm(operation: Operation, context: Context) -> list[Call]:
    """``y = x · a + c`` by channel with ``a = weight · invstd``, ``c = bias − mean · a``, ``invstd = (var + eps)^−½``.

    In training mean and var are the batch's (var biased), and the running statistics move towards them by
    ``momentum`` (running_var towards the unbiased var); otherwise they are the running statistics. Sums are rounded
    to float32 where ATen rounds them, so that the running statistics are its own to the bit.
    """
    source, weight, bias, running_mean, running_var = (
        _tensor(context.value(argument)) for argument in operation.arguments[:5]
    )
    training, momentum, eps = operation.arguments[5:8]
    outputs = [None if index is None else context.views[index] for index in operation.outputs]
    result, save_mean, save_invstd = outputs[-3:]
    if source is None or result is None or source.numel() == 0:
        return []
    planes, lines = (context.views[index] for index in operation.workspaces)
    x, y = _channels(source), _channels(result)
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide_sum, invstd = (line.view(1, -1, 1) for line in lines[:2])
    mean, squares, scale, shift, spare = (line.view(real)[: x.shape[1]].view(1, -1, 1) for line in lines[2:7])
    epsilon = scalar(eps, torch.float64, context)  # type: ignore[arg-type]
    calls: list[Call] = []
    if training:
        calls += _batch_statistics(x, planes, wide_sum, mean, squares, context)
        numel = x.shape[0] * x.shape[2]
        calls += [
            *_running(running_mean, mean, shift, (spare, scale), momentum),
            partial(_ATEN.div.out, squares, scalar(max(numel - 1, 1), real, context), out=scale),
            *_running(running_var, scale, shift, (wide_sum, invstd), momentum),
            partial(_ATEN.div.out, squares, scalar(numel, real, context), out=squares),
            partial(invstd.copy_, squares),
        ]
    elif running_mean is not None and running_var is not None:
        calls += [partial(mean.copy_, running_mean.view_as(mean)), partial(invstd.copy_, running_var.view_as(invstd))]
    calls += [
        partial(_ATEN.add.out, invstd, epsilon, out=invstd),
        partial(_ATEN.sqrt.out, invstd, out=invstd),
        partial(_ATEN.reciprocal.out, invstd, out=invstd),
        partial(scale.copy_, invstd),
    ]
    for saved, value in ((save_mean, mean), (save_invstd, invstd)):
        if saved is not None and saved.numel():
            calls.append(partial(saved.copy_, value.view(-1)))
    if weight is not None:
        calls += [partial(shift.copy_, weight.view_as(shift)), partial(_ATEN.mul.out, scale, shift, out=scale)]
    calls.append(partial(shift.copy_, bias.view_as(shift)) if bias is not None else partial(shift.fill_, 0))
    calls.append(partial(_ATEN.addcmul.out, shift, mean, scale, value=-1, out=shift))
    for part, _, plane in _groups(planes, x):
        narrow = _as(plane, real)
        own = x[:, part] if x.dtype == real else narrow
        target = y[:, part] if x.dtype == real else narrow
        if own is narrow:
            calls.append(partial(narrow.copy_, x[:, part]))
        calls.append(partial(_ATEN.addcmul.out, shift[:, part], own, scale[:, part], out=target))
        if target is narrow:
            calls.append(partial(y[:, part].copy_, narrow))
    return calls


def _as(plane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The start of a dense float64 scratch as the same shape in another dtype."""
    return plane if plane.dtype == dtype else plane.view(-1).view(dtype)[: plane.numel()].view(plane.shape)


def _batch_statistics(
    x: torch.Tensor,
    planes: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    squares: torch.Tensor,
    context: Context,
) -> list[Call]:
    """``mean`` and ``squares = Σ(x − mean)²`` by channel: summed in float64, all else in ATen's own precision."""
    count = scalar(x.shape[0] * x.shape[2], torch.float64, context)
    calls: list[Call] = []
    for part, wide, plane in _groups(planes, x):
        narrow = _as(plane, mean.dtype)
        calls += [
            partial(wide.copy_, x[:, part]),
            _sum(wide, total[:, part]),
            partial(_ATEN.div.out, total[:, part], count, out=total[:, part]),
            partial(mean[:, part].copy_, total[:, part]),
            partial(narrow.copy_, x[:, part]),
            partial(_ATEN.sub.out, narrow, mean[:, part], out=narrow),
            partial(_ATEN.mul.out, narrow, narrow, out=narrow),
        ]
        summed = narrow
        if narrow.dtype != torch.float64:
            calls.append(partial(wide.copy_, narrow))
            summed = wide
        calls.append(_sum(summed, total[:, part]))
    calls.append(partial(squares.copy_, total))
    return calls


def _running(
    running: torch.Tensor | None,
    value: torch.Tensor,
    kept: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    momentum: object,
) -> list[Call]:
    """``running = momentum · value + (1 − momentum) · running``; the first product and the sum in ``places``' dtype."""
    if running is None or not isinstance(momentum, (int, float)):
        return []
    moved, total = places
    rate = torch.tensor(momentum, dtype=value.dtype)
    return [
        partial(kept.copy_, running.view_as(kept)),
        partial(_ATEN.mul.out, kept, 1 - rate, out=kept),
        partial(total.copy_, kept),
        partial(moved.copy_, value),
        partial(_ATEN.mul.out, moved, rate.to(moved.dtype), out=moved),
        partial(_ATEN.add.out, moved, total, out=total),
        partial(running.copy_, total.view(-1)),
    ]


def bind_batch_norm_backward(operation: Operation, context: Context) -> list[Call]:
    """``∇x = weight · invstd · (∇y − mean(∇y) − x̂ · mean(∇y · x̂))``; ``∇weight = Σ ∇y · x̂``, ``∇bias = Σ ∇y``.

    Out of training the statistics are constants: ``∇x = weight · invstd · ∇y``.
    """
    values = [_tensor(context.value(argument)) for argument in operation.arguments[:7]]
    gradient, source, weight, running_mean, running_var, save_mean, save_invstd = values
    training, eps = operation.arguments[7:9]
    outputs = [None if index is None else context.views[index] for index in operation.outputs]
    to_source, to_weight, to_bias = outputs
    if gradient is None or source is None or source.numel() == 0:
        return [output.zero_ for output in outputs if output is not None]
    planes, lines = (context.views[index] for index in operation.workspaces)
    x, dy = _channels(source), _channels(gradient)
    count = scalar(x.shape[0] * x.shape[2], torch.float64, context)
    mean, invstd, scale, total, dot = (line.view(1, -1, 1) for line in lines[:5])
    calls: list[Call] = [partial(scale.copy_, weight.view_as(scale)) if weight is not None else partial(scale.fill_, 1)]
    if training and save_mean is not None and save_invstd is not None:
        calls += [partial(mean.copy_, save_mean.view_as(mean)), partial(invstd.copy_, save_invstd.view_as(invstd))]
    elif running_mean is not None and running_var is not None:
        epsilon = scalar(eps, torch.float64, context)  # type: ignore[arg-type]
        calls += [
            partial(mean.copy_, running_mean.view_as(mean)),
            partial(invstd.copy_, running_var.view_as(invstd)),
            partial(_ATEN.add.out, invstd, epsilon, out=invstd),
            partial(_ATEN.rsqrt.out, invstd, out=invstd),
        ]
    calls.append(partial(_ATEN.mul.out, scale, invstd, out=scale))
    for part, normal, wide in _groups(planes, x):
        m, r, s, t, d = (line[:, part] for line in (mean, invstd, scale, total, dot))
        calls += [
            partial(normal.copy_, x[:, part]),
            partial(_ATEN.sub.out, normal, m, out=normal),
            partial(_ATEN.mul.out, normal, r, out=normal),
            partial(wide.copy_, dy[:, part]),
            _sum(wide, t),
            partial(_ATEN.mul.out, wide, normal, out=wide),
            _sum(wide, d),
        ]
        if to_weight is not None:
            calls.append(partial(to_weight[part].copy_, d.view(-1)))
        if to_bias is not None:
            calls.append(partial(to_bias[part].copy_, t.view(-1)))
        if to_source is None:
            continue
        calls.append(partial(wide.copy_, dy[:, part]))
        if training:
            calls += [
                partial(_ATEN.div.out, t, count, out=t),
                partial(_ATEN.div.out, d, count, out=d),
                partial(_ATEN.sub.out, wide, t, out=wide),
                partial(_ATEN.addcmul.out, wide, normal, d, value=-1, out=wide),
            ]
        calls += [
            partial(_ATEN.mul.out, wide, s, out=wide),
            partial(_channels(to_source)[:, part].copy_, wide),
        ]
    return calls
