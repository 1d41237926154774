"""The loops of `rms_norm_loop` as C functions for given dtypes, compiled by numba and kept on disk."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from runtime.kernels.compiled import converts_half
from runtime.kernels.pointwise_source import compiled_text
from runtime.team import THREAD, THREADS, Loop, available

#: How numba sees each dtype: 16-bit numbers as their bits, as `half_bits` knows them.
_KINDS = {torch.float32: "float32", torch.float64: "float64", torch.float16: "int16", torch.bfloat16: "uint16"}
#: Names and dimensions of the arrays each loop takes: rows, one row a part, lines, one number a row.
_ARRAYS = {
    "forward": (("x", "rows, width"), ("weight", "width,"), ("y", "rows, width"), ("rstd", "rows,"),
                ("lines", "parts, width")),
    "backward": (("dy", "rows, width"), ("x", "rows, width"), ("weight", "width,"), ("rstd", "rows,"),
                 ("dx", "rows, width"), ("sums", "parts, width"), ("lines", "parts, width"),
                 ("others", "parts, width")),
}  # fmt: skip


def loop(name: str, arrays: tuple[torch.Tensor | None, ...], parts: int, number: float | None) -> Loop | None:
    """A loop bound to its arrays; a number is its eps, or says that it sums. ``None`` where it cannot be compiled.

    A missing array is a weight of one. Its words: rows, width, parts, the bits of the number, and addresses.
    """
    given = [tensor for tensor in arrays if tensor is not None]
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in given):
        return None
    function = _compiled(name, tuple(None if tensor is None else tensor.dtype for tensor in arrays), number is not None)
    if function is None:
        return None
    matrix = next(tensor for tensor in given if tensor.dim() == 2)
    words = torch.zeros(4 + len(arrays), dtype=torch.int64)
    words[0], words[1], words[2] = matrix.shape[0], matrix.shape[1], parts
    words[3] = int(torch.tensor(number or 0.0, dtype=torch.float64).view(torch.int64))
    for position, tensor in enumerate(arrays):
        words[4 + position] = 0 if tensor is None else tensor.data_ptr()
    return Loop(function, words, arrays)


@cache
def _compiled(name: str, dtypes: tuple[torch.dtype | None, ...], numbered: bool) -> int | None:
    """Address of the C function, or ``None`` without numba, OpenMP's functions, or float16 in hardware."""
    if not available_here(dtypes):
        return None
    import numba
    import numpy as np

    from runtime.kernels import half_bits, rms_norm_loop, vector_math

    whole = numba.types.int32()
    text = source(name, dtypes, numbered)
    namespace: dict[str, Any] = {
        "__name__": __name__,
        "carray": vector_math.carray,
        "pointer": vector_math.pointer,
        "double": rms_norm_loop.double,
        **{kind: getattr(np, kind) for kind in _KINDS.values()},
        "thread": numba.types.ExternalFunction(THREAD, whole),
        "threads": numba.types.ExternalFunction(THREADS, whole),
        name: getattr(rms_norm_loop, name),
    }
    return compiled_text(text, namespace, "rms_norm", (rms_norm_loop, half_bits, vector_math))


def available_here(dtypes: tuple[torch.dtype | None, ...]) -> bool:
    """Whether loops on these dtypes can be compiled and run on ATen's threads."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return available() and (torch.float16 not in dtypes or converts_half())


def source(name: str, dtypes: tuple[torch.dtype | None, ...], numbered: bool) -> str:
    """A C function's text: it makes the arrays and calls the loop."""
    lines = [
        "def loop(arguments):",
        f"    words = carray(arguments, ({4 + len(dtypes)},))",
        "    rows, width, parts = words[0], words[1], words[2]",
    ]
    names = []
    for position, ((array, shape), dtype) in enumerate(zip(_ARRAYS[name], dtypes, strict=True)):
        if dtype is None:  # a weight of one: never read
            array_of = f"carray(pointer(words[{4 + position + 1}]), (width,), {_KINDS[_like(dtypes, position)]})"
        else:
            array_of = f"carray(pointer(words[{4 + position}]), ({shape}), {_KINDS[dtype]})"
        lines.append(f"    {array} = {array_of}")
        names.append(array)
    weighted = "weight" in names and dtypes[names.index("weight")] is not None
    last = ["double(words[3])", str(weighted)] if name == "forward" else [str(weighted), str(numbered)]
    lines.append(f"    {name}({', '.join(['thread()', 'threads()', *names, 'parts', *last])})")
    return "\n".join(lines) + "\n"


def _like(dtypes: tuple[torch.dtype | None, ...], position: int) -> torch.dtype:
    """The dtype of the array behind a missing one."""
    return next(dtype for dtype in dtypes[position:] if dtype is not None)
