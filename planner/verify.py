"""An independent, deliberately simple check of a plan. It shares no code with the stages that made the plan."""

from __future__ import annotations

import numpy as np

from planner.errors import VerificationError
from planner.graph import DONATED_ROLES, FILLED_ROLES, Graph, Port, Role, Tensor
from planner.operators import is_random, may_overwrite, mutated
from planner.plan import Plan


def verify(plan: Plan, graph: Graph | None = None) -> None:
    """Raise `VerificationError` unless the plan keeps every rule; with ``graph``, also that it answers that graph.

    Checked: one placement per storage; alignment; everything inside the arena; stated lifetimes cover every use,
    what the caller fills from step 0 and results to the end; nothing is read before it is written; no two storages
    overlap in bytes and steps, unless one takes over the other's bytes in place, in the step in which that one dies,
    as the operator's facts allow; the stated lower bound is the peak of live bytes, and the arena not below it.
    """
    _check_counts(plan)
    _check_bytes(plan)
    _check_lifetimes(plan)
    _check_written_before_read(plan)
    _check_in_place(plan)
    _check_lanes(plan)
    _check_overlaps(plan)
    _check_totals(plan)
    if graph is not None:
        _check_interface(plan, graph)


def _check_counts(plan: Plan) -> None:
    placed, stored = len(plan.placements), len(plan.graph.storages)
    if placed != stored:
        raise VerificationError("placements", (), f"{placed} placements for {stored} storages")
    if plan.alignment < 1:
        raise VerificationError("alignment", (), f"the alignment is {plan.alignment}")
    if plan.arena_nbytes % plan.alignment:
        raise VerificationError(
            "alignment", (), f"the arena size {plan.arena_nbytes} is no multiple of {plan.alignment}"
        )


def _check_bytes(plan: Plan) -> None:
    for storage, placement in zip(plan.graph.storages, plan.placements, strict=True):
        end = placement.offset + storage.nbytes
        if placement.offset < 0 or placement.offset % plan.alignment:
            cause = f"storage {storage.name} lies at offset {placement.offset}, no multiple of {plan.alignment}"
            raise VerificationError("alignment", (storage.name,), cause)
        if end > plan.arena_nbytes:
            cause = f"storage {storage.name} ends at byte {end} of an arena of {plan.arena_nbytes}"
            raise VerificationError("bounds", (storage.name,), cause)


def _uses(graph: Graph) -> list[list[int]]:
    """The steps that touch each storage, ascending."""
    uses: list[list[int]] = [[] for _ in graph.storages]
    for step, operation in enumerate(graph.operations):
        for index in {graph.tensors[tensor].storage for tensor in operation.reads + operation.writes}:
            uses[index].append(step)
    return uses


def _result_storages(graph: Graph) -> set[int]:
    """Storages somebody reads after the last step."""
    return {graph.tensors[port.tensor].storage for port in graph.results if port.tensor is not None}


def _check_lifetimes(plan: Plan) -> None:
    graph = plan.graph
    results = _result_storages(graph)
    for index, uses in enumerate(_uses(graph)):
        storage, placement = graph.storages[index], plan.placements[index]
        name, birth, death = storage.name, placement.birth, placement.death
        if not 0 <= birth < death <= plan.steps:
            raise VerificationError(
                "lifetime", (name,), f"storage {name} lives [{birth}, {death}) of {plan.steps} steps"
            )
        if uses and (birth > uses[0] or death <= uses[-1]):
            cause = f"storage {name} lives [{birth}, {death}) but is used from step {uses[0]} to step {uses[-1]}"
            raise VerificationError("lifetime", (name,), cause)
        reserved = storage.role is Role.PARAMETER_GRADIENT
        if (storage.role in FILLED_ROLES or reserved) and birth != 0:
            raise VerificationError(
                "lifetime", (name,), f"storage {name} ({storage.role}) must live from step 0, not {birth}"
            )
        permanent = reserved or (storage.role in FILLED_ROLES and storage.role not in DONATED_ROLES)
        if (permanent or index in results) and death != plan.steps:
            cause = f"storage {name} ({storage.role}) must live to step {plan.steps}, not {death}"
            raise VerificationError("lifetime", (name,), cause)


