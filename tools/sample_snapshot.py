"""Write ``examples/out_of_memory.pickle`` and ``whole_step.pickle``: snapshots to read where no CUDA device can record.

The lifetimes and stacks are real: PyTorch's profiler notes every allocation and release of one eager step of the
example on a CPU. Their addresses are not: the caching allocator of ``tests/caching_allocator.py``, which rounds, splits
and reuses as CUDA's does, lays them into segments: once with as much memory as the example allows, once with plenty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from caching_allocator import CachingAllocator, OutOfMemoryError, snapshot_of  # noqa: E402

_CALL = re.compile(r"(?P<file>.+?)\((?P<line>\d+)\): (?P<name>.+)")
_KNOWN: dict[str, dict[str, Any]] = {}


def _frame(text: str) -> dict[str, Any] | None:
    """A frame of the profiler, ``file(line): function``, with paths that say nothing about this machine."""
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    file = found["file"]
    for mark, shown in (
        ("site-packages/", "/usr/lib/python3/dist-packages/"),
        ("examples/", "examples/"),
        ("tools/", ""),
    ):
        if mark in file:
            file = shown + file.rsplit(mark, 1)[1]
    if file.endswith("sample_snapshot.py") or "importlib" in file or "torch/profiler" in file:
        return None
    return _KNOWN.setdefault(text, {"filename": file, "line": int(found["line"]), "name": found["name"]})


def _walk(nodes: Any) -> Any:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _stack(node: Any) -> list[dict[str, Any]]:
    frames = []
    while node is not None:
        if node.tag == _EventType.PyCall and (frame := _frame(node.name)) is not None:
            frames.append(frame)
        elif node.tag == _EventType.TorchOp:
            frames.append(_KNOWN.setdefault(node.name, {"filename": "??", "line": 0, "name": node.name}))
        node = node.parent
    return frames


def main() -> None:
    """Profile one step, lay it into segments, and write the snapshot."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("out_of_memory", ROOT / "examples" / "03_out_of_memory.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, (x,), loss = example.factory()
    loss(model(x)).backward()
    model.zero_grad()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True
    ) as profiler:
        loss(model(x)).backward()
    nodes = list(_walk(profiler.profiler.kineto_results.experimental_event_tree()))
    events = sorted((node for node in nodes if node.tag == _EventType.Allocation), key=lambda node: node.start_time_ns)

    born = [tensor.nbytes for tensor in [*model.parameters(), x]]
    for name, capacity in (("out_of_memory", example.LIMIT_NBYTES), ("whole_step", 80 * 2**30)):
        allocator = CachingAllocator(capacity=capacity)
        _lay(allocator, born, events)
        data = pickle.dumps(snapshot_of(allocator), protocol=4)
        (ROOT / "examples" / f"{name}.pickle").write_bytes(data)
        print(f"examples/{name}.pickle: {len(allocator.entries)} events, {len(data)} bytes")


def _lay(allocator: CachingAllocator, born: list[int], events: list[Any]) -> None:
    """Allocate what the model has, then replay the step until it is over or memory runs out."""
    made = [_frame("examples/03_out_of_memory.py(49): factory")]
    for nbytes in born:
        allocator.alloc(nbytes, made)
    where: dict[int, int] = {}
    started = allocator.clock
    with contextlib.suppress(OutOfMemoryError):
        for node in events:
            fields = node.extra_fields
            allocator.clock = max(allocator.clock, started + (node.start_time_ns - events[0].start_time_ns) // 1000)
            if fields.alloc_size > 0:
                where[fields.ptr] = allocator.alloc(fields.alloc_size, _stack(node.parent))
            elif fields.ptr in where:
                allocator.free(where.pop(fields.ptr), frames=_stack(node.parent))


if __name__ == "__main__":
    main()
