"""Random tensor programs, planned with every strategy, equal eager on every step out of a poisoned arena."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import plan, trace
from planner.graph import DONATED_ROLES, FILLED_ROLES, Role
from planner.plan import Plan
from planner.rewrite.canonical import canonical
from planner.rewrite.dropout import mask_dropout
from planner.rewrite.evict import Evictor
from planner.rewrite.fusion import fuse_elementwise
from runtime import ArenaRuntime
from tests.helpers import forward_equals_eager, joint_equals_eager, same_tree

Step = tuple[str, int, int]
PURE = ("add", "mul", "sin", "softmax", "matmul", "cat", "stack", "sum", "transpose", "slice", "clone", "where", "relu")
MUTATING = ("add_", "mul_", "fill_part", "copy_part", "exp_")


def interpret(steps: list[Step], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run a program over a pool of 4 × 4 tensors; every step adds one tensor or changes one in place."""
    pool = [x * 1.0, y * 1.0]
    for name, i, j in steps:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        pool.append(_STEPS[name](a, b))
    return pool[-1], pool[len(pool) // 2], pool[-1][:1].t()


def _part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c[1:3].copy_(b[:2])
    return c


def _fill(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a + 0
    c[:, ::2].fill_(0.5)
    return c * b


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b.tanh(),
    "sin": lambda a, _: a.sin(),
    "softmax": lambda a, _: a.softmax(-1),
    "matmul": lambda a, b: (a @ b) * 0.25,
    "cat": lambda a, b: torch.cat([a[:2], b[2:]], 0),
    "stack": lambda a, b: torch.stack([a[0], b[1], a[2], b[3]], 1),
    "sum": lambda a, b: a.sum(0, keepdim=True).expand(4, 4) * 0.25 + b,
    "transpose": lambda a, _: a.t(),
    "slice": lambda a, b: torch.cat([a.t()[1:], b[:1].contiguous()]),
    "clone": lambda a, _: a.t().contiguous(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "relu": lambda a, _: a.relu(),
    "add_": lambda a, b: a.add_(b.tanh()),
    "mul_": lambda a, _: a.mul_(0.5),
    "exp_": lambda a, _: (a * 0.1).exp_(),
    "dropout": lambda a, _: torch.nn.functional.dropout(a, 0.4),
    "fill_part": _fill,
    "copy_part": _part,
}


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def programs(names: tuple[str, ...], most: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=most)


def leaves(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs, to be differentiated by."""
    x, y = inputs(seed)
    return x.requires_grad_(), y.requires_grad_()


def runs_as_autograd(made: Plan, program: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Check a joint plan of ``program(*leaves(step))``: its outputs and gradients are eager's, masks included."""
    naive_check(made)
    run = ArenaRuntime(made)
    for step in range(2):
        x, y = leaves(step)
        torch.manual_seed(step)
        expected = program(x, y)
        incoming = [torch.ones_like(item) for item in expected]
        gradients = torch.autograd.grad(expected, (x, y), incoming, allow_unused=True)
        torch.manual_seed(step)
        outputs, ours = run(x, y, *incoming, poison=True)
        same_tree(outputs, expected, exact=False)
        same_tree([ours["input.0"], ours["input.1"]], list(gradients), exact=False)


@given(programs(PURE + MUTATING, 8))
@settings(max_examples=60, deadline=None)
def test_forward_programs(steps: list[Step]) -> None:
    made = forward_equals_eager(lambda x, y: interpret(steps, x, y), inputs, steps=2, exact=False)
    naive_check(made)


@given(programs(PURE, 6))
@settings(max_examples=30, deadline=None)
def test_joint_programs(steps: list[Step]) -> None:
    made = joint_equals_eager(lambda x, y: interpret(steps, x, y), leaves, steps=2)
    naive_check(made)


@given(programs((*PURE, "dropout"), 9), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_recomputed_programs(steps: list[Step], share: float, fused: bool) -> None:
    """Whatever a limit makes wait is recomputed, fused or not; dropout masks are those of the forward."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return interpret(steps, x, y)

    graph = trace(program, leaves(0), mode="joint")
    base = mask_dropout(canonical(graph))
    evictor = Evictor(fuse_elementwise(base) if fused else base, alignment=16)
    most = plan(base, strategy="traced", alignment=16).lower_bound_nbytes
    limit = int(evictor.least_possible_nbytes * (1 - share) + most * share)
    changed = evictor.within(limit)
    made = plan(base if changed is None else changed, strategy="traced", alignment=16)
    assert changed is None or made.lower_bound_nbytes <= limit
    runs_as_autograd(made, program)


@given(programs(PURE + MUTATING, 8), st.sampled_from((16, 64, 256)), st.booleans())
@settings(max_examples=30, deadline=None)
def test_plans_are_deterministic_and_never_worse_than_traced(steps: list[Step], alignment: int, donate: bool) -> None:
    graph = trace(lambda x, y: interpret(steps, x, y), inputs(0), mode="forward")
    one, two = (plan(graph, alignment=alignment, donate=donate) for _ in range(2))
    assert one == two
    assert one.arena_nbytes >= one.lower_bound_nbytes
    traced = plan(graph, alignment=alignment, donate=donate, strategy="traced")
    assert one.arena_nbytes <= traced.arena_nbytes
    naive_check(one)
    if not donate:
        run = ArenaRuntime(one)
        x, y = inputs(1)
        run(x, y)
        for view, value in zip(run.inputs, (x, y), strict=True):
            torch.testing.assert_close(view, value, rtol=0, atol=0)


def naive_check(made: Plan) -> None:
    """Lifetimes recomputed from the operations alone; no two storages share a byte at the same time."""
    graph = made.graph
    end = max(len(graph.operations), 1)
    alive: list[set[int]] = []
    results = {graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None}
    for index, storage in enumerate(graph.storages):
        uses = [
            step
            for step, operation in enumerate(graph.operations)
            if index in {graph.tensors[t].storage for t in operation.reads + operation.writes}
        ]
        first = 0 if storage.role in FILLED_ROLES or storage.role is Role.PARAMETER_GRADIENT or not uses else min(uses)
        kept = storage.role in FILLED_ROLES and storage.role not in DONATED_ROLES
        last = end - 1 if kept or index in results else max(uses, default=first)
        alive.append(set(range(first, last + 1)))
    for i, one in enumerate(graph.storages):
        for j in range(i):
            two = graph.storages[j]
            a, b = made.placements[i].offset, made.placements[j].offset
            if a < b + two.nbytes and b < a + one.nbytes:
                shared = alive[i] & alive[j]
                pair = {made.placements[i].in_place_of, made.placements[j].in_place_of} & {i, j}
                assert not shared or (pair and len(shared) == 1), (one.name, two.name, shared)