def _check_written_before_read(plan: Plan) -> None:
    graph = plan.graph
    ready = {index for index, storage in enumerate(graph.storages) if storage.role in FILLED_ROLES}
    for step, operation in enumerate(graph.operations):
        written = {graph.tensors[tensor].storage for tensor in operation.writes}
        for tensor in operation.reads:
            index = graph.tensors[tensor].storage
            if graph.storages[index].nbytes and index not in ready and index not in written:
                name = graph.storages[index].name
                cause = f"step {step} ({operation.name}) reads storage {name} before anything is written there"
                raise VerificationError("order", (operation.name, name), cause)
        ready |= written
    for port in graph.outputs + graph.gradients:
        if port.tensor is not None and graph.tensors[port.tensor].storage not in ready:
            raise VerificationError("order", (port.name,), f"result {port.name} is never written")


def _check_in_place(plan: Plan) -> None:
    """An operation that writes bytes it also reads must be in place by its own definition, or by its facts."""
    graph = plan.graph
    for step, operation in enumerate(graph.operations):
        for output in operation.outputs:
            if output is None or output in mutated(operation):
                continue
            for operand in operation.reads:
                one, two = graph.tensors[output], graph.tensors[operand]
                if one.storage != two.storage or one.end <= two.offset or two.end <= one.offset or not one.numel:
                    continue
                allowed = one.offset == two.offset and may_overwrite(operation, one, two, operand)
                if not allowed and not _apart(one, two):
                    cause = f"step {step} ({operation.name}) writes {one.name} over {two.name}, which it reads"
                    raise VerificationError("in place", (operation.name, one.name, two.name), cause)


def _check_lanes(plan: Plan) -> None:
    """Lanes of a section share no bytes that one of them writes, and whatever they touch lives for all of it."""
    graph = plan.graph
    step = 0
    while step < len(graph.operations):
        if graph.operations[step].lane is None:
            step += 1
            continue
        begin = step
        while step < len(graph.operations) and graph.operations[step].lane is not None:
            step += 1
        _check_section(plan, begin, step)


def _check_section(plan: Plan, begin: int, end: int) -> None:
    graph = plan.graph
    accesses: dict[int, dict[tuple[int, int], bool]] = {}
    for operation in graph.operations[begin:end]:
        if is_random(operation.operator):
            raise VerificationError("lanes", (operation.name,), f"{operation.name} draws random numbers in a lane")
        for written, indices in ((False, operation.reads), (True, operation.writes)):
            for index in indices:
                found = accesses.setdefault(graph.tensors[index].storage, {})
                key = (index, operation.lane or 0)
                found[key] = found.get(key, False) or written
    for storage, found in accesses.items():
        name, placement = graph.storages[storage].name, plan.placements[storage]
        if placement.birth > begin or placement.death < end:
            cause = f"storage {name} is used in the section of steps [{begin}, {end}) and does not live through it"
            raise VerificationError("lanes", (name,), cause)
        if any(found.values()):
            _check_shared(plan, name, found)


def _check_shared(plan: Plan, name: str, found: dict[tuple[int, int], bool]) -> None:
    """No tensor of one lane meets a tensor of another that either of them writes."""
    tensors = plan.graph.tensors
    order = sorted(found.items(), key=lambda item: tensors[item[0][0]].offset)
    for position, ((index, lane), written) in enumerate(order):
        one = tensors[index]
        for (other, other_lane), other_written in order[position + 1 :]:
            two = tensors[other]
            if two.offset >= one.end:
                break
            if lane != other_lane and (written or other_written) and not _apart(one, two):
                cause = f"lanes {lane} and {other_lane} share bytes of {name}: {one.name} and {two.name}"
                raise VerificationError("lanes", (name, one.name, two.name), cause)


def _apart(one: Tensor, two: Tensor) -> bool:
    """Whether two views of one storage certainly share no byte: apart, or in different columns of equal rows."""
    if one.numel == 0 or two.numel == 0 or one.end <= two.offset or two.end <= one.offset:
        return True
    rows = {s * t.itemsize for t in (one, two) for s, n in zip(t.strides, t.shape, strict=True) if n > 1 and s}
    for row in rows:
        columns = []
        for tensor in (one, two):
            reach = tensor.itemsize + sum(
                (size - 1) * stride * tensor.itemsize
                for size, stride in zip(tensor.shape, tensor.strides, strict=True)
                if stride * tensor.itemsize % row
            )
            columns.append((tensor.offset % row, tensor.offset % row + reach))
        (low, high), (other_low, other_high) = columns
        if max(high, other_high) <= row and (high <= other_low or other_high <= low):
            return True
    return False


