"""Only plain values come out of a pickle, and nothing runs on the way."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import pickletools
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import SnapshotFileError
from planner.snapshot.unpickle import check_plain, load_plain

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.text("ab", min_size=300, max_size=302),
)
NUMBERS = st.one_of(st.integers(-(2**63), 2**64), st.floats(allow_nan=False), st.booleans(), st.none())
PLAIN = st.recursive(
    st.one_of(SCALARS, st.lists(NUMBERS, max_size=6).map(tuple)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=5)),
    max_leaves=30,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_values_come_out_as_they_went_in(value, protocol):
    assert load_plain(pickle.dumps(value, protocol=protocol), "x") == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_many_memoised_objects_and_shared_ones(protocol):
    shared = {"filename": "f.py", "line": 3, "name": "f"}
    value = [[shared, [index], f"name {index}", (index, 2**40)] for index in range(3000)]
    read = load_plain(pickle.dumps(value, protocol=protocol), "x")
    assert read == value
    assert read[0][0] is read[-1][0]


class _Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_something_is_refused_unrun(tmp_path, protocol):
    mark = tmp_path / "ran"
    data = pickle.dumps({"segments": [], "device_traces": [[_Malice(mark)]]}, protocol=protocol)
    with pytest.raises(SnapshotFileError, match="refused, nothing was run") as caught:
        load_plain(data, "bad.pickle")
    assert "GLOBAL" in str(caught.value)
    assert not mark.exists()


#: Arguments for the opcodes that take one, enough of each for the opcode to be whole.
_ARGUMENTS = {
    "stringnl": b"'a'\n",
    "stringnl_noescape": b"a\n",
    "stringnl_noescape_pair": b"os\nsystem\n",
    "unicodestringnl": b"a\n",
    "decimalnl_short": b"1\n",
    "decimalnl_long": b"1L\n",
    "floatnl": b"1.0\n",
}
#: Every opcode that is let through. A new one in a later Python is refused until it is looked at.
ALLOWED = set(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE"
    " BINUNICODE8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE LIST DICT APPEND APPENDS SETITEM SETITEMS"
    " TUPLE TUPLE1 TUPLE2 TUPLE3 BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE".split()
)


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_every_other_opcode_is_refused(opcode):
    argument = _ARGUMENTS.get(opcode.arg.name, b"\x00" * 16) if opcode.arg else b""
    data = b"\x80\x04" + opcode.code.encode("latin-1") + argument + b"."
    if opcode.name in ALLOWED:
        return
    with pytest.raises(SnapshotFileError, match=f"opcode {opcode.name} at byte 2|more than 64 bits"):
        check_plain(data, "x")


def test_the_allowed_opcodes_exist():
    assert {opcode.name for opcode in pickletools.opcodes} >= ALLOWED


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        {1, 2},
        frozenset([1]),
        b"bytes",
        bytearray(b"x"),
        1 + 2j,
        Path("x"),
        range(3),
        ValueError("x"),
        int,
        print,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_refused(value):
    with pytest.raises(SnapshotFileError, match="refused, nothing was run"):
        load_plain(pickle.dumps([value], protocol=4), "x")


def test_numpy_numbers_are_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(SnapshotFileError, match="refused"):
        load_plain(pickle.dumps({"size": numpy.int64(3)}, protocol=4), "x")


def test_the_unpickler_itself_names_no_class():
    """The second door: had an opcode slipped through, no class is found."""
    import io

    from planner.snapshot.unpickle import _PlainUnpickler

    for data in (
        pickle.dumps(print),
        pickle.dumps(collections.OrderedDict()),
        b"\x80\x02cos\nsystem\nX\x00\x00\x00\x00\x85R.",
    ):
        with pytest.raises(pickle.UnpicklingError, match="it names"):
            _PlainUnpickler(io.BytesIO(data)).load()
    with pytest.raises(pickle.UnpicklingError, match="outside object"):
        _PlainUnpickler(io.BytesIO(b"\x80\x02K\x01Q.")).load()


def test_nested_tuples_whose_hash_would_never_end_are_refused():
    value: tuple = ()
    for _ in range(100):
        value = (value, value)
    with pytest.raises(SnapshotFileError, match="a tuple at byte"):
        load_plain(pickle.dumps({"a": value}, protocol=4), "x")
    bomb = b"\x80\x04K\x01\x85\x94" + b"".join(
        b"h" + bytes([index]) + b"h" + bytes([index]) + b"\x86\x94" for index in range(90)
    )
    with pytest.raises(SnapshotFileError, match="a tuple at byte"):
        load_plain(bomb + b"N}\x94(h\x50Nu.", "x")


def test_lists_that_refer_to_one_another_over_and_over_stay_small():
    value: list = []
    for _ in range(200):
        value = [value] * 10
    assert len(load_plain(pickle.dumps(value, protocol=4), "x")) == 10


def test_millions_of_empty_containers_are_refused():
    for container in (b"]", b"}"):
        data = b"\x80\x04](" + container * 3_000_000 + b"e."
        with pytest.raises(SnapshotFileError, match="more lists and dicts"):
            check_plain(data, "x")
    check_plain(b"\x80\x04](" + b"]" * 900_000 + b"e.", "x")


def test_a_list_within_itself_is_read():
    value: list = []
    value.append(value)
    read = load_plain(pickle.dumps(value, protocol=4), "x")
    assert read[0] is read


def test_deep_nesting_is_read_and_dropped():
    assert load_plain(b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", "x")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"Nr\xff\xff\xff\x7f.", "skips to memo entry 2147483647"),
        (b"\x8a\xff" + b"\x01" * 255 + b".", "more than 64 bits"),
        (b"\x8b\xff\xff\xff\x7f.", "more than 64 bits"),
        (b"\x8d" + struct.pack("<Q", 2**62) + b"abc.", "cut off"),
        (b"\x8d" + b"\xff" * 8 + b"abc.", "cut off"),
        (b"\x8d\x00\x00\x00\x00\x00\x00\x00\x80", "cut off"),
        (b"X\xff\xff\xff\xffabc.", "cut off"),
        (b"\x8c\xffabc.", "cut off"),
        (b"\x95" + struct.pack("<Q", 2**62) + b".", "cut off"),
        (b"\x8a\x08\x01\x01", "cut off"),
        (b"\x8a", "cut off"),
        (b"G\x00", "cut off"),
        (b"J\x00", "cut off"),
        (b"r\x00", "cut off"),
        (b"", "cut off"),
        (b"]", "cut off"),
        (b"\xff.", "no opcode"),
        (b".", "malformed"),
        (b"a.", "malformed"),
        (b"}K\x01a.", "malformed"),
        (b"](K\x01u.", "malformed"),
        (b"}(K\x01u.", "malformed"),
        (b"}(]Nu.", "malformed"),
        (b"h\x05.", "malformed"),
        (b"j\xff\xff\xff\xff.", "malformed"),
        (b"e.", "malformed"),
        (b"K\x01K\x02s.", "malformed"),
        (b"\x8c\x01\xff.", "malformed"),
    ],
)
def test_malformed_and_absurd_pickles_are_refused(body, message):
    with pytest.raises(SnapshotFileError, match=message) as caught:
        load_plain(b"\x80\x04" + body, "x.pickle")
    assert str(caught.value).startswith("x.pickle: not a usable memory snapshot: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\x80\x01].", b"\x80\x06].", b"\x80\xff].", b"\x80", b"].", b""])
def test_other_protocols_are_refused(data):
    with pytest.raises(SnapshotFileError, match="protocol"):
        load_plain(data, "x")


@given(PLAIN, st.integers(2, 5), st.data())
def test_mutated_pickles_give_values_or_the_one_error(value, protocol, data):
    text = bytearray(pickle.dumps(value, protocol=protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    text = text[: data.draw(st.integers(0, len(text)))]
    with contextlib.suppress(SnapshotFileError):
        assert isinstance(load_plain(bytes(text), "x"), (dict, list, tuple, int, float, str, type(None)))


@given(st.binary(max_size=60))
def test_any_bytes_give_values_or_the_one_error(body):
    with contextlib.suppress(SnapshotFileError):
        load_plain(b"\x80\x04" + body, "x")
