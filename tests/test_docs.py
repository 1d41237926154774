"""The Python of the documentation's pages runs as it stands, given the model and batches it takes for granted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn

PAGES = Path(__file__).resolve().parents[1] / "docs"
SNIPPETS = {
    page.stem: snippets
    for page in sorted(PAGES.glob("*.md"))
    if (snippets := re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
}
#: Run elsewhere: `test_estimate_docs`; or needing a CUDA device that runs out of memory.
ELSEWHERE = frozenset({"estimate", "out-of-memory"})


class Attention(nn.Module):
    """A small model that calls PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))[:, -1]


def granted() -> dict[str, Any]:
    """What the pages take for granted."""
    torch.manual_seed(0)
    model = Attention()
    batches = [(torch.randn(4, 5, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
    return {
        "torch": torch,
        "model": model,
        "module": model,
        "inputs": (torch.randn(4, 5, 8, requires_grad=True),),
        "loss_fn": F.cross_entropy,
        "loss_of": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": batches[0],
        "example_batch": batches[0],
        "batches": batches,
    }


def test_every_page_with_python_is_run() -> None:
    assert SNIPPETS.keys() >= {"training", "optimizer", "packing", "fused-attention", "api", *ELSEWHERE}


@pytest.mark.parametrize(
    ("page", "index"),
    [(page, index) for page in SNIPPETS if page not in ELSEWHERE for index in range(len(SNIPPETS[page]))],
)
def test_the_python_of_a_page_runs(page: str, index: int) -> None:
    """Each snippet after those above it, on a model of its own."""
    names = granted()
    for snippet in SNIPPETS[page][:index]:
        for line in snippet.splitlines():
            if line.startswith(("import ", "from ")):
                exec(line, names)
    if "optimizer=optimizer, precision" in SNIPPETS[page][index]:
        from runtime.optimizer import FusedAdamW

        names["optimizer"] = FusedAdamW(names["model"].parameters())
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(compile(SNIPPETS[page][index], f"{page}.md", "exec"), names)
    if "for batch in batches" in SNIPPETS[page][index] or "in batches:" in SNIPPETS[page][index]:
        after = list(names["model"].parameters())
        assert all(not torch.equal(one, two.detach().to(one.dtype)) for one, two in zip(before, after, strict=True))
