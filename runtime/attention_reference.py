"""The fused attention by its definition, in float64, with the matrix it avoids: what its results are held against.

The random words of its dropout are computed here from the generator's own definition, in integers of 64 bits.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_ROUNDS = 10


def random_words(seed: int, rows: int, columns: int) -> torch.Tensor:
    """``(rows, columns)`` words of 31 bits, of Philox4x32-10 (Salmon et al., 2011), as int64.

    Column j of row i is word ``j % 4`` of the counter ``i · ⌈columns / 4⌉ + j // 4``.
    """
    groups = -(-columns // 4)
    place = torch.arange(rows * groups)
    counter = [place & _WORD, place >> 32, torch.zeros_like(place), torch.zeros_like(place)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(_ROUNDS):
        high, low = _product(counter[0], 0xD2511F53)
        other_high, other_low = _product(counter[2], 0xCD9E8D57)
        counter = [other_high ^ counter[1] ^ key[0], other_low, high ^ counter[3] ^ key[1], low]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return torch.stack(counter, -1).view(rows, 4 * groups)[:, :columns] >> 1


def _product(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of a product of 32-bit numbers; int64 holds its 64 bits, the sign aside."""
    product = words * factor
    return (product >> 32) & _WORD, product & _WORD


def kept_weights(seed: torch.Tensor, probability: float, shape: tuple[int, ...]) -> torch.Tensor:
    """Which weights of ``(batch, heads, rows, columns)`` dropout keeps."""
    batch, heads, rows, columns = shape
    words = random_words(int(seed.reshape(-1)[0].item()), batch * heads * rows, columns)
    return (words >= min(round(probability * 2**31), 2**31 - 1)).view(shape)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """``dropped(softmax(scale · q kᵀ + mask)) v``, differentiable; rounded to the dtype of q at the end.

    Shapes as `planner.trace.fused`. A row whose keys are all masked gives zeros.
    """
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (tensor.double().repeat_interleave(groups, 1) for tensor in (k, v))
    scores = scale * q.double() @ wide_k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if seed is not None and dropout > 0:
        weights = weights * kept_weights(seed, dropout, tuple(weights.shape)) / (1 - dropout)
    out: torch.Tensor = weights @ wide_v
    return out.to(q.dtype)
