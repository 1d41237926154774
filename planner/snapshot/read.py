"""A snapshot's file as records: its form found out, every field that is used checked.

The fields are those that ``torch.cuda.memory._snapshot`` documents (PyTorch 2.13), and those of the bare list of
segments that ``torch.cuda.memory_snapshot()`` returns, with the ``history`` that older versions kept with each block.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from planner.errors import SnapshotFileError
from planner.problem import LARGEST_NBYTES
from planner.snapshot.records import DeviceRecord, Event, Frames, Segment, SegmentBlock, Snapshot
from planner.snapshot.unpickle import load_plain

_LARGEST_ADDRESS = 2**64 - 1
_MOST_DEVICES = 4096
_RECORD_FIRST = "call torch.cuda.memory._record_memory_history() before the run that the snapshot is taken of"
#: How other kinds of file begin, and what to do about them.
_OTHER_KINDS = (
    (b"\x1f\x8b", "it is compressed with gzip; gunzip it first"),
    (b"PK\x03\x04", "it is a zip archive, such as a checkpoint of torch.save; give the pickled snapshot itself"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd; decompress it first"),
    (b"\xfd7zXZ", "it is compressed with xz; decompress it first"),
    (b"BZh", "it is compressed with bzip2; decompress it first"),
    (b"<", "it is a page or picture, such as a viewer's output; give the pickled snapshot itself"),
)


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a memory snapshot, pickled or as JSON, with traces or as a bare list of segments.

    Nothing in the file is trusted: see `planner.snapshot.unpickle`.

    Raises:
        SnapshotFileError: it is something else, cut off, unsafe, empty, or a value cannot be used.
        OSError: the file cannot be read.
    """
    source = str(path)
    if Path(path).is_char_device() or Path(path).is_block_device():
        raise SnapshotFileError(source, "it is a device, not a file")
    data = Path(path).read_bytes()
    nbytes = len(data)
    form, raw = _decode(data, source)
    del data
    return _Reader(source, form, nbytes).snapshot(raw)


def _decode(data: bytes, source: str) -> tuple[str, Any]:
    """The form of a file and the plain values in it."""
    if not data.strip():
        raise SnapshotFileError(source, "it is empty")
    for start, remedy in _OTHER_KINDS:
        if data.startswith(start):
            raise SnapshotFileError(source, remedy)
    if data[0] == 0x80:
        value = load_plain(data, source)
        return f"pickle, protocol {data[1]}", value
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "JSON", _load_json(data, source)
    if data[:1] in b"(]}" and data.rstrip().endswith(b"."):
        raise SnapshotFileError(source, "it is a pickle of protocol 0 or 1; save it with protocol 4")
    raise SnapshotFileError(source, "it is neither a pickle of protocol 2 or later nor JSON")


