"""``arenaplan.pointwise`` as a compiled loop: its Python source, written from a checked program, and compiled by numba.

The loop reads and writes at one position only, so the result may lie on an operand: it is then the same array in the
source too, since compilers vectorise a loop over two arrays only where these do not overlap.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.loops import compiled_function
from planner.pointwise import Instruction
from runtime.kernels.compiled import converts_half
from runtime.team import THREAD, THREADS, available

#: How numba sees each dtype: 16-bit numbers as their bits, as `half_bits` knows them.
_STORED = {"float32": "float32", "float16": "int16", "bfloat16": "uint16"}
#: Kinds of operands.
TENSOR, MASK, NUMBER = "tensor", "mask", "number"
_FORMS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "where": "({1} if {0} else {2})",
    "sqrt": "sqrt({0})",
    **{name: f"{name}({{0}})" for name in ("exp", "tanh", "sigmoid", "relu")},
    "positive": "positive({0}, {1})",
}


@dataclass(frozen=True, slots=True)
class Signature:
    """What one compiled loop serves: a program, kinds and dtype of operands, and the one that is overwritten."""

    instructions: tuple[Instruction, ...]
    kinds: tuple[str, ...]
    overwrites: int | None
    dtype: str = "float32"


def source(signature: Signature) -> str:
    """The loop over a share of the elements; addresses of its arrays, and numbers, come as 64-bit words."""
    kinds = signature.kinds
    stored = _STORED[signature.dtype]
    words = 2 + len(kinds)
    lines = [
        "def loop(arguments):",
        f"    words = carray(arguments, ({words},))",
        "    me, team, size = thread(), threads(), words[0]",
        "    share = ((size + team - 1) // team + 63) // 64 * 64",
        "    first, last = min(me * share, size), min((me + 1) * share, size)",
    ]

    def array(name: str, word: int, dtype: str) -> str:
        return f"    {name} = carray(pointer(words[{word}]), (size,), {dtype})[first:last]"

    for position, kind in enumerate(kinds):
        if kind == NUMBER:
            lines.append(f"    n{position} = number(words[{2 + position}])")
        else:
            lines.append(array(f"a{position}", 2 + position, "uint8" if kind == MASK else stored))
    target = "out" if signature.overwrites is None else f"a{signature.overwrites}"
    if signature.overwrites is None:
        lines.append(array("out", 1, stored))
    lines.append(f"    for i in range({target}.size):")
    names = []
    for position, kind in enumerate(kinds):
        if kind == NUMBER:
            names.append(f"n{position}")
        else:
            names.append(f"x{position}")
            if kind == MASK:
                lines.append(f"        x{position} = a{position}[i] != zero")
            else:
                lines.append(
                    f"        x{position} = " + (f"a{position}[i]" if stored == "float32" else f"wide(a{position}[i])")
                )
    for name, operands in signature.instructions:
        value = f"v{len(names)}"
        lines.append(f"        {value} = " + _FORMS[name].format(*(names[operand] for operand in operands)))
        names.append(value)
    lines.append(
        f"        {target}[i] = " + (names[-1] if stored == "float32" else f"narrow({target}[i], {names[-1]})")
    )
    return "\n".join(lines) + "\n"


@cache
def compiled(signature: Signature) -> int | None:
    """Address of the loop's C function, kept compiled on disk; ``None`` without numba or OpenMP's functions.

    The function takes the address of 64-bit words: the number of elements, the address of the result, then of each
    operand, or its value in float32.
    """
    try:
        import numba
        import numpy as np

        from runtime.kernels import half_bits, vector_math
    except ImportError:
        return None
    if not available() or (signature.dtype == "float16" and not converts_half()):
        return None
    whole = numba.types.int32()
    text = source(signature)
    namespace: dict[str, Any] = {
        "__name__": __name__,  # numba looks the module up when it loads a kept loop
        "carray": vector_math.carray,
        "float32": np.float32,
        "int16": np.int16,
        "uint16": np.uint16,
        "wide": half_bits.wide,
        "narrow": half_bits.narrow,
        "uint8": np.uint8,
        "zero": np.uint8(0),
        "pointer": vector_math.pointer,
        "number": vector_math.number,
        "sqrt": np.sqrt,
        "thread": numba.types.ExternalFunction(THREAD, whole),
        "threads": numba.types.ExternalFunction(THREADS, whole),
        **{name: getattr(vector_math, name) for name in ("exp", "tanh", "sigmoid", "relu", "positive")},
    }
    return compiled_text(text, namespace, "pointwise", (vector_math, half_bits))


def compiled_text(text: str, namespace: dict[str, Any], folder: str, modules: Sequence[ModuleType]) -> int:
    """Address of the C function of ``loop`` in a text written from a checked table; kept compiled in a cache folder.

    The text names what ``modules``, whose functions it calls, say now, so that it is compiled anew when they change.
    """
    import numba

    version = hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()
    text = f"# {version}\n{text}"
    path = _kept(text, folder)
    exec(compile(text, str(path) if path else f"<arenaplan.{folder}>", "exec"), namespace)  # noqa: S102
    kinds: Any = numba.types
    made = compiled_function(kinds.void(kinds.CPointer(kinds.int64)))(namespace["loop"])
    return int(made.address)


def _kept(text: str, kind: str) -> Path | None:
    """A file with the source, beside which numba keeps what it compiled; ``None`` where none can be written."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "arenaplan" / kind
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.py"
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return None
    return path


def kinds_of(dtypes: Sequence[str | None]) -> tuple[str, ...]:
    """Kinds of operands by their dtypes; numbers have none."""
    return tuple(NUMBER if dtype is None else MASK if dtype == "bool" else TENSOR for dtype in dtypes)
