"""Train in FP16 with loss scaling, forward, backward and update in one arena, and watch an overflow being skipped."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from runtime import TrainingStep
from runtime.optimizer import FusedAdamW, LossScaler


def network() -> nn.Module:
    """A few layers with what needs FP32 inside: norms, and a loss at the end."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
    )


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random points, and which of eight of their coordinates is the largest."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
    return x, x[:, :8].argmax(1)


def main() -> None:
    steps = {}
    for precision in ("fp32", "fp16"):
        model = network()
        optimizer = FusedAdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
        # A first scale that is far too high for float16 gradients: it backs off until they fit.
        scaler = LossScaler(2.0**22, max_scale=2.0**24) if precision == "fp16" else None
        step = TrainingStep(model, F.cross_entropy, batch(0), optimizer=optimizer, precision=precision, scaler=scaler)
        steps[precision] = step
        print(f"{precision}: arena {step.plan.arena_nbytes / 2**10:.0f} KiB, its end: ", end="")
        print(", ".join(operation.name for operation in step.plan.graph.operations[-2:]))

    for number in range(60):
        losses = {precision: step(batch(number)).item() for precision, step in steps.items()}
        half = steps["fp16"]
        if not half.stepped:
            print(f"step {number:2d}   overflow: nothing changed, the scale is now {half.scaler.get_scale():g}")
        elif number % 10 == 9:
            print(f"step {number:2d}   loss {losses['fp16']:.4f}   in FP32 {losses['fp32']:.4f}")


if __name__ == "__main__":
    main()
