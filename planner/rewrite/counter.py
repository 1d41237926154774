"""Dropout masks that are never stored: a seed is drawn once a step, and every use makes the mask again from counters.

``arenaplan.dropout(x, seed, p, scale)`` is its own backward: on the gradient, with the same seed, it drops the same
elements. A stored mask, one byte an element that lives from the forward to the backward, becomes one number of eight
bytes. The numbers drawn are not PyTorch's, so this is asked for: ``plan(counter_dropout(trace(...)))``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.graph import Graph, Operation, Role, Tensor, TensorRef
from planner.operators import DROPOUT, base_name
from planner.rewrite.dropout import mask_dropout
from planner.rewrite.program import Program

_SCALE = ("mul",)


@dataclass(frozen=True, slots=True)
class _Use:
    """One ``fill(x · scale, dropped, 0)``: its operations by position, and what becomes of them."""

    positions: tuple[int, ...]
    fill: int
    source: int
    scale: float


def counter_dropout(graph: Graph) -> Graph:
    """The graph with every dropout whose mask is drawn in it as ``arenaplan.dropout``; others are left alone.

    Left alone: a mask that is a result or is handed in (as to a backward of its own), that anything but dropout reads,
    or that is read in other rows than it was drawn in.
    """
    program = Program(mask_dropout(graph))
    touching: dict[int, list[int]] = {}
    for position, operation in enumerate(program.operations):
        for storage in {program.storage_of(index) for index in operation.reads + operation.writes}:
            touching.setdefault(storage, []).append(position)
    changed: dict[int, Operation | None] = {}
    for position, operation in enumerate(list(program.operations)):
        if operation.operator != "aten.bernoulli_.float" or len(operation.arguments) != 2:
            continue
        uses = _uses(program, position, operation, touching)
        keep = operation.arguments[1]
        if uses and isinstance(keep, float) and 0.0 < keep <= 1.0:
            _replace(program, position, uses, 1.0 - keep, changed)
    program.operations = [
        new for position, old in enumerate(program.operations) if (new := changed.get(position, old)) is not None
    ]
    return program.close()


def _replace(
    program: Program, draw: int, uses: tuple[_Use, ...], p: float, changed: dict[int, Operation | None]
) -> None:
    operation = program.operations[draw]
    name = f"{operation.name}.seed"
    seed = program.view(name, program.new_storage(name, 8, Role.TEMPORARY), 0, (1,), (1,), "int64")
    changed[draw] = replace(
        operation, operator="aten.random_.default", arguments=(TensorRef(seed),), keywords=(), outputs=(seed,)
    )
    for use in uses:
        changed.update(dict.fromkeys(use.positions))
        fill = program.operations[use.fill]
        arguments = (TensorRef(use.source), TensorRef(seed), p, use.scale)
        changed[use.fill] = replace(fill, operator=DROPOUT, arguments=arguments, keywords=())


def _uses(program: Program, draw: int, operation: Operation, touching: dict[int, list[int]]) -> tuple[_Use, ...]:
    """Everything that reads the mask, if all of it is dropout of dense tensors in the mask's own rows; else nothing."""
    (mask,) = operation.outputs
    if mask is None or not _whole(program, program.tensors[mask]):
        return ()
    storage = program.storage_of(mask)
    if storage in program.border:
        return ()
    first, *others = touching[storage]
    if first != draw:
        return ()
    negated = program.operations[others[0]] if others else None
    in_place = negated is not None and base_name(negated.operator) == "logical_not" and negated.outputs == (mask,)
    found: list[_Use] = []
    for position in others[1:] if in_place else others:
        use = _use(program, position, mask, touching, negated=in_place)
        if use is None:
            return ()
        found.append(replace(use, positions=(*use.positions, others[0])) if in_place else use)
    return tuple(found)


def _use(program: Program, position: int, mask: int, touching: dict[int, list[int]], *, negated: bool) -> _Use | None:
    """A use that reads the mask at ``position``: the fill itself, or a negation that only a fill reads."""
    dropped: tuple[int, ...] = ()
    reader = program.operations[position]
    if not negated:
        (flipped,) = reader.outputs[:1] or (None,)
        if base_name(reader.operator) != "logical_not" or flipped is None or reader.arguments != (TensorRef(mask),):
            return None
        places = touching[program.storage_of(flipped)]
        if program.storage_of(flipped) in program.border or len(places) != 2:
            return None
        dropped, position = (position,), places[1]
        if program.operations[position].arguments[1:2] != (TensorRef(flipped),):
            return None
    fill = program.operations[position]
    if base_name(fill.operator) != "masked_fill" or len(fill.arguments) != 3 or fill.arguments[2] != 0:
        return None
    filled, flags, _ = fill.arguments
    output = fill.outputs[0]
    if not isinstance(filled, TensorRef) or not isinstance(flags, TensorRef) or output is None:
        return None
    scaled = _scaling(program, position, filled.tensor, touching)
    if scaled is None:
        return None
    place, source, scale = scaled
    tensors = [program.tensors[index] for index in (flags.tensor, source, output, mask)]
    rows = len({tensor.shape[-1:] for tensor in tensors}) == 1 and len({t.shape for t in tensors[:3]}) == 1
    floats = tensors[1].dtype == tensors[2].dtype and tensors[1].dtype in ("float16", "bfloat16", "float32", "float64")
    if (
        not rows
        or not floats
        or not all(tensor.is_contiguous for tensor in tensors)
        or tensors[0].numel != tensors[3].numel
    ):
        return None
    return _Use((*dropped, place), position, source, scale)


def _scaling(program: Program, fill: int, filled: int, touching: dict[int, list[int]]) -> tuple[int, int, float] | None:
    """``(position, x, number)`` of the product that the fill works on, if x still holds what it held then."""
    storage = program.storage_of(filled)
    places = touching[storage]
    before = [place for place in places if place < fill]
    alone = storage not in program.border or program.operations[fill].outputs == (filled,)
    if len(before) != 1 or not alone:
        return None
    product = program.operations[before[0]]
    if base_name(product.operator) not in _SCALE or len(product.arguments) != 2 or product.keywords:
        return None
    tensor, number = product.arguments
    if not isinstance(tensor, TensorRef) or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if product.outputs != (filled,) or program.storage_of(tensor.tensor) == storage:
        return None
    if program.operations[fill].outputs != (filled,) and places != [before[0], fill]:
        return None
    between = program.operations[before[0] + 1 : fill]
    if any(program.writes_storage(operation, program.storage_of(tensor.tensor)) for operation in between):
        return None
    return before[0], tensor.tensor, float(number)


def _whole(program: Program, tensor: Tensor) -> bool:
    return tensor.is_contiguous and tensor.offset == 0 and tensor.end == program.storages[tensor.storage].nbytes
