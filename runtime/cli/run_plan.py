"""``arenaplan run PLAN.json``: execute a saved plan on generated inputs."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer

from planner.graph import Port, Role, Tensor
from planner.plan import Plan
from planner.plan_file import load_plan
from planner.update import ordinary_values
from runtime.check import spread
from runtime.cli.errors import FAILED, one_line_errors, say
from runtime.cli.options import Debug, Device, Json, Steps, require_device
from runtime.cli.output import console, print_json
from runtime.executor import ArenaRuntime
from runtime.measure import allocations, now


def run_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A saved plan.")],
    device: Device = "cpu",
    check: Annotated[bool, typer.Option("--check", help="Compare with the same program, a buffer per tensor.")] = False,
    steps: Steps = 5,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the generated inputs.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Execute a saved plan; with --check, results must equal those of a run in which nothing shares memory."""
    with one_line_errors(debug):
        require_device(device)
        plan = load_plan(plan_file)
        inputs, state = generated(plan, seed, device)
        run = ArenaRuntime(plan, device=device, state=state)
        apart = {name: value.clone() for name, value in state.items()}  # a plan may change its states
        reference = ArenaRuntime(spread(plan), device=device, state=apart) if check else None
        seconds: list[float] = []
        differing: list[str] = []
        for step in range(steps):
            torch.manual_seed(seed + step)
            run.arena.poison()
            started = now(device)
            run(*inputs)
            seconds.append(now(device) - started)
            if reference is not None:
                torch.manual_seed(seed + step)
                reference.arena.poison()
                reference(*inputs)
                differing += [name for name in _differences(run, reference) if name not in differing]
        run.load(*inputs)  # donated inputs were consumed
        calls = allocations(lambda: run.execute(threads=1)).calls
        fields = {
            **plan.summary(),
            "steps": steps,
            "step_seconds": statistics.median(seconds),
            "allocator_calls": calls,
            "checked": check,
            "differing": differing,
        }
        if as_json:
            print_json(fields)
        else:
            verdict = "" if not check else " Results equal those of separate buffers." if not differing else ""
            console().print(
                f"{plan_file}: {steps} steps, median {fields['step_seconds']:.4f} s, "
                f"{calls} allocator calls per step.{verdict}"
            )
        if differing:
            say(f"error: results differ from a run with separate buffers: {', '.join(differing[:5])}")
            raise typer.Exit(FAILED)


def generated(plan: Plan, seed: int, device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and states for a plan: normal numbers, zeros where integers could be indices, a new optimizer's states."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = ordinary_values(plan.graph)

    def make(port: Port) -> torch.Tensor:
        tensor: Tensor = plan.graph.tensors[port.tensor or 0]
        dtype = getattr(torch, tensor.dtype)
        if plan.graph.storages[tensor.storage].role is Role.OPTIMIZER_STATE:
            value = torch.zeros(tensor.shape, dtype=dtype)
            if port.name in ordinary and len(ordinary[port.name]) == tensor.numel:
                value = torch.tensor(ordinary[port.name], dtype=dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            value = torch.randn(tensor.shape, generator=generator, dtype=wide).to(dtype)
        elif dtype is torch.bool:
            value = torch.rand(tensor.shape, generator=generator) < 0.5
        else:
            value = torch.zeros(tensor.shape, dtype=dtype)
        return value.to(device)

    states = {port.name: make(port) for port in plan.graph.states}
    return _sharing(plan, [make(port) for port in plan.graph.inputs]), states


def _sharing(plan: Plan, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, those that shared memory when traced as views of one block; indices are written last."""
    tensors = [plan.graph.tensors[port.tensor] if port.tensor is not None else None for port in plan.graph.inputs]
    storages = Counter(tensor.storage for tensor in tensors if tensor is not None)
    blocks: dict[int, torch.UntypedStorage] = {}
    found = list(values)
    for position in sorted(range(len(values)), key=lambda i: not values[i].dtype.is_floating_point):
        tensor = tensors[position]
        if tensor is None or storages[tensor.storage] == 1:
            continue
        value = values[position]
        if tensor.storage not in blocks:
            nbytes = plan.graph.storages[tensor.storage].nbytes
            blocks[tensor.storage] = torch.zeros(nbytes, dtype=torch.uint8, device=value.device).untyped_storage()
        view = torch.empty(0, dtype=value.dtype, device=value.device)
        view.set_(blocks[tensor.storage], tensor.offset // tensor.itemsize, tensor.shape, tensor.strides)
        if all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)):
            view.copy_(value)
        found[position] = view
    return found


def _differences(run: ArenaRuntime, reference: ArenaRuntime) -> list[str]:
    return [
        port.name
        for port in run.plan.graph.results
        if port.tensor is not None
        and not torch.equal(
            run.views[port.tensor].contiguous().view(-1).view(torch.uint8)
            if run.views[port.tensor].numel()
            else run.views[port.tensor],
            reference.views[port.tensor].contiguous().view(-1).view(torch.uint8)
            if run.views[port.tensor].numel()
            else reference.views[port.tensor],
        )
    ]
