"""From a captured torch.fx graph to a `Graph`: storages are told apart by the fake tensors' own storages.

View operators vanish; copies (clone, cat, stack, cast, ``copy_``, scatters into slices) all become
``arenaplan.copy`` into a view of the destination, and constant tensors become ``arenaplan.fill``, so that one rewrite
handles every kind of copy.
"""

from __future__ import annotations

import torch

from planner.errors import TraceError
from planner.graph import Graph, Role
from planner.trace.border import finish
from planner.trace.builder import Builder
from planner.trace.capture import Captured


def lower(captured: Captured) -> Graph:
    """Lower a captured step; in mode ``"backward"`` the forward part is split off and kept as ``graph.forward``."""
    builder = Builder()
    ports = _Ports(captured)
    split = ports.split(captured.module.graph)
    for position, node in enumerate(captured.module.graph.nodes):
        builder.backward = position >= split
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # a number, which tracing has put wherever it is used
        if node.op == "placeholder":
            builder.placeholder(node, *ports.placeholder(node))
        elif node.op == "get_attr":
            value = getattr(captured.module, str(node.target))
            if isinstance(value, torch.nn.Module):
                continue  # the body of a control-flow operator, which is refused where it is called
            if not isinstance(value, torch.Tensor):
                cause = f"it uses a {type(value).__name__} of its own"
                raise TraceError(str(node.target), cause, "use the default generator, and tensors or numbers")
            builder.constant(node, value)
        elif node.op == "call_function":
            builder.call(node)
        elif node.op == "output":
            return finish(builder, captured, ports.nodes, node)
    raise TraceError("the module", "the traced graph has no output", "report this as a bug")


class _Ports:
    """Names and roles at the border of the graph, and the split of forward from backward."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._names = iter(
            [
                (name, Role.PARAMETER if name in captured.parameter_names else Role.BUFFER)
                for name in captured.state_names
            ]
            + [(name, Role.INPUT) for name in captured.input_names]
            + [(name, Role.GRAD_OUTPUT) for name in captured.grad_output_names]
        )
        self.nodes: dict[str, torch.fx.Node] = {}

    def placeholder(self, node: torch.fx.Node) -> tuple[str, Role]:
        name, role = next(self._names)
        self.nodes[name] = node
        return name, role

    def split(self, graph: torch.fx.Graph) -> int:
        """Position of the first fx node of the backward pass."""
        for position, node in enumerate(graph.nodes):
            if node.name == self.captured.backward_starts_after:
                return position + 1
        return 0 if self.captured.mode != "forward" else len(graph.nodes)