def _load_json(data: bytes, source: str) -> Any:
    def constant(name: str) -> NoReturn:
        raise SnapshotFileError(source, f"it holds {name}, which is no JSON number")

    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise SnapshotFileError(source, f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SnapshotFileError(source, f"it is not well-formed JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise SnapshotFileError(source, "its lists are nested too deeply for a snapshot") from None
    except ValueError:  # Python refuses to convert integers of thousands of digits.
        raise SnapshotFileError(source, "it holds an integer of thousands of digits") from None


class _Reader:
    """Checks plain values and turns them into records; knows the file, for messages and for how much it may hold."""

    def __init__(self, source: str, form: str, nbytes: int) -> None:
        self.source = source
        self.form = form
        self.nbytes = nbytes
        self.records = 0

    def snapshot(self, raw: Any) -> Snapshot:
        """The devices of a file, or an error that names the first value that cannot be used."""
        traced = isinstance(raw, dict)
        if traced:
            if "segments" not in raw and "device_traces" not in raw:
                names = ", ".join(_shown(key) for key in list(raw)[:4]) or "nothing"
                self.fail(f"it has neither segments nor device_traces (found: {names})")
            segments = self.items(raw.get("segments", []), "segments")
            traces = self.items(raw.get("device_traces", []), "device_traces")
        elif isinstance(raw, list):
            segments, traces = raw, []
        else:
            self.fail(f"it holds {_shown(raw)}, not a dict with segments and device_traces or a list of segments")
        if len(traces) > _MOST_DEVICES:
            self.fail(f"it has traces of {len(traces)} devices")
        by_device: dict[int, list[Segment]] = defaultdict(list)
        for index, segment in enumerate(segments):
            read = self.segment(segment, f"segments[{index}]")
            by_device[read.device].append(read)
        events = [self.events(trace, f"device_traces[{device}]") for device, trace in enumerate(traces)]
        if not any(events) and (traced or not by_device):
            self.fail(f"no device has an event in its trace; {_RECORD_FIRST}" if traced else "it has no segment")
        numbers = sorted({*by_device, *(device for device, trace in enumerate(events) if trace)})
        return Snapshot(
            source=self.source,
            form=self.form,
            nbytes=self.nbytes,
            traced=traced,
            devices=tuple(
                DeviceRecord(number, tuple(by_device[number]), events[number] if number < len(events) else ())
                for number in numbers
            ),
        )

    def segment(self, raw: Any, where: str) -> Segment:
        """One segment with its blocks."""
        fields = self.fields(raw, where)
        pool = fields.get("segment_pool_id", (0, 0))
        if not (isinstance(pool, (tuple, list)) and len(pool) == 2):
            self.fail(f"{where}.segment_pool_id: {_shown(pool)} is not a pair of numbers")
        blocks = self.items(fields.get("blocks", []), f"{where}.blocks")
        return Segment(
            device=self.whole(fields.get("device", 0), where, "device", _MOST_DEVICES),
            address=self.whole(fields.get("address"), where, "address", _LARGEST_ADDRESS),
            nbytes=self.whole(fields.get("total_size"), where, "total_size"),
            stream=self.whole(fields.get("stream", 0), where, "stream", _LARGEST_ADDRESS),
            pool=(
                self.whole(pool[0], where, "segment_pool_id", _LARGEST_ADDRESS),
                self.whole(pool[1], where, "segment_pool_id", _LARGEST_ADDRESS),
            ),
            blocks=tuple(self.block(block, where, index) for index, block in enumerate(blocks)),
        )

    def block(self, raw: Any, segment: str, index: int) -> SegmentBlock:
        """One block; older versions keep what was asked for, and where, in a history."""
        where = f"{segment}.blocks[{index}]"
        fields = self.fields(raw, where)
        nbytes = self.whole(fields.get("size"), where, "size")
        frames, requested = fields.get("frames"), fields.get("requested_size")
        if history := fields.get("history"):
            newest = self.fields(self.items(history, f"{where}.history")[0], f"{where}.history[0]")
            frames = newest.get("frames") if frames is None else frames
            requested = newest.get("real_size") if requested is None else requested
        address = fields.get("address")
        return SegmentBlock(
            address=None if address is None else self.whole(address, where, "address", _LARGEST_ADDRESS),
            nbytes=nbytes,
            requested_nbytes=nbytes if requested is None else self.whole(requested, where, "requested_size"),
            state=self.word(fields.get("state"), where, "state"),
            frames=self.frames(frames, where),
        )

    def events(self, raw: Any, where: str) -> Sequence[Event]:
        """The events of one device's trace, each taking the place of its dict, so that both need not be held."""
        trace = self.items(raw, where)
        if trace and isinstance(trace[0], Event):
            self.count(len(trace))  # The same list stands for another device, too.
            return trace
        for index, entry in enumerate(trace):
            trace[index] = self.event(entry, where, index)
        return trace

    def event(self, raw: Any, trace: str, index: int) -> Event:
        """One entry of a trace."""
        where = f"{trace}[{index}]"
        fields = self.fields(raw, where)
        action = self.word(fields.get("action"), where, "action")
        free = address = 0
        if action == "oom":
            free = self.whole(fields.get("device_free", 0), where, "device_free")
        else:
            address = self.whole(fields.get("addr"), where, "addr", _LARGEST_ADDRESS)
        time = fields.get("time_us")
        if time is not None and not (type(time) in (int, float) and abs(time) < _LARGEST_ADDRESS):
            self.fail(f"{where}.time_us: {_shown(time)} is not a time")
        category = fields.get("category")
        return Event(
            action,
            address,
            self.whole(fields.get("size", 0 if action == "snapshot" else None), where, "size"),
            self.whole(fields.get("stream", 0), where, "stream", _LARGEST_ADDRESS),
            time,
            self.frames(fields.get("frames"), where),
            None if category is None else self.word(category, where, "category"),
            free,
        )

    def fields(self, raw: Any, where: str) -> dict[Any, Any]:
        """A dict, counted."""
        if type(raw) is not dict:
            self.fail(f"{where}: {_shown(raw)} is not a dict")
        self.count(1)
        return raw

    def count(self, records: int) -> None:
        """A few bytes may refer to one record so often that walking them would never end; a real one takes many."""
        self.records += records
        if self.records > self.nbytes:
            self.fail("it repeats its records more often than it has bytes")

    def items(self, raw: Any, where: str) -> list[Any]:
        if type(raw) is not list:
            self.fail(f"{where}: {_shown(raw)} is not a list")
        return raw

    def frames(self, raw: Any, where: str) -> Frames:
        if raw is None:
            return ()
        if type(raw) not in (list, tuple):
            self.fail(f"{where}.frames: {_shown(raw)} is not a list")
        return raw  # type: ignore[no-any-return]

    def whole(self, value: Any, where: str, name: str, most: int = LARGEST_NBYTES) -> int:
        """A whole number from 0 to ``most``."""
        if type(value) is not int:
            missing = "is missing" if value is None else f"{_shown(value)} is not a whole number"
            self.fail(f"{where}.{name}: {missing}")
        if value < 0 and most == _LARGEST_ADDRESS and value >= -(2**63):
            return value + 2**64  # Addresses and streams pass through a signed integer on their way to the file.
        if not 0 <= value <= most:
            self.fail(f"{where}.{name}: {_shown(value)} is not between 0 and {most}")
        return value

    def word(self, value: Any, where: str, name: str) -> str:
        if type(value) is not str:
            self.fail(f"{where}.{name}: {'is missing' if value is None else _shown(value) + ' is not a string'}")
        return sys.intern(value)

    def fail(self, cause: str) -> NoReturn:
        raise SnapshotFileError(self.source, cause)


def _shown(value: Any) -> str:
    """A value for a message: short whatever it is, and without converting huge integers or walking containers."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) >= 2**128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 44 else text[:41] + "…"
