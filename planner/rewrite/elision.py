"""Copy elision and concat placement: readers read a copy's source, or writers write its destination."""

from __future__ import annotations

from dataclasses import replace

from planner.graph import FILLED_ROLES, Graph, Operation, Tensor, TensorRef, substitute
from planner.operators import COPY, MATMUL, accepts_strides, batch_rank
from planner.rewrite.layout import Layout, disjoint, remap
from planner.rewrite.program import Program


def elide_copies(graph: Graph, kept: frozenset[str] = frozenset()) -> Graph:
    """Remove every copy that can go, except those whose operation is named in ``kept``.

    First readers are pointed at a copy's source; then writers at a copy's destination, which also writes the pieces
    of a concatenation straight into it. Results do not change by a bit: only where elements lie does.
    """
    program = _Indexed(graph)
    copies = [p for p, o in enumerate(graph.operations) if o.operator == COPY and o.name not in kept]
    for attempt in (_read_source, _write_destination):
        for position in copies:
            if position not in program.removed:
                attempt(program, position)
    program.operations = [o for p, o in enumerate(program.operations) if p not in program.removed]
    return program.close()


class _Indexed(Program):
    """A program that knows which operations touch a storage; removed operations keep their positions."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.removed: set[int] = set()
        self._users: dict[int, set[int]] = {}
        for position in range(len(self.operations)):
            self._enter(position)

    def _enter(self, position: int) -> None:
        operation = self.operations[position]
        for index in operation.reads + operation.writes:
            self._users.setdefault(self.storage_of(index), set()).add(position)

    def touching(self, storage: int) -> list[int]:
        """Positions of the operations that read or write a storage, ascending."""
        return sorted(self._users.get(storage, ()))

    def change(self, position: int, operation: Operation) -> None:
        """Put another operation in the place of one."""
        self.remove(position)
        self.removed.discard(position)
        self.operations[position] = operation
        self._enter(position)

    def remove(self, position: int) -> None:
        """Take an operation out."""
        operation = self.operations[position]
        for index in operation.reads + operation.writes:
            self._users[self.storage_of(index)].discard(position)
        self.removed.add(position)


def removable_copies(before: Graph, after: Graph) -> tuple[str, ...]:
    """Names of the copies that ``after`` no longer has."""
    left = {operation.name for operation in after.operations}
    return tuple(o.name for o in before.operations if o.operator == COPY and o.name not in left)


def _copied(operation: Operation) -> tuple[int, int] | None:
    argument, output = operation.arguments[0], operation.outputs[0]
    if not isinstance(argument, TensorRef) or output is None:
        return None
    return argument.tensor, output


def _read_source(program: _Indexed, position: int) -> None:
    """Point the readers of a copy's result at its source, if all can read it there."""
    pair = _copied(program.operations[position])
    if pair is None:
        return
    source, result = pair
    storage = program.storage_of(result)
    origin = program.storage_of(source)
    if storage in program.border or storage == origin:
        return
    touching = program.touching(storage)
    if any(program.writes_storage(program.operations[p], storage) for p in touching if p != position):
        return
    readers = [p for p in touching if p != position]
    last = max(readers, default=position)
    between = [p for p in program.touching(origin) if position < p <= last]
    if any(program.writes_storage(program.operations[p], origin) for p in between):
        return
    changed = _moved(program, readers, storage, program.tensors[result], program.tensors[source])
    if changed is None:
        return
    for p, operation in changed.items():
        program.change(p, operation)
    program.remove(position)


def _write_destination(program: _Indexed, position: int) -> None:
    """Let whoever writes a copy's source write its destination instead, if everyone who touches the source can."""
    pair = _copied(program.operations[position])
    if pair is None:
        return
    source, result = pair
    storage, target = program.storage_of(source), program.storage_of(result)
    if storage in program.border or storage == target:
        return
    touching = [p for p in program.touching(storage) if p != position]
    if not touching or any(program.writes_storage(program.operations[p], storage) for p in touching if p > position):
        return
    if not _undisturbed(program, program.tensors[result], min(touching), max([*touching, position]), position):
        return
    changed = _moved(program, touching, storage, program.tensors[source], program.tensors[result])
    if changed is None:
        return
    for p, operation in changed.items():
        program.change(p, operation)
    program.remove(position)


