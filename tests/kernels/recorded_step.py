"""Plan a step, bind it for a chip that is not there, and print what it launches; started by the tests."""

from __future__ import annotations

import json

import torch
from launch_recorder import install
from triton.backends.compiler import GPUTarget

from planner import plan, trace
from runtime import ArenaRuntime
from runtime.attention import build_attention
from runtime.kernels.triton import softmax
from runtime.kernels.triton.launch import Launch


def main() -> None:
    recorder = install(GPUTarget("cuda", 90, 32))
    module, x = build_attention(2, 3, 64, 96, dropout=0.1, device="cpu", dtype="float16")
    made = plan(trace(module, (x,), mode="joint"), strategy="materialized", time_limit=1)
    run = ArenaRuntime(made, kernels="triton")
    run.load(*(torch.zeros(view.shape, dtype=view.dtype) for view in run.inputs))
    steps = []
    for _ in range(2):
        first = len(recorder.launches)
        run.execute(threads=1)
        steps.append(recorder.launches[first:])
    bound = [(item.kernel.fn.__name__, item.grid) for item in run._program if isinstance(item, Launch)]
    compiled = len(recorder.compiled)
    aligned = torch.zeros(4096 + 64, dtype=torch.float16)
    for start in (0, 64, 1):  # elements: 128 bytes on is as well aligned, 2 bytes on is not
        rows = aligned[start : start + 4096].view(64, 64)
        launch = softmax.launch(rows, rows)
        if launch is not None:
            launch()
            steps.append([len(recorder.compiled) - compiled])
    print(json.dumps({"steps": steps, "bound": bound, "compiled": compiled}))


if __name__ == "__main__":
    main()
