"""Distance from an exact run of AdamW with moments in 8-bit codes, ours and the dynamic map, all else in float64.

``python tools/optimizer_codes.py`` prints the figures that docs/optimizer.md compares (minutes). The dynamic map is
that of Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), as bitsandbytes builds it; every number
goes to the nearest of the map.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from optimizer_errors import DECAY, LR, STEPS, Regression, batch, exact_run, loss_of

from runtime.optimizer import aten, codes, convert

Round = Callable[[torch.Tensor, bool, int], torch.Tensor]


def dynamic_map(signed: bool) -> torch.Tensor:
    """256 numbers of at most 1: middles of equal parts of each of seven decades, twice as many as in the one below."""
    values = [torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def through_dynamic_map(x: torch.Tensor, signed: bool, _step: int) -> torch.Tensor:
    """Each number to the nearest of its block's scale times the map."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % codes.TILE)).view(-1, codes.TILE)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-300)
    values = dynamic_map(signed)
    place = torch.bucketize((blocks / scale).contiguous(), (values[1:] + values[:-1]) / 2)
    return (values[place] * scale).view(-1)[: x.numel()]


def through_ours(seed: int) -> Round:
    """Encoded with random rounding, and decoded."""

    def through(x: torch.Tensor, signed: bool, step: int) -> torch.Tensor:
        key = aten.stream_key(seed + 100 * signed, step, 0)
        code, scales = convert.encode(x.float(), signed, aten.block_bits(key, 0, x.numel(), x.device))
        return convert.decode(code, scales, signed).double()

    return through


def distance(rounded: Round, exact: Regression) -> float:
    """How far a run ends from the exact one, over how far that moved."""
    model = Regression()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.float16))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [torch.zeros(2, parameter.numel(), dtype=torch.float64) for parameter in model.parameters()]
    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss_of(model, *batch(step - 1)).backward()
        with torch.no_grad():
            for parameter, (m, v) in zip(model.parameters(), moments, strict=True):
                gradient = parameter.grad.reshape(-1)
                m.lerp_(gradient, 0.1)
                v.mul_(0.999).add_(gradient.square() * 0.001)
                moved = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
                parameter.mul_(1 - LR * DECAY).sub_(LR * moved.view_as(parameter))
                m.copy_(rounded(m, True, step))
                v.copy_(rounded(v, False, step))
    squares = moved_squares = 0.0
    for parameter, reference, first in zip(model.parameters(), exact.parameters(), start, strict=True):
        squares += float((parameter.detach() - reference.detach()).square().sum())
        moved_squares += float((reference.detach() - first).square().sum())
    return math.sqrt(squares / moved_squares)


def main() -> None:
    """Print one line for each way to round."""
    torch.set_num_threads(1)
    exact, _ = exact_run(torch.float16)
    ways = {f"ours, seed {seed}": through_ours(seed) for seed in range(3)}
    for name, rounded in {**ways, "dynamic map, nearest": through_dynamic_map}.items():
        print(f"{name}: {100 * distance(rounded, exact):.1f} %")


if __name__ == "__main__":
    main()
