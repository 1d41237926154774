"""Which operations touch each storage, and the questions that recognising a chain of operations asks of that."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from planner.graph import Argument, Operation, TensorRef
from planner.operators import COPY, base_name
from planner.rewrite.program import Program

#: Dtypes whose casts may be left out where float32 is computed in: none holds more.
_FLOATS = frozenset({"float16", "bfloat16", "float32"})


class Uses:
    """Positions of the operations that touch, and that write, each storage of a program, ascending."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.touching: dict[int, list[int]] = {}
        self.writing: dict[int, list[int]] = {}
        for position, operation in enumerate(program.operations):
            for storage in {program.storage_of(index) for index in operation.reads + operation.writes}:
                self.touching.setdefault(storage, []).append(position)
            for storage in {program.storage_of(index) for index in operation.writes}:
                self.writing.setdefault(storage, []).append(position)

    def maker(self, index: int, *names: str) -> tuple[int, Operation] | None:
        """The one operation that writes a tensor's storage, if it writes just this tensor and has one of the names."""
        positions = self.writing.get(self.program.storage_of(index), [])
        if len(positions) != 1:
            return None
        operation = self.program.operations[positions[0]]
        fits = base_name(operation.operator) in names and operation.outputs == (index,) and operation.lane is None
        return (positions[0], operation) if fits else None

    def readers(self, index: int) -> list[int]:
        """Positions of the operations that read this very tensor."""
        touching = self.touching.get(self.program.storage_of(index), [])
        return [position for position in touching if index in self.program.operations[position].reads]

    def alone(self, index: int, position: int) -> int | None:
        """The one operation beside that at ``position`` that touches the tensor's storage, if it reads the tensor."""
        storage = self.program.storage_of(index)
        others = [other for other in self.touching.get(storage, []) if other != position]
        if storage in self.program.border or len(others) != 1 or others != self.readers(index):
            return None
        return others[0]

    def inner(self, index: int, gone: Collection[int]) -> bool:
        """Whether the tensor's storage is touched by these operations only, and by no caller."""
        storage = self.program.storage_of(index)
        return storage not in self.program.border and all(place in gone for place in self.touching.get(storage, ()))

    def cast(self, position: int) -> tuple[int, int] | None:
        """``(read, written)`` of an operation that only changes the floating-point dtype of a tensor, float64 aside."""
        operation = self.program.operations[position]
        if operation.operator != COPY or len(operation.reads) != 1 or operation.lane is not None:
            return None
        source, target = operation.reads[0], operation.outputs[0]
        if target is None or operation.arguments != (TensorRef(source),):
            return None
        one, two = self.program.tensors[source], self.program.tensors[target]
        floats = {one.dtype, two.dtype} <= _FLOATS
        same = one.shape == two.shape and one.is_contiguous and two.is_contiguous
        return (source, target) if floats and same and self.maker(target, COPY) is not None else None

    def origins(self, index: int) -> Iterator[tuple[int, frozenset[int]]]:
        """The tensor, then what it was cast from, and so on, each with the casts between."""
        casts: set[int] = set()
        yield index, frozenset()
        while (made := self.maker(index, COPY)) is not None and (found := self.cast(made[0])) is not None:
            casts.add(made[0])
            index = found[0]
            yield index, frozenset(casts)

    def casts_of(self, index: int) -> dict[int, frozenset[int]]:
        """The tensor and everything it is cast to, each with the casts between."""
        found = {index: frozenset[int]()}
        waiting = [index]
        while waiting:
            source = waiting.pop()
            for position in self.readers(source):
                made = self.cast(position)
                if made is not None and made[1] not in found:
                    found[made[1]] = found[source] | {position}
                    waiting.append(made[1])
        return found

    def before_casts(self, index: int, gone: set[int], kept: Collection[int] = frozenset()) -> int:
        """What the tensor was cast from, going back while nothing but ``gone`` reads the casts; these join ``gone``.

        Casts at the positions ``kept`` stay.
        """
        result, added = index, frozenset[int]()
        for origin, casts in self.origins(index):
            if not casts.isdisjoint(kept):
                break
            between = [self.program.operations[position].outputs[0] for position in casts]
            if all(item is not None and self.inner(item, gone | casts) for item in between):
                result = origin
                added = casts
        gone |= added
        return result

    def after_cast(self, index: int, position: int, gone: set[int]) -> int:
        """What the tensor, made at ``position``, is cast to, if that is all that reads it; the cast joins ``gone``."""
        reader = self.alone(index, position)
        made = None if reader is None else self.cast(reader)
        if reader is None or made is None:
            return index
        gone.add(reader)
        return made[1]


def tensors_of(arguments: tuple[Argument, ...]) -> list[int]:
    """The arguments that are tensors, in order, one as often as it is given."""
    return [argument.tensor for argument in arguments if isinstance(argument, TensorRef)]
