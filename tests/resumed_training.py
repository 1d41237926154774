"""Run by a test as a process of its own: trains, saves every few steps, prints each loss as bits; may be killed.

``python -m tests.resumed_training planned|eager CHECKPOINT STEPS EVERY``: carries on from the checkpoint if it exists.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import runtime
from runtime.optimizer import FusedAdamW, LossScaler
from tests.small_gpt import SmallGPT, batch, loss_of


def main(kind: str, checkpoint: Path, steps: int, every: int) -> None:
    torch.set_num_threads(1)
    model = SmallGPT()
    optimizer = FusedAdamW(model.parameters(), lr=3e-3)
    # So high that the scale backs off before the kill, and so short an interval that it grows again after it.
    scaler = LossScaler(2.0**24, growth_interval=5)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if kind == "planned":
        step = runtime.TrainingStep(model, loss_of, batch(0), optimizer=optimizer, precision="fp16", scaler=scaler)
        parts["amp"] = step.amp
    else:
        *_, parts["amp"] = runtime.initialize(model, optimizer, "fp16", scaler=scaler)
    parts["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved["steps"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for number in range(first, steps):
        tokens, target = batch(number)
        if kind == "planned":
            loss = step((tokens, target))
        else:
            loss = loss_of(model(tokens), target)
            parts["amp"].backward(loss)
            parts["amp"].step()
            optimizer.zero_grad()
        parts["schedule"].step()
        print(number, loss.item().hex(), parts["amp"].scaler.get_scale(), flush=True)
        if (number + 1) % every == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"steps": number + 1, **states}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    print("parameters", sum(float(p.double().square().sum()) for p in model.parameters()).hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
