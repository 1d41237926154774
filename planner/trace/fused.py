"""The fused attention as a torch operator, and how calls of PyTorch's attention become calls of it while tracing.

The operator has a shape function and a derivative here, and its kernels in the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch.overrides import TorchFunctionMode

from planner.flash import ATTENTION, ATTENTION_BACKWARD, ATTENTION_DELTA
from planner.graph import Role, TensorRef, dense_strides
from planner.operators import accumulator

if TYPE_CHECKING:
    from planner.trace.builder import Builder

_SETTINGS = "Tensor? mask, Tensor? seed, float dropout, float scale, bool causal"

torch.library.define("arenaplan::attention", f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)")
torch.library.define(
    "arenaplan::attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)


def heads_inside(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An empty ``(batch, heads, length, depth)`` tensor, in memory ``(batch, length, heads, depth)``.

    So merging the heads, which follows attention in every model, is a view.
    """
    batch, heads, length, depth = shape
    return like.new_empty((batch, length, heads, depth)).transpose(1, 2)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of each row's log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shapes(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = heads_inside(q, (*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=statistics_dtype(q.dtype))


def _backward_shapes(
    _grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    one, two, three = (heads_inside(tensor, tuple(tensor.shape)) for tensor in (q, k, v))
    return one, two, three


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, seed, *settings = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None, _grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * 5
    if grad_out is None:
        return (None, None, None, *nothing)
    q, k, v, out, lse, mask, seed = ctx.saved_tensors
    grads = torch.ops.arenaplan.attention_backward(grad_out, q, k, v, out, lse, mask, seed, *ctx.settings)
    return (*grads, *nothing)


torch.library.register_fake("arenaplan::attention", _shapes)
torch.library.register_fake("arenaplan::attention_backward", _backward_shapes)
torch.library.register_autograd("arenaplan::attention", _backward, setup_context=_setup)

#: ``(q, k, v, mask, seed, dropout, scale, causal)`` → the attention's result.
Attend = Callable[..., torch.Tensor]


def fused_attention(*operands: Any) -> torch.Tensor:
    """The operator, its statistics left out."""
    result: torch.Tensor = torch.ops.arenaplan.attention(*operands)[0]
    return result


@contextmanager
def attention_as(attend: Attend = fused_attention) -> Iterator[None]:
    """Let ``F.scaled_dot_product_attention`` call ``attend`` wherever the fused operator can take its place.

    Left as it is: a mask that needs a gradient, operands of different dtypes or broadcast batches, and dropout of 1.
    With dropout a seed is drawn from PyTorch's generator, one number a call.
    """
    original = F.scaled_dot_product_attention

    def call(*arguments: Any, **keywords: Any) -> Any:
        operands = _operands(*arguments, **keywords)
        return original(*arguments, **keywords) if operands is None else _shaped(attend, arguments, keywords, operands)

    class Route(TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (call if function is original else function)(*args, **(kwargs or {}))

    # The mode catches the name wherever it was imported to; functions of PyTorch that call it find it here.
    F.scaled_dot_product_attention = call
    try:
        with Route():
            yield
    finally:
        F.scaled_dot_product_attention = original


def _operands(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """What the operator takes, seed aside, in four dimensions; ``None`` if PyTorch's own attention must do it."""
    tensors = (query, key, value)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or query.dim() not in (3, 4):
        return None
    rank = query.dim()
    if len({tensor.dtype for tensor in tensors}) != 1 or not query.dtype.is_floating_point or query.itemsize < 2:
        return None
    q, k, v = (tensor.unsqueeze(1) if rank == 3 and tensor.dim() == 3 else tensor for tensor in tensors)
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3]:
        return None
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or 0 in (q.numel(), k.numel(), v.numel()):
        return None
    if q.shape[1] != k.shape[1] and not (enable_gqa and q.shape[1] % k.shape[1] == 0):
        return None
    mask = attn_mask
    if mask is not None:
        if is_causal or mask.requires_grad or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
            return None
        mask = mask.unsqueeze(1) if rank == 3 and mask.dim() == 3 else mask
        mask = mask.expand(*q.shape[:3], k.shape[2])
    if not 0.0 <= dropout_p < 1.0:
        return None
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    return q, k, v, mask, float(dropout_p), factor, bool(is_causal)


def _shaped(attend: Attend, arguments: tuple[Any, ...], keywords: dict[str, Any], operands: tuple[Any, ...]) -> Any:
    q, k, v, mask, dropout, scale, causal = operands
    seed = torch.empty(1, dtype=torch.int64, device=q.device).random_() if dropout > 0 else None
    result = attend(q, k, v, mask, seed, dropout, scale, causal)
    query = arguments[0] if arguments else keywords["query"]
    return result.squeeze(1) if query.dim() == 3 else result


# -- lowering ---------------------------------------------------------------------------------------------------


def lower_attention(builder: Builder, node: torch.fx.Node) -> bool:
    """One operation."""
    arguments = tuple(builder.argument(item) for item in node.args)
    results = _results(builder, node)
    builder.emit(node, ATTENTION, arguments, (), results)
    return True


def lower_attention_backward(builder: Builder, node: torch.fx.Node) -> bool:
    """Two operations: the row sums first, after which the result of the forward is no longer needed."""
    grad_out, q, k, v, out, lse, *settings = (builder.argument(item) for item in node.args)
    statistics = builder.tensors[lse.tensor] if isinstance(lse, TensorRef) else None
    if statistics is None or not isinstance(out, TensorRef):
        return False
    shape = statistics.shape
    delta = builder.fresh(
        f"{node.name}.delta", shape, dense_strides(shape), accumulator(builder.tensors[out.tensor].dtype)
    )
    builder.emit(node, ATTENTION_DELTA, (grad_out, out), (), (delta,))
    results = _results(builder, node)
    builder.emit(node, ATTENTION_BACKWARD, (grad_out, q, k, v, lse, TensorRef(delta), *settings), (), results)
    return True


def _results(builder: Builder, node: torch.fx.Node) -> tuple[int, ...]:
    """The new tensors a node returns."""
    results = tuple(
        builder.add_value(f"{node.name}.{position}", value, Role.TEMPORARY, node)
        for position, value in enumerate(node.meta["val"])
    )
    builder.tensor_of[node] = results
    return results
