"""The arenas of compiled graphs: free ones, and those a forward filled for a backward still to come."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from planner.plan import Plan
from runtime.arena import Arena
from runtime.executor import ArenaRuntime, outside_nbytes

ALIGNMENT = 256
#: Plans, each with one set of parameters, that an arena keeps bound; the one unused for longest is bound anew.
MOST_BOUND = 32


class Pool:
    """Arenas, and who has them; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a lease may end, and give back its arena, at any allocation
        self._free: list[Block] = []
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def acquire(self, nbytes: int, wanted_nbytes: int = 0) -> Block:
        """A free arena of at least ``nbytes``, the smallest that is large enough, or a new one.

        Args:
            nbytes: that it must have.
            wanted_nbytes: that a new one should have, if more: what the largest shape to come needs.
        """
        with self._lock:
            enough = [block for block in self._free if block.arena.nbytes >= nbytes]
            if enough:
                block = min(enough, key=lambda item: item.arena.nbytes)
                self._free.remove(block)
                return block
            self._free.clear()  # smaller ones would only add up
        block = Block(max(nbytes, wanted_nbytes))
        with self._lock:
            self._blocks.add(block)
        return block

    def release(self, block: Block) -> None:
        """Take an arena back."""
        with self._lock:
            self._free.append(block)

    def holding(self, pointer: int, nbytes: int) -> Block | None:
        """The arena that an address lies in, if it is large enough."""
        with self._lock:
            for block in self._blocks:
                if block.holds(pointer):
                    return block if block.arena.nbytes >= nbytes else None
        return None

    def arena_sizes(self) -> list[int]:
        """Bytes of every arena there is."""
        with self._lock:
            return sorted(block.arena.nbytes for block in self._blocks)


class Block:
    """One arena and the runtimes bound to it."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(nbytes, ALIGNMENT)
        #: Which parameters the forward that filled the arena read; its backward is bound to the same.
        self.parameters: tuple[int, ...] = ()
        self._runs: OrderedDict[tuple[int, ...], tuple[tuple[int, ...], ArenaRuntime]] = OrderedDict()

    def holds(self, pointer: int) -> bool:
        """Whether an address lies in this arena."""
        first = self.arena.bytes.data_ptr()
        return first <= pointer < first + max(self.arena.nbytes, 1)

    def run(self, owner: object, made: Plan, states: Mapping[str, torch.Tensor]) -> ArenaRuntime:
        """The plan bound to this arena and to these states, which are read where they lie.

        Args:
            owner: of the plan; when it goes, so does what is bound, which keeps the states' memory alive.
            made: the plan.
            states: by name; one set is bound for each set of parameters, anew when they get other memory.
        """
        key = (id(owner), *self.parameters)
        pointers = tuple(state.data_ptr() for state in states.values())
        found = self._runs.get(key)
        if found is None or found[0] != pointers:
            found = (pointers, ArenaRuntime(made, state=states, arena=self.arena, outside=True))
            self._runs[key] = found
            weakref.finalize(owner, _forget, weakref.ref(self), key).atexit = False
            while len(self._runs) > MOST_BOUND:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return found[1]

    def leased(self, pool: Pool, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of this arena once more, over a storage of their own: when it dies, the pool has the arena back."""
        bytes_array = self.arena.bytes.numpy()[:]
        storage = torch.frombuffer(bytes_array, dtype=torch.uint8).untyped_storage()
        weakref.finalize(bytes_array, pool.release, self).atexit = False
        first = self.arena.bytes.data_ptr()
        leased = []
        for item in items:
            offset = (item.data_ptr() - first) // item.element_size()
            leased.append(torch.empty(0, dtype=item.dtype).set_(storage, offset, item.shape, item.stride()))
        return leased


def _forget(block: weakref.ref[Block], key: tuple[int, ...]) -> None:
    alive = block()
    if alive is not None:
        alive._runs.pop(key, None)


def needed_nbytes(made: Plan) -> int:
    """Bytes of arena a plan needs when its states are read where they lie."""
    return made.arena_nbytes - outside_nbytes(made)