def _check_overlaps(plan: Plan) -> None:
    """Compare every storage with all that are alive at its birth."""
    order = sorted(
        (index for index, storage in enumerate(plan.graph.storages) if storage.nbytes),
        key=lambda index: (plan.placements[index].birth, index),
    )
    if not order:
        return
    begin = np.array([plan.placements[index].offset for index in order], dtype=np.int64)
    end = begin + np.array([plan.graph.storages[index].nbytes for index in order], dtype=np.int64)
    birth = np.array([plan.placements[index].birth for index in order], dtype=np.int64)
    death = np.array([plan.placements[index].death for index in order], dtype=np.int64)
    results = _result_storages(plan.graph)
    for index, placement in enumerate(plan.placements):
        early = placement.in_place_of
        if early is not None and (
            not 0 <= early < len(plan.placements) or not _takes_over(plan, index, early, results)
        ):
            name = plan.graph.storages[index].name
            raise VerificationError("in place", (name,), f"storage {name} cannot take over the bytes it is said to")
    alive = np.empty(0, dtype=np.int64)
    for position in range(len(order)):
        alive = alive[death[alive] > birth[position]]
        clash = alive[(begin[alive] < end[position]) & (begin[position] < end[alive])]
        for other in clash.tolist():
            if not _takes_over(plan, order[position], order[other], results):
                _report_overlap(plan, order[position], order[other])
        alive = np.append(alive, position)


def _report_overlap(plan: Plan, late: int, early: int) -> None:
    names = (plan.graph.storages[early].name, plan.graph.storages[late].name)
    one, two = plan.placements[early], plan.placements[late]
    sizes = plan.graph.storages[early].nbytes, plan.graph.storages[late].nbytes
    cause = (
        f"storages {names[0]} (bytes [{one.offset}, {one.offset + sizes[0]}), steps [{one.birth}, {one.death})) and "
        f"{names[1]} (bytes [{two.offset}, {two.offset + sizes[1]}), steps [{two.birth}, {two.death})) overlap"
    )
    raise VerificationError("overlap", names, cause)


def _takes_over(plan: Plan, late: int, early: int, results: set[int]) -> bool:
    """Whether ``late`` is written onto ``early`` in the one step they share, and the operator allows it."""
    graph = plan.graph
    new, old = plan.placements[late], plan.placements[early]
    if new.in_place_of != early or new.offset != old.offset or old.death != new.birth + 1 or old.birth > new.birth:
        return False
    donated = graph.storages[early].role not in FILLED_ROLES or graph.storages[early].role in DONATED_ROLES
    if new.birth >= len(graph.operations) or early in results or not donated:
        return False
    if graph.storages[early].role is Role.PARAMETER_GRADIENT:
        return False
    operation = graph.operations[new.birth]
    operands = [index for index in operation.reads if graph.tensors[index].storage == early]
    outputs = [index for index in operation.outputs if index is not None and graph.tensors[index].storage == late]
    if len(operands) != 1 or len(outputs) != 1 or any(graph.tensors[i].storage == late for i in operation.reads):
        return False
    operand, output = graph.tensors[operands[0]], graph.tensors[outputs[0]]
    return operand.offset == output.offset and may_overwrite(operation, output, operand, operands[0])


def _check_totals(plan: Plan) -> None:
    """Recompute the peak of live bytes; a storage that takes over another's bytes is counted once in that step."""
    unit = plan.alignment
    change = [0] * (plan.steps + 1)
    for storage, placement in zip(plan.graph.storages, plan.placements, strict=True):
        size = -(-storage.nbytes // unit) * unit
        change[placement.birth + (placement.in_place_of is not None)] += size
        change[placement.death] -= size
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    if plan.lower_bound_nbytes != peak:
        raise VerificationError("bound", (), f"the lower bound is stated as {plan.lower_bound_nbytes}, it is {peak}")
    if plan.arena_nbytes < peak:
        raise VerificationError("bound", (), f"the arena has {plan.arena_nbytes} bytes, {peak} are alive at once")


def _ports(graph: Graph, ports: tuple[Port, ...]) -> list[tuple[str, tuple[int, ...], str] | tuple[str]]:
    return [
        (port.name,)
        if port.tensor is None
        else (port.name, graph.tensors[port.tensor].shape, graph.tensors[port.tensor].dtype)
        for port in ports
    ]


def _check_interface(plan: Plan, graph: Graph) -> None:
    for kind in ("inputs", "states", "constants", "outputs", "gradients", "mutated"):
        planned, traced = _ports(plan.graph, getattr(plan.graph, kind)), _ports(graph, getattr(graph, kind))
        if planned != traced:
            raise VerificationError("interface", (), f"the plan's {kind} are not those of the graph")
