"""Pickles that hold nothing but plain containers, numbers and strings.

A pickle is a program. Before any of it runs, every opcode of the file is read: only those that build dicts, lists,
tuples, numbers, strings and None are let through (a snapshot needs no other), so nothing can name a class, call
anything, or set an attribute. What could be slow or large out of proportion to the file is refused as well: tuples of
anything but numbers (hashing nested ones takes time exponential in their number), integers above 64 bits, memo indices
that were skipped, lengths beyond the file's end, millions of empty containers. Then the standard library's unpickler
builds the values, with its two doors to other code bolted besides.

The opcodes are those of protocols 2 to 5, as ``pickletools`` describes them.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from planner.errors import SnapshotFileError

PROTOCOLS = range(2, 6)
"""Older protocols write numbers as text and need other opcodes; nobody saves snapshots in them."""

#: BININT1, BININT2, BININT, BINFLOAT, LONG1 of up to nine bytes (64 bits and a sign), None, True, False.
_SCALAR = (
    rb"(?:K.|M..|J.{4}|G.{8}|"
    + b"|".join(b"\\x8a\\x%02x.{%d}" % (size, size) for size in range(10))
    + (rb"|[N\x88\x89])")
)
#: Scalars in a row, and the tuple that takes the last one, two or three of them: TUPLE1, TUPLE2, TUPLE3.
_SCALARS = _SCALAR + rb"(?:" + _SCALAR + rb"(?:" + _SCALAR + rb"++[\x85-\x87]?|[\x85\x86]?)|\x85?)"
#: Opcodes of a fixed length: BINGET and BINPUT, LONG_BINGET, containers and what fills them, a marked tuple, MEMOIZE.
_RUN = re.compile(rb"(?:[hq].|j.{4}|" + _SCALARS + rb"|\(" + _SCALAR + rb"++t|[])}(aelsud\x94])*+", re.DOTALL)

#: Opcodes that carry a length: how many bytes the length takes.
_STRINGS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
_STOP, _PROTO, _FRAME, _LONG_BINPUT = 0x2E, 0x80, 0x95, 0x72
_FEW_CONTAINERS, _CONTAINER_NBYTES = 1_000_000, 4
"""Lists and dicts that any file may hold, and the bytes of file that each one beyond must come with: an event of a real
trace takes some forty bytes at the least, and holds two."""

_OPCODES = {ord(known.code): known for known in pickletools.opcodes}
_SHORT_MEMO = 256
"""Memo indices that BINPUT writes; LONG_BINPUT follows on from them."""


def load_plain(data: bytes, source: str) -> Any:
    """Return what a pickle holds: dicts, lists, tuples of numbers, strings, numbers, booleans and None.

    Raises:
        SnapshotFileError: an opcode that could do anything else (nothing has been run), another protocol, a pickle
            that is cut off or malformed.
    """
    check_plain(data, source)
    try:
        with _no_collection():
            return _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a malformed pickle raises whatever the operation it misuses raises
        raise SnapshotFileError(source, f"its pickle is malformed: {error or type(error).__name__}") from None


def check_plain(data: bytes, source: str) -> None:
    """Raise `SnapshotFileError` for the first opcode that is not needed for plain values; run none."""
    if len(data) < 2 or data[0] != _PROTO or data[1] not in PROTOCOLS:
        version = f"protocol {data[1]}" if len(data) > 1 and data[0] == _PROTO else "no protocol"
        known = f"{PROTOCOLS[0]} to {PROTOCOLS[-1]}"
        raise SnapshotFileError(source, f"its pickle has {version}; save it with a protocol of {known}")
    position, long_puts, size = 2, 0, len(data)
    # The bytes of EMPTY_LIST and EMPTY_DICT, wherever they stand: each may take 64 bytes of memory.
    if data.count(b"]") + data.count(b"}") > max(_FEW_CONTAINERS, size // _CONTAINER_NBYTES):
        raise SnapshotFileError(source, "it holds more lists and dicts than a snapshot of its size can")
    while True:
        run = _RUN.match(data, position) if position < size else None
        position = run.end() if run else position
        if position >= size:
            raise SnapshotFileError(source, f"its pickle is cut off after {size} bytes")
        opcode = data[position]
        if opcode == _STOP:
            return
        if opcode in _STRINGS:
            start = position + 1 + _STRINGS[opcode]
            position = start + int.from_bytes(data[position + 1 : start], "little")
        elif opcode == _LONG_BINPUT:
            index = int.from_bytes(data[position + 1 : position + 5], "little")
            if index > _SHORT_MEMO + long_puts:
                raise SnapshotFileError(source, f"its pickle skips to memo entry {index} at byte {position}")
            position, long_puts = position + 5, long_puts + 1
        elif opcode == _FRAME:
            if int.from_bytes(data[position + 1 : position + 9], "little") > size - position - 9:
                raise SnapshotFileError(source, f"its pickle is cut off: a frame at byte {position} goes past the end")
            position += 9
        else:
            _refuse(data, position, source)


def _refuse(data: bytes, position: int, source: str) -> NoReturn:
    """Raise for the opcode at ``position``, which `_RUN` does not take."""
    known = _OPCODES.get(data[position])
    if known is None:
        raise SnapshotFileError(source, f"byte {position} is no opcode of a pickle")
    if known.name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        raise SnapshotFileError(source, f"a tuple at byte {position} holds something other than numbers")
    if known.name in ("LONG1", "LONG4"):
        if known.name == "LONG1" and data[position + 1 : position + 2] <= b"\x09":
            raise SnapshotFileError(source, f"its pickle is cut off after {len(data)} bytes")
        raise SnapshotFileError(source, f"an integer at byte {position} has more than 64 bits")
    if known.arg is not None and known.name in _FIXED:
        raise SnapshotFileError(source, f"its pickle is cut off after {len(data)} bytes")
    raise SnapshotFileError(
        source,
        f"refused, nothing was run: the pickle's opcode {known.name} at byte {position} builds more than plain"
        " containers, numbers and strings; save the dict that torch.cuda.memory._snapshot() returns",
    )


#: Opcodes that are let through when all of their argument is there.
_FIXED = frozenset({"BINGET", "BINPUT", "LONG_BINGET", "BININT1", "BININT2", "BININT", "BINFLOAT"})


class _PlainUnpickler(pickle.Unpickler):
    """The standard unpickler without a way to any class or outside object; `check_plain` has been there before it."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError(f"it names an outside object {pid!r:.40}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without looking for cycles, which takes longer than the building itself where millions of containers live."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
