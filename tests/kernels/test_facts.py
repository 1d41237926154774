"""Every fact of `planner.operators`, proved by execution: results, strides, in-place, and no allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.graph import Operation, Tensor, TensorRef, dense_strides
from planner.operators import FACTS, accepts_strides, base_name, facts, is_elementwise, may_overwrite
from tests.kernels.cases import ELEMENTWISE, ELSEWHERE, OTHERS, Call
from tests.kernels.harness import perform

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}


def reference(call: Call, values: list[Any]) -> list[torch.Tensor | None]:
    """What ATen returns for the same arguments."""
    _, name, overload = call.operator.split(".")
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    result = getattr(getattr(torch.ops.aten, name), overload)(*copies, **call.keywords)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def check(call: Call, dtype: torch.dtype, **options: Any) -> None:
    values = call.arguments(dtype)
    expected = reference(call, values)
    outcome = perform(call.operator, values, call.keywords, expected, mutated=call.mutated, **options)
    rtol, atol = TOLERANCE[dtype]
    for one, two in zip(outcome.results, [item for item in expected if item is not None], strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol, equal_nan=True)
    assert outcome.allocated_nbytes == outcome.unplanned_nbytes
    assert outcome.unplanned_nbytes == 0 or (dtype != torch.float32 and not FACTS[base_name(call.operator)].halves)


def named(calls: list[Call]) -> list[Any]:
    return [pytest.param(call, id=f"{position}-{call.operator}") for position, call in enumerate(calls)]


def test_every_fact_has_an_example() -> None:
    shown = {base_name(call.operator) for call in ELEMENTWISE + OTHERS} | ELSEWHERE
    assert shown == set(FACTS)
    pointwise = {name for name, fact in FACTS.items() if fact.elementwise}
    assert {base_name(call.operator) for call in ELEMENTWISE} == pointwise - ELSEWHERE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", named(ELEMENTWISE + OTHERS))
def test_results_equal_eager_without_allocation(call: Call, dtype: torch.dtype) -> None:
    if dtype != torch.float32 and not call.halves:
        pytest.skip("not drawn in 16 bits")
    check(call, dtype, count=dtype != torch.bfloat16 or not is_elementwise(call.operator))


@pytest.mark.parametrize("call", named([call for call in ELEMENTWISE + OTHERS if accepts_strides(call.operator)]))
def test_strided_operands_are_read_and_written_where_they_lie(call: Call) -> None:
    check(call, torch.float32, strided=True)


def overwritable(call: Call) -> list[int]:
    """Positions of the operands that the first result may be written onto."""
    values = call.arguments(torch.float32)
    first = next(item for item in reference(call, values) if item is not None)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    refs = iter(range(len(tensors)))
    arguments = tuple(TensorRef(next(refs)) if isinstance(value, torch.Tensor) else None for value in values)
    operation = Operation("op", call.operator, arguments, (), (len(tensors),))

    def described(tensor: torch.Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        return Tensor("t", 0, 0, shape, dense_strides(shape), str(tensor.dtype).removeprefix("torch."))

    return [
        position
        for position, argument in enumerate(arguments)
        if isinstance(argument, TensorRef)
        and may_overwrite(operation, described(first), described(tensors[argument.tensor]), argument.tensor)
    ]


PLACES = [
    pytest.param(call, position, strided, id=f"{number}-{call.operator}-{position}{'-strided' if strided else ''}")
    for number, call in enumerate(ELEMENTWISE + OTHERS)
    if call.mutated is None
    for position in overwritable(call)
    for strided in ((False, True) if accepts_strides(call.operator) else (False,))
]


@pytest.mark.parametrize(("call", "position", "strided"), PLACES)
def test_a_result_may_be_written_onto_the_operand(call: Call, position: int, strided: bool) -> None:
    check(call, torch.float32, strided=strided, overwrite=position, count=strided)


@pytest.mark.parametrize("call", named([call for call in OTHERS if facts(call.operator).overwrites]))
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_normalisations_in_place_in_16_bits(call: Call, dtype: torch.dtype) -> None:
    for position in overwritable(call):
        check(call, dtype, overwrite=position, count=False)


def test_only_elementwise_operators_split_into_batches() -> None:
    assert is_elementwise("aten.add.Tensor")
    assert not is_elementwise("aten.sum.default")
    assert not is_elementwise("aten.no_such_operator.default")