def _undisturbed(program: _Indexed, destination: Tensor, first: int, last: int, copy: int) -> bool:
    """Whether nothing else touches the destination's bytes from ``first`` to ``last``."""
    target = destination.storage
    if program.storages[target].role in FILLED_ROLES:
        return False
    for p in program.touching(target):
        operation = program.operations[p]
        if p == copy or not first <= p <= last:
            continue
        for index in operation.reads + operation.writes:
            tensor = program.tensors[index]
            if tensor.storage == target and not disjoint(tensor, destination):
                return False
    return True


def _moved(
    program: Program, positions: list[int], storage: int, source: Tensor, destination: Tensor
) -> dict[int, Operation] | None:
    """The operations at ``positions`` with tensors of ``storage`` relocated through ``source`` → ``destination``."""
    if source.itemsize * source.numel != program.storages[storage].nbytes:
        return None
    changed: dict[int, Operation] = {}
    for p in positions:
        operation = _relocated(program, program.operations[p], storage, source, destination)
        if operation is None:
            return None
        changed[p] = operation
    return changed


def _relocated(
    program: Program, operation: Operation, storage: int, source: Tensor, destination: Tensor
) -> Operation | None:
    layouts: dict[int, Layout] = {}
    for index in {*operation.reads, *operation.writes}:
        tensor = program.tensors[index]
        if tensor.storage != storage:
            continue
        layout = remap(tensor, source, destination)
        if layout is None:
            return None
        layouts[index] = layout
    strided = accepts_strides(operation.operator)
    if not strided and any(
        not layout.is_plain or layout.strides != program.tensors[index].strides for index, layout in layouts.items()
    ):
        return None
    splits = _splits(operation, layouts)
    if splits is None:
        return None
    new: dict[int, int] = {}
    for index in {*operation.reads, *operation.writes}:
        tensor = program.tensors[index]
        layout = layouts.get(index)
        if layout is None:
            layout = Layout(tensor.offset, tuple(((n, s),) for n, s in zip(tensor.shape, tensor.strides, strict=True)))
        refined = _refined(layout, splits, len(tensor.shape))
        if refined is None:
            return None
        shape, strides = refined
        if operation.operator == MATMUL and not _product_ready(shape, strides):
            return None
        home = destination.storage if index in layouts else tensor.storage
        if index in layouts or (shape, strides) != (tensor.shape, tensor.strides):
            new[index] = program.view(tensor.name, home, layout.offset, shape, strides, tensor.dtype)
    return replace(
        operation,
        arguments=tuple(substitute(a, lambda i: new.get(i, i)) for a in operation.arguments),
        keywords=tuple((k, substitute(a, lambda i: new.get(i, i))) for k, a in operation.keywords),
        outputs=tuple(None if o is None else new.get(o, o) for o in operation.outputs),
    )


def _product_ready(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a matrix operand has rows or columns without gaps between elements, as BLAS wants it."""
    if len(shape) < 2:
        return True  # a bias
    rows, columns = shape[-2:]
    return (strides[-1] == 1 or columns == 1) or (strides[-2] == 1 or rows == 1)


def _splits(operation: Operation, layouts: dict[int, Layout]) -> dict[int, tuple[int, ...]] | None:
    """Sizes that each split dimension falls into, by dimension counted from the right; ``None`` if it may not split."""
    splits: dict[int, tuple[int, ...]] = {}
    for layout in layouts.values():
        rank = len(layout.pieces)
        for axis, piece in enumerate(layout.pieces):
            if len(piece) == 1:
                continue
            if axis >= batch_rank(operation, rank):
                return None
            sizes = tuple(size for size, _ in piece)
            if splits.setdefault(rank - axis, sizes) != sizes:
                return None
    return splits


def _refined(
    layout: Layout, splits: dict[int, tuple[int, ...]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a layout with the given dimensions (from the right) split."""
    shape: list[int] = []
    strides: list[int] = []
    for axis, piece in enumerate(layout.pieces):
        sizes = splits.get(rank - axis)
        if sizes is None:
            shape += [piece[0][0]]
            strides += [piece[0][1]]
        elif len(piece) > 1:
            shape += [size for size, _ in piece]
            strides += [stride for _, stride in piece]
        elif piece[0][0] == 1:
            shape += [1] * len(sizes)
            strides += [0] * len(sizes)
        else:
            stride = piece[0][1]
            parts: list[int] = []
            for size in reversed(sizes):
                parts.append(stride)
                stride *= size
            shape += list(sizes)
            strides += list(reversed(parts))
    return tuple(shape), tuple(strides)
