"""Stack frames as a reader wants them: where in the user's code a block was allocated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from planner.snapshot.records import Frames

_LOOKED_AT = 400
"""Frames looked through for the user's code; Python's own limit on recursion is 1000."""

_TORCH = "/torch/"
_STANDARD_LIBRARY = "/lib/python3"
_INSTALLED = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Place:
    """One frame: a file, a line (0 if unknown) and the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where} {self.function}".strip()


def places(frames: Frames, most: int) -> tuple[Place, ...]:
    """The first ``most`` frames, innermost first; what is no frame is left out."""
    return tuple(place for frame in islice(frames, most) if (place := _place(frame)) is not None)


def user_place(frames: Frames) -> Place | None:
    """The innermost frame in a Python file of neither PyTorch nor the standard library, so of the model or the script.

    Else the innermost in a Python file, else the innermost there is, or ``None``.
    """
    found = places(frames, _LOOKED_AT)
    for place in found:
        file = "/" + place.file.replace("\\", "/")
        standard = _STANDARD_LIBRARY in file and not any(part in file for part in _INSTALLED)
        if file.endswith(".py") and _TORCH not in file and not standard:
            return place
    return next((place for place in found if place.file.endswith(".py")), found[0] if found else None)


def _place(frame: Any) -> Place | None:
    if not isinstance(frame, dict):
        return None
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not (isinstance(file, str) or isinstance(name, str)):
        return None
    number = line if type(line) is int and 0 <= line < 2**31 else 0
    return Place(printable(file), number, printable(name))


def printable(text: Any) -> str:
    """Text of a file: a name without what would move a terminal's cursor; long ones (templates of C++) are cut."""
    if not isinstance(text, str):
        return ""
    cut = text if len(text) <= 500 else text[:499] + "…"
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else "\ufffd" for letter in cut)
