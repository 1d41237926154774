"""Dropout masks as one byte an element: PyTorch on a CPU keeps a floating-point tensor of 0 and 1/(1−p) instead.

``noise = bernoulli(keep) / keep`` and every product ``x * noise`` become a boolean mask of dropped elements, a
multiplication by the number 1/keep, and a fill of the dropped elements with zero. The same draws of the generator
decide, and the same float is multiplied with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from planner.graph import Graph, Operation, Role, TensorRef
from planner.rewrite.program import Program

_PRODUCT = "aten.mul.Tensor"


@dataclass(frozen=True, slots=True)
class _Dropout:
    """One recognised dropout: its draw, the division behind it, and the products, by position."""

    storage: int
    draw: int
    division: int
    products: tuple[int, ...]


def mask_dropout(graph: Graph) -> Graph:
    """The graph with every dropout's noise as a boolean mask."""
    program = Program(graph)
    users: dict[int, list[int]] = {}
    for position, operation in enumerate(program.operations):
        for storage in {program.storage_of(index) for index in operation.reads + operation.writes}:
            users.setdefault(storage, []).append(position)
    rewritten: dict[int, list[Operation]] = {}
    for storage, positions in users.items():
        found = _recognise(program, storage, positions)
        if found is not None:
            rewritten |= _rewrite(program, found)
    program.operations = [
        new for position, old in enumerate(program.operations) for new in rewritten.get(position, [old])
    ]
    return program.close()


def _recognise(program: Program, storage: int, positions: list[int]) -> _Dropout | None:
    if storage in program.border or len(positions) < 3:
        return None
    draw, division, *products = (program.operations[position] for position in positions)
    if draw.operator != "aten.bernoulli_.float" or division.operator not in ("aten.div_.Scalar", "aten.div_.Tensor"):
        return None
    if len(draw.arguments) != 2 or len(division.arguments) != 2:
        return None
    keep, divisor = draw.arguments[1], division.arguments[1]
    if not isinstance(keep, float) or not 0.0 < keep <= 1.0 or divisor != keep:
        return None
    noise = draw.outputs[0]
    if noise is None or division.outputs != (noise,) or not program.tensors[noise].is_contiguous:
        return None
    if program.tensors[noise].end != program.storages[storage].nbytes:
        return None
    if not all(_is_product(program, product, storage) for product in products):
        return None
    return _Dropout(storage, positions[0], positions[1], tuple(positions[2:]))


def _is_product(program: Program, operation: Operation, storage: int) -> bool:
    """Whether the operation is ``x * noise`` of equal shapes and dtypes, its result elsewhere."""
    if operation.operator != _PRODUCT or len(operation.reads) != 2 or operation.outputs[0] is None:
        return False
    noises = [index for index in operation.reads if program.storage_of(index) == storage]
    tensors = [program.tensors[index] for index in (*operation.reads, operation.outputs[0])]
    alike = len({tensor.shape for tensor in tensors}) == 1 and len({tensor.dtype for tensor in tensors}) == 1
    return len(noises) == 1 and alike and program.storage_of(operation.outputs[0]) != storage


def _rewrite(program: Program, found: _Dropout) -> dict[int, list[Operation]]:
    draw, division = program.operations[found.draw], program.operations[found.division]
    noise = program.tensors[draw.reads[0]]
    keep = draw.arguments[1]
    mask_storage = program.new_storage(f"{noise.name}.dropped", noise.numel, Role.TEMPORARY)

    def mask(index: int) -> int:
        tensor = program.tensors[index]
        offset = tensor.offset // tensor.itemsize
        return program.view(f"{tensor.name}.dropped", mask_storage, offset, tensor.shape, tensor.strides, "bool")

    whole = mask(draw.reads[0])
    drawn = replace(draw, arguments=(TensorRef(whole), keep), outputs=(whole,))
    negated = replace(division, operator="aten.logical_not.default", arguments=(TensorRef(whole),), outputs=(whole,))
    # What PyTorch's own division leaves in the noise, in the noise's dtype.
    scale = torch.ones((), dtype=getattr(torch, noise.dtype)).div_(keep).item() if isinstance(keep, float) else 1.0
    result: dict[int, list[Operation]] = {found.draw: [drawn], found.division: [negated]}
    for position in found.products:
        product = program.operations[position]
        (factor,) = (index for index in product.reads if program.storage_of(index) != found.storage)
        (dropped,) = (index for index in product.reads if program.storage_of(index) == found.storage)
        output = product.outputs[0]
        if output is None:
            continue
        scaled_storage = program.new_storage(
            f"{product.name}.scaled", program.storages[program.storage_of(output)].nbytes, Role.TEMPORARY
        )
        result_tensor = program.tensors[output]
        scaled = program.view(
            f"{product.name}.scaled",
            scaled_storage,
            result_tensor.offset,
            result_tensor.shape,
            result_tensor.strides,
            result_tensor.dtype,
        )
        result[position] = [
            replace(product, name=f"{product.name}.scale", arguments=(TensorRef(factor), scale), outputs=(scaled,)),
            replace(
                product,
                operator="aten.masked_fill.Scalar",
                arguments=(TensorRef(scaled), TensorRef(mask(dropped)), 0),
            ),
        ]
    return result
