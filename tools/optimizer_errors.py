"""Write the tables of docs/optimizer.md: bytes per parameter, and the error of each precision on a long run."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from runtime.optimizer import FusedAdamW, Precision

PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizer.md"
BEGIN, END = "<!-- table: tools/optimizer_errors.py -->", "<!-- end of table -->"
DTYPES = (torch.float16, torch.bfloat16)
CHOICES = (
    ("fp32", "fp32"),
    ("split", "fp32"),
    ("split", "8bit"),
    ("stochastic", "fp32"),
    ("stochastic", "8bit"),
    ("none", "fp32"),
)
STEPS, WIDTH, SAMPLES = 5000, 64, 512
LR, DECAY = 2e-4, 0.01


class Regression(nn.Module):
    """Two layers on fixed data, computed in float64 from whatever the weights are kept in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(WIDTH, 16, dtype=torch.float64) / 4)
        self.second = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.float64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction in float64."""
        return (x @ self.first.double().t()).tanh() @ self.second.double().t()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of a training step."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, torch.stack((x[:, 0].sin(), x[:, 1] * x[:, 2], x[:, 3].square(), x[:, 4:].mean(1)), 1)


def loss_of(model: Regression, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (model(x) - y).square().mean()


def exact_run(dtype: torch.dtype) -> tuple[Regression, float]:
    """Training with every number in float64, from weights that the dtype can hold."""
    model = Regression()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return model, float(test_loss(model))


def test_loss(model: Regression) -> torch.Tensor:
    """Loss on data of its own."""
    parts = [batch(10**6 + number) for number in range(SAMPLES // 32)]
    with torch.no_grad():
        return loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def run(dtype: torch.dtype, master: str, states: str, exact: Regression) -> tuple[float, float]:
    """Relative distance of the full-precision weights from the exact ones' movement, and the loss at the end."""
    model = Regression().to(dtype)
    start = [parameter.detach().double() for parameter in model.parameters()]
    optimizer = FusedAdamW(model.parameters(), lr=LR, weight_decay=DECAY, master=master, states=states)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, *batch(step))).backward()
        optimizer.step()
    squares = moved = 0.0
    for parameter, reference, first in zip(model.parameters(), exact.parameters(), start, strict=True):
        value = optimizer.master(parameter).double()
        squares += float((value - reference.detach()).square().sum())
        moved += float((reference.detach() - first).square().sum())
    return math.sqrt(squares / moved), float(test_loss(model))


def table() -> str:
    """The rows."""
    lines = [
        "| parameters | `master` | `states` | bytes per parameter | distance from float64 | loss | loss in float64 |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for dtype in DTYPES:
        exact, best = exact_run(dtype)
        for master, states in CHOICES:
            distance, loss = run(dtype, master, states, exact)
            held = Precision(master, states).bytes_per_parameter(dtype, 2)
            percent = f"{100 * distance:.2g}" if distance < 0.1 else f"{100 * distance:.0f}"
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| {name} | `{master}` | `{states}` | {held:.6g} | {percent} % | {loss:.4f} | {best:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Run everything (about two minutes) and write the page."""
    torch.set_num_threads(1)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
