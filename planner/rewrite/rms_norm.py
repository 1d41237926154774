"""Root mean square normalisation as one operator, and its backward as one.

Models write it, and PyTorch traces ``nn.RMSNorm``, as ``x · rsqrt(mean(x²) + eps) · weight``; the derivative of that is
some fifteen operators more, which keep ``x · rsqrt(…)`` for the backward beside ``x``, and in 16 bits both of them in
float32. As one operator only ``x`` and one number a row are kept (Zhang, Sennrich: "Root mean square layer
normalization", 2019). Everything between is computed in float32 and rounded once.

Only whole chains are replaced: what is between the operators must be read by nothing else. In a backward alone the
gradient of the weight stays as traced, since the graph does not say that the saved tensor it reads is the normalised x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.graph import ITEMSIZE, Argument, Graph, Operation, Role, TensorRef, dense_strides
from planner.operators import RMS_NORM, RMS_NORM_BACKWARD
from planner.rewrite.dense import dense_operands
from planner.rewrite.program import Program
from planner.rewrite.rms_norm_chains import Backward, Chains, Forward
from planner.rewrite.uses import tensors_of


def fuse_rms_norm(graph: Graph) -> Graph:
    """The graph with every such normalisation, and every such backward, as one operator."""
    program = Program(graph)
    chains = Chains(program)
    forwards = {item.rstd: item for item in chains.forwards()}
    backwards = list(chains.backwards())
    rewriter = _Rewriter(program, chains, [*forwards.values(), *backwards])
    for backward in backwards:
        forward = forwards.get(backward.rstd)
        if forward is not None and forward.x == backward.x and forward.axes == backward.axes:
            whole = chains.with_sums(forward, backward)
            if rewriter.pair(forward, whole) or (whole != backward and rewriter.pair(forward, backward)):
                del forwards[backward.rstd]
                continue
        rewriter.accept(rewriter.backward(backward, backward.x, set(backward.gone)))
    for forward in forwards.values():
        rewriter.accept(rewriter.forward(forward, forward.x, set(forward.gone)))
    replaced = rewriter.replaced
    if not replaced:
        return graph
    program.operations = [
        new for position, old in enumerate(program.operations) for new in replaced.get(position, [old])
    ]
    return dense_operands(program.close())


class _Rewriter:
    """Writes what takes the place of the chains of one program, by position.

    Attributes:
        claimed: the operations of all chains; no chain takes one of another.
        replaced: what was accepted so far.
    """

    def __init__(self, program: Program, chains: Chains, found: Sequence[Forward | Backward]) -> None:
        self.program = program
        self.uses = chains.uses
        self.claimed = frozenset[int]().union(*(item.gone for item in found))
        self.replaced: dict[int, list[Operation]] = {}

    def accept(self, made: dict[int, list[Operation]] | None) -> bool:
        """Take the operations over, unless there are none or one takes the place of what is replaced already."""
        if made is None or made.keys() & self.replaced.keys():
            return False
        self.replaced |= made
        return True

    def pair(self, forward: Forward, backward: Backward) -> bool:
        """Both as one operator each, if nothing but the two chains reads what lies between; whether that is so."""
        gone = set(forward.gone | backward.gone)
        x = self._origin(forward.x, gone)
        storage = self.program.storage_of(x)
        begin = min(place for place in self.uses.touching[storage] if place in gone)
        if any(begin <= place <= max(gone) for place in self.uses.writing.get(storage, ())):
            return False  # the backward would read another x
        added = gone - forward.gone - backward.gone
        one = self.forward(forward, x, set(forward.gone) | added, frozenset(gone))
        two = self.backward(backward, x, set(backward.gone), frozenset(gone))
        return one is not None and two is not None and self.accept(one | two)

    def _origin(self, index: int, gone: set[int]) -> int:
        """What the tensor was cast from, where the casts are read by ``gone`` only and are part of no other chain."""
        return self.uses.before_casts(index, gone, self.claimed - gone)

    def forward(
        self, found: Forward, x: int, gone: set[int], together: frozenset[int] = frozenset()
    ) -> dict[int, list[Operation]] | None:
        """The operations that take the forward's place; ``together``: what else is taken out."""
        if not together:
            x = self._origin(found.x, gone)
        weight = None if found.weight is None else self._origin(found.weight, gone)
        shape = self.program.tensors[x].shape[-found.axes :]
        arguments = (TensorRef(x), shape, None if weight is None else TensorRef(weight), found.eps)
        return self._replaced(RMS_NORM, arguments, (found.y, found.rstd), found.root, gone, together)

    def backward(
        self, found: Backward, x: int, gone: set[int], together: frozenset[int] = frozenset()
    ) -> dict[int, list[Operation]] | None:
        """The operations that take the backward's place; ``together``: what else is taken out."""
        dy = self._origin(found.dy, gone)
        weight = None if found.weight is None else self._origin(found.weight, gone)
        shape = self.program.tensors[x].shape[-found.axes :]
        rest = (shape, TensorRef(found.rstd), None if weight is None else TensorRef(weight))
        dx, last = found.dx, self.program.operations[found.last]
        extra: dict[int, list[Operation]] = {}
        if dx is None and found.added is not None:  # a tensor of its own, which the last sum then reads
            like = self.program.tensors[found.added]
            name = f"{last.name}.norm"
            storage = self.program.new_storage(name, like.numel * ITEMSIZE[like.dtype], Role.TEMPORARY)
            dx = self.program.view(name, storage, 0, like.shape, dense_strides(like.shape), like.dtype)
            extra[found.last] = [replace(last, arguments=(TensorRef(found.added), TensorRef(dx)))]
        root = found.last if not extra else min(found.gone)
        arguments = (TensorRef(dy), TensorRef(x), *rest)
        together |= frozenset(extra)
        made = self._replaced(RMS_NORM_BACKWARD, arguments, (dx, found.summed), root, gone, together)
        return None if made is None else made | extra

    def _replaced(
        self,
        operator: str,
        arguments: tuple[Argument, ...],
        outputs: tuple[int | None, ...],
        root: int,
        gone: set[int],
        together: frozenset[int],
    ) -> dict[int, list[Operation]] | None:
        """The chain ``gone`` as one operation, where all it reads is first complete; ``None`` where that changes more.

        Everything the chain wrote but ``outputs`` must be unknown outside of it, and of what is taken out with it;
        nothing it reads may change while it lasts; what it gives must not be touched before it is made.
        """
        program = self.program
        results = {program.storage_of(index) for index in outputs if index is not None}
        for position in gone:
            for index in program.operations[position].writes:
                if program.storage_of(index) not in results and not self.uses.inner(index, gone | together):
                    return None
        operands = {program.storage_of(index) for index in tensors_of(arguments)}
        if results & operands:
            return None
        first, last, ready = min(gone), max(gone), 0
        for storage in operands:
            begin = min((place for place in self.uses.touching[storage] if place in gone), default=first)
            for writer in self.uses.writing.get(storage, ()):
                if begin <= writer <= last:
                    return None
                ready = max(ready, writer + 1) if writer < begin else ready
        later = [position for position in gone if position >= ready]
        if not later:
            return None
        place = min(later)
        for storage in results:
            if any(other <= place and other not in gone for other in self.uses.touching.get(storage, ())):
                return None
        old = program.operations[root]
        new = replace(old, operator=operator, arguments=arguments, keywords=(), outputs=outputs)
        return {position: [new] if position == place else [] for position in gone}
