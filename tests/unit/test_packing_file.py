"""Allocation problems as CSV: what is read, what is refused and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from packing_oracle import MINIMALLOC, minimalloc

from planner.colouring import colour
from planner.errors import ProblemError
from planner.packing_file import read_problem, write_packing
from planner.problem import Lifetime


def _read(tmp_path: Path, text: str) -> tuple[Lifetime, ...]:
    path = tmp_path / "problem.csv"
    path.write_text(text)
    return read_problem(path).lifetimes


def test_minimallocs_own_files_are_read() -> None:
    for letter in "ABCDEFGHIJK":
        assert read_problem(MINIMALLOC / f"{letter}.1048576.csv") == minimalloc(letter)


def test_columns_come_in_any_order_and_optional_ones_may_be_empty(tmp_path: Path) -> None:
    text = "\ufeffsize,id, upper ,lower,alignment,offset,note\n8,a,5,-1,4,16,x\n\n9,b,2,0,,,y\n"
    assert _read(tmp_path, text) == (Lifetime("a", 8, -1, 5, 4, 16), Lifetime("b", 9, 0, 2))


def test_a_packing_is_written_as_minimalloc_does_and_read_again(tmp_path: Path) -> None:
    problem = read_problem(MINIMALLOC / "input.12.csv", capacity=12)
    colouring = colour(problem)
    path = tmp_path / "out.csv"
    write_packing(path, problem, colouring)
    assert path.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    again = read_problem(path)
    assert tuple(item.offset for item in again.lifetimes) == colouring.offsets
    assert colour(again).offsets == colouring.offsets
    assert read_problem(path, keep_offsets=False).lifetimes == problem.lifetimes


def test_alignment_is_written_where_there_is_any(tmp_path: Path) -> None:
    source = tmp_path / "problem.csv"
    source.write_text("id,lower,upper,size,alignment\na,0,1,8,4\n")
    problem = read_problem(source)
    write_packing(tmp_path / "out.csv", problem, colour(problem))
    assert (tmp_path / "out.csv").read_text() == "id,lower,upper,size,alignment,offset\na,0,1,8,4,0\n"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("b,0,1,-4", "size -4 is less than 0"),
        ("b,3,3,4", "not greater than lower"),
        ("b,5,3,4", "not greater than lower"),
        ("a,0,1,4", "used before, on line 2"),
        ("b,0,1", "3 values for 4 columns"),
        ("b,0,1,4,5", "5 values for 4 columns"),
        ("b,0,1,4.0", "not a whole number"),
        ("b,0,1,", "not a whole number"),
        ("b,0,1,1_000", "not a whole number"),
        ("b,0,1,\u0664", "not a whole number"),
        ("b,zero,1,4", "not a whole number"),
        (f"b,0,1,{2**63}", "larger than"),
        ("b,0,1," + "9" * 5000, "larger than"),
        (f"b,0,{2**63},1", "larger than"),
        ('b,0,1,"4', "CSV"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, cause: str) -> None:
    path = tmp_path / "problem.csv"
    path.write_text(f"id,lower,upper,size\na,0,1,4\n{row}\n")
    with pytest.raises(ProblemError) as caught:
        read_problem(path)
    assert caught.value.line == 3
    assert caught.value.source == str(path)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "missing column id, lower, upper, size"),
        ("id,lower,upper\na,0,1\n", "missing column size"),
        ("id,lower,upper,size,size\n", "twice"),
        ("id,lower,upper,size,alignment\na,0,1,4,0\n", "alignment 0 is less than 1"),
        ("id,lower,upper,size,alignment,offset\na,0,1,4,8,4\n", "not a multiple"),
        ("id,lower,upper,size,offset\na,0,1,4,-4\n", "offset -4 is less than 0"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(ProblemError, match=cause):
        _read(tmp_path, text)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "problem.csv").write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,4\n")
    with pytest.raises(ProblemError, match="UTF-8"):
        read_problem(tmp_path / "problem.csv")


def test_the_largest_sizes_are_read(tmp_path: Path) -> None:
    assert _read(tmp_path, f"id,lower,upper,size\na,0,1,{2**63 - 1}\n")[0].nbytes == 2**63 - 1


def test_a_device_is_refused() -> None:
    with pytest.raises(ProblemError, match="device"):
        read_problem("/dev/zero")
