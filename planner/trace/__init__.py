"""From an ``nn.Module`` or function to a `Graph`: captured by torch.fx on fake tensors, lowered to storages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from planner.errors import TraceError
from planner.graph import Graph, check_graph
from planner.trace.capture import Captured, capture
from planner.trace.lower import lower

MODES = ("backward", "joint", "forward")
ATTENTIONS = ("math", "fused")


def trace(
    module: Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Any] | None = None,
    wrt: Sequence[str] | None = None,
    mode: str = "backward",
    attention: str = "math",
) -> Graph:
    """Trace ``module`` on ``example_inputs`` into a `Graph` of ATen operators; no data is touched.

    Args:
        module: an ``nn.Module`` or a function of tensors.
        example_inputs: a tuple of positional inputs, or a dict of keyword inputs; real, fake or meta tensors.
        loss: called on the module's output, returns a scalar tensor, which then is the graph's only output.
        wrt: names to differentiate with respect to: a parameter's name, or ``input.K`` (``input.NAME`` for keyword
            inputs). Default: every parameter and input that requires a gradient.
        mode: ``"backward"`` (inputs are the saved activations, then the incoming gradients), ``"joint"`` (forward
            and backward; incoming gradients, if no loss is given, follow the module's inputs) or ``"forward"``.
        attention: what ``F.scaled_dot_product_attention`` is traced as: ``"math"``, the operators it is defined by,
            or ``"fused"``, one operator that holds no attention matrix. Its dropout mask is not eager's.

    Raises:
        TraceError: the program depends on data, has sparse gradients, writes through overlapping views, ….
    """
    if mode not in MODES:
        raise TraceError("the mode", f"{mode!r} is unknown", f"use one of {', '.join(MODES)}")
    if attention not in ATTENTIONS:
        raise TraceError("attention", f"{attention!r} is unknown", f"use one of {', '.join(ATTENTIONS)}")
    captured = capture(module, example_inputs, loss=loss, wrt=wrt, mode=mode, attention=attention)
    graph = lower(captured)
    check_graph(graph)
    return graph


def lower_fx(module: GraphModule) -> Graph:
    """Lower a torch.fx graph of ATen operators, traced by someone else on fake tensors, as a forward program.

    Its inputs are the placeholders that are tensors, in order.

    Args:
        module: every node carries its fake value in ``meta["val"]``, as AOTAutograd leaves it.

    Raises:
        TraceError: an operator cannot be planned.
    """
    (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
    names = tuple(f"output.{index}" for index in range(len(returned)))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [node for node in placeholders if isinstance(node.meta.get("val"), torch.Tensor)]
    captured = Captured(
        module=module,
        mode="forward",
        state_names=(),
        input_names=tuple(f"input.{index}" for index in range(len(tensors))),
        grad_output_names=(),
        parameter_names=frozenset(),
        gradient_names=(),
        output_names=names,
        backward_starts_after=None,
        bindings={},
        rebuild=tuple,
    )
    graph = lower(captured)
    check_graph(graph)
    return graph


__all__ = ["ATTENTIONS", "MODES", "lower_fx", "trace"]
