"""Which submodule, and which of the user's lines, every traced operation comes from.

In the forward pass hooks tell which module is running. A backward operation belongs to the module whose forward made
the autograd node that runs it, and to that forward operation's line: autograd numbers its nodes in the order they are
made (``grad_fn._sequence_nr()``), and torch.fx notes the number of the latest one on every operation it records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules import module as hooks

#: Where a recorded operation's module path is kept, in ``node.meta``.
MODULE = "arenaplan_module"


class Origins:
    """Notes the origin of every fx node in ``node.meta`` while a program is recorded."""

    def __init__(self, module: Callable[..., Any]) -> None:
        named = module.named_modules() if isinstance(module, torch.nn.Module) else ()
        self._paths = {id(part): path for path, part in named}
        self._running: list[tuple[str, torch.fx.Node | None]] = [("", None)]
        self._last: torch.fx.Node | None = None
        self._forward: dict[int, torch.fx.Node] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note modules as they run; autograd's numbers are kept on the nodes meanwhile."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            with preserve_node_meta():
                yield
        finally:
            before.remove()
            after.remove()

    def backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """From here on autograd runs: ask each of its nodes to say when it does."""
        self._mark()
        for node in _autograd_nodes(outputs):
            number = node._sequence_nr()
            made_by = self._forward.get(number)
            if made_by is not None:
                node.register_prehook(self._switch(made_by))

    def finish(self) -> None:
        """Note the origin of what was recorded last."""
        self._mark()

    def _switch(self, made_by: torch.fx.Node) -> Callable[..., None]:
        def switch(*_gradients: object) -> None:
            self._mark()
            self._running = [(str(made_by.meta.get(MODULE, "")), made_by)]

        return switch

    def _enter(self, module: torch.nn.Module, _inputs: object) -> None:
        self._mark()
        self._running.append((self._paths.get(id(module), self._running[-1][0]), None))

    def _leave(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        self._mark()
        if len(self._running) > 1:
            self._running.pop()

    def _mark(self) -> None:
        """Give the nodes recorded since the last mark to what was running."""
        mode = get_proxy_mode()
        if mode is None:  # A dry run.
            return
        path, made_by = self._running[-1]
        newest = next(iter(reversed(mode.tracer.graph.nodes)), None)
        node = newest
        while node is not None and node is not self._last and node.op != "root":
            node.meta[MODULE] = path
            if made_by is None:
                number = node.meta.get("seq_nr")
                if isinstance(number, int):
                    self._forward[number] = node  # Walking backwards: the first with a number stays.
            elif not node.stack_trace:
                node.stack_trace = made_by.stack_trace
            node = node.prev
        self._last = newest


def module_of(node: torch.fx.Node) -> str:
    """Path of the submodule a node comes from, ``"layers.0.attention"``, or ``""``."""
    if MODULE in node.meta:
        return str(node.meta[MODULE])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")  # As Dynamo leaves it.
    if not isinstance(stack, Mapping) or not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix("L['self']").removeprefix(".").replace("['", ".").replace("']", "")


def _autograd_nodes(outputs: Iterable[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
