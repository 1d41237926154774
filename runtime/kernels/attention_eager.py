"""The fused attention called eagerly: what ``graph.forward`` of a traced backward runs.

Importing this module gives the operators ``arenaplan::attention`` and ``attention_backward`` their kernels on a CPU and
on a CUDA device: the planned ones, in scratch made for the call.
"""

from __future__ import annotations

from typing import Any

import torch

from planner.flash import ATTENTION, ATTENTION_BACKWARD, ATTENTION_DELTA
from planner.graph import Argument, Operation, TensorRef
from planner.operators import workspaces
from planner.trace.fused import heads_inside, statistics_dtype
from runtime.kernels import bind
from runtime.kernels.attention import describe
from runtime.kernels.binding import Context


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse`` of `runtime.kernels.attention.bind_attention`."""
    out = heads_inside(q, (*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=statistics_dtype(q.dtype))
    perform(ATTENTION, (q, k, v, *settings), (out, lse))
    return out, lse


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three gradients of `runtime.kernels.attention.bind_attention_backward`."""
    delta = torch.empty_like(lse)
    perform(ATTENTION_DELTA, (grad_out, out), (delta,))
    grad_q, grad_k, grad_v = (heads_inside(tensor, tuple(tensor.shape)) for tensor in (q, k, v))
    perform(ATTENTION_BACKWARD, (grad_out, q, k, v, lse, delta, *settings), (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


def perform(operator: str, arguments: tuple[Any, ...], outputs: tuple[torch.Tensor | None, ...]) -> None:
    """Run one operation on tensors that lie anywhere, its scratch allocated for the call."""
    views: list[torch.Tensor] = []

    def entered(value: torch.Tensor) -> int:
        views.append(value)
        return len(views) - 1

    given: tuple[Argument, ...] = tuple(
        TensorRef(entered(value)) if isinstance(value, torch.Tensor) else value for value in arguments
    )
    results = tuple(None if output is None else entered(output) for output in outputs)
    bare = Operation(operator, operator, given, (), results)
    scratch = tuple(
        entered(torch.empty(need.shape, dtype=getattr(torch, need.dtype), device=views[0].device))
        for need in workspaces(bare, [describe(view) for view in views])
    )
    threads = torch.get_num_threads()
    with torch.no_grad():
        for call in bind(Operation(operator, operator, given, (), results, scratch), Context(views)):
            run = getattr(call, "run", None)
            call() if run is None else run(threads)


_LIBRARY = torch.library.Library("arenaplan", "IMPL")  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", attention, _key)  # type: ignore[no-untyped-call]
    _LIBRARY.impl("attention_backward", attention_backward, _key)  # type: ignore[no-untyped-call]
