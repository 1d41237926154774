"""Shared by the tests: run a traced plan with a poisoned arena and compare with eager, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from planner import plan, trace, verify
from planner.plan import Plan
from runtime import ArenaRuntime

STRATEGIES = ("traced", "materialized", "auto")


def forward_equals_eager(
    function: Callable[..., Any],
    make_inputs: Callable[[int], tuple[Any, ...]],
    *,
    strategies: Sequence[str] = STRATEGIES,
    steps: int = 3,
    exact: bool = True,
) -> Plan:
    """Plan ``function`` forward with every strategy; outputs and mutated inputs equal eager's on each step."""
    graph = trace(function, make_inputs(0), mode="forward")
    made = None
    for strategy in strategies:
        made = plan(graph, strategy=strategy)
        verify(made, graph)
        run = ArenaRuntime(made)
        for step in range(steps):
            ours_in, eager_in = make_inputs(step), make_inputs(step)
            with torch.no_grad():
                expected = function(*eager_in)
            actual = run(*ours_in, poison=True)
            same_tree(actual, expected, exact=exact)
            same_tree(ours_in, eager_in, exact=exact)
    if made is None:
        raise ValueError("no strategy given")
    return made


def joint_equals_eager(
    module: Callable[..., Any],
    make_inputs: Callable[[int], tuple[Any, ...]],
    *,
    strategies: Sequence[str] = STRATEGIES,
    steps: int = 3,
    exact: bool = False,
) -> Plan:
    """Plan forward and backward together; outputs and gradients equal autograd's on each step."""
    graph = trace(module, make_inputs(0), mode="joint")
    made = None
    for strategy in strategies:
        made = plan(graph, strategy=strategy)
        run = ArenaRuntime(made)
        for step in range(steps):
            inputs = make_inputs(step)
            torch.manual_seed(step)
            expected = module(*inputs)
            flat = [item for item in pytree.tree_leaves(expected) if isinstance(item, torch.Tensor)]
            wanted = [item for item in flat if item.requires_grad]
            incoming = [
                torch.randn(item.shape, generator=torch.Generator().manual_seed(7)).to(item.dtype) for item in wanted
            ]
            named = dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
            named |= {f"input.{k}": item for k, item in enumerate(inputs) if isinstance(item, torch.Tensor)}
            gradients = torch.autograd.grad(
                wanted,
                [named[port.name] for port in graph.gradients],
                [item.clone() for item in incoming],  # a backward may change what it is handed
                allow_unused=True,
            )
            torch.manual_seed(step)
            outputs, ours = run(*inputs, *incoming, poison=True)
            same_tree(outputs, expected, exact=exact)
            for port, gradient in zip(graph.gradients, gradients, strict=True):
                same_tree(ours[port.name], gradient, exact=exact)
    if made is None:
        raise ValueError("no strategy given")
    return made


def same_tree(actual: Any, expected: Any, *, exact: bool) -> None:
    """Compare two structures of tensors, strides aside."""
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(ours)} results, {len(theirs)} expected")
    for one, two in zip(ours, theirs, strict=True):
        if isinstance(two, torch.Tensor):
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
            torch.testing.assert_close(one.detach(), two.detach(), equal_nan=True, **tolerance)
        elif one != two:
            raise AssertionError(f"{one!r} is not {two!r}")
