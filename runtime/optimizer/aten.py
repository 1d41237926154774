"""The update in ATen calls, chunk by chunk: where numba is absent, and for FP64 parameters.

It works through scratch memory of a few chunks, so nothing is allocated in proportion to the model, and it follows
`update_kernel` operation by operation: both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.optimizer import codes, convert
from runtime.optimizer.workspace import Slot, Workspace

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """A row of the table as tensors: flat views of the parameter and the gradient."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    element: int
    slot: int
    group: int


class AtenBackend:
    """Works on any device that ATen does; on others than a CPU it waits for the overflow check."""

    host = True
    chunk = codes.CPU_CHUNK

    def overflow(self, workspace: Workspace) -> bool:
        """Whether a gradient in the table is infinite or NaN."""
        return not all(bool(piece.gradient.isfinite().all()) for piece in _pieces(workspace))

    def squares(self, workspace: Workspace) -> float:
        """Σ gradient² over the table, in float64."""
        return math.fsum(float(piece.gradient.double().square().sum()) for piece in _pieces(workspace))

    def update(self, workspace: Workspace, rule: int, settings: Any, scale: float, seed: int) -> None:
        """Every row of the table."""
        steps = workspace.steps.tolist()
        for piece in _pieces(workspace):
            _update(workspace, piece, rule, settings[piece.group], steps[piece.slot] + 1, scale, seed)


def _pieces(workspace: Workspace) -> Iterator[Piece]:
    size = workspace.dtype.itemsize
    for row in workspace.table.tolist():
        slot = workspace.slots[row[codes.STEP]]
        within = row[codes.STATE] - slot.segment.offset
        given = next(p.grad for p in slot.parameters if p.grad is not None)
        length = row[codes.LENGTH]
        yield Piece(
            _flat(workspace.parameters, slot.parameter.data, row[codes.PARAMETER], slot, within, length, size),
            _flat(workspace.gradients, given, row[codes.GRADIENT], slot, within, length, size),
            row[codes.STATE],
            row[codes.STEP],
            row[codes.GROUP],
        )


def _flat(
    home: torch.Tensor | None, tensor: torch.Tensor, address: int, slot: Slot, within: int, length: int, size: int
) -> torch.Tensor:
    """The elements at an address: of the workspace if they lie there, else of the tensor they belong to."""
    if home is not None and 0 <= address - home.data_ptr() < home.numel() * size:
        first = (address - home.data_ptr()) // size
        return home[first : first + length]
    flat = tensor.detach().as_strided((slot.segment.length,), (1,))
    return flat[within : within + length]


def _update(workspace: Workspace, piece: Piece, rule: int, setting: Any, step: float, scale: float, seed: int) -> None:
    compute = torch.float64 if workspace.dtype is torch.float64 else torch.float32
    first, last = piece.element, piece.element + piece.parameter.numel()
    kept = workspace.blocks.get("master", workspace.blocks.get("remainder"))
    kept = None if kept is None else kept[first:last]
    random = None
    key = stream_key(seed, int(step), first >> 32)
    g = piece.gradient.to(compute) * (scale * setting[codes.SIGN])
    w = _load(workspace.master, piece.parameter, kept, compute)
    moments = [_Moment(workspace, name, signed, first, last) for name, signed in workspace.moments]
    if rule == codes.ADAM:
        _adam(g, w, moments[0], moments[1], setting, step)
    else:
        _sgd(g, w, moments[0] if moments and setting[codes.MOMENTUM] else None, setting, step)
    if workspace.states == codes.BYTES and moments:
        random = block_bits(mix_number(key + 1), first, last - first, w.device)
        for moment in moments:
            if rule == codes.ADAM or setting[codes.MOMENTUM]:
                moment.store(random)
    if workspace.master == codes.STOCHASTIC:
        random = random_bits(key, first, last - first, w.device)
    _store(workspace.master, piece.parameter, kept, w, random)


class _Moment:
    """A chunk of a moment: in FP32 the memory itself, in 8-bit decoded, encoded by `store`."""

    def __init__(self, workspace: Workspace, name: str, signed: bool, first: int, last: int) -> None:
        self.signed = signed
        self.flat = workspace.blocks[name][first:last]
        scales = workspace.blocks.get(f"{name}_scales")
        self.scales = None if scales is None else scales[first // codes.TILE : -(-last // codes.TILE)]
        self.value = self.flat

    def shrink(self, keep: float) -> torch.Tensor:
        """The value times ``keep``, in place or decoded."""
        if self.scales is None:
            return self.value.mul_(keep)
        self.value = convert.decode(self.flat, self.scales * keep, self.signed)
        return self.value

    def approach(self, goal: torch.Tensor, keep: float, take: float) -> torch.Tensor:
        """The value moved towards ``goal`` by ``take`` of the distance, which is 1 − ``keep``."""
        if self.scales is None:
            self.value += (goal - self.value) * take
            return self.value
        return self.shrink(keep).add_(goal * take)

    def store(self, random: torch.Tensor) -> None:
        """Encode the value, rounding at random."""
        if self.scales is None:
            return
        code, scales = convert.encode(self.value, self.signed, random)
        self.flat.copy_(code)
        self.scales.copy_(scales)


def _adam(g: torch.Tensor, w: torch.Tensor, first: _Moment, second: _Moment, setting: Any, step: float) -> None:
    kind = np.float64 if w.dtype is torch.float64 else np.float32
    lr, beta1, beta2, decay = (float(setting[i]) for i in (codes.LR, codes.BETA1, codes.BETA2, codes.WEIGHT_DECAY))
    decoupled = setting[codes.DECOUPLED] != 0
    size, root = float(kind(lr / (1 - beta1**step))), float(kind(1 / math.sqrt(1 - beta2**step)))
    if decay and not decoupled:
        g += w * float(kind(decay))
    m = first.approach(g, float(kind(beta1)), float(kind(1 - beta1)))
    v = second.shrink(float(kind(beta2))).add_(g * g * float(kind(1 - beta2)))
    moved = m / (convert.root(v) * root + float(kind(setting[codes.EPS])))
    moved *= size
    if decay and decoupled:
        moved += w * float(kind(lr * decay))
    w -= moved


def _sgd(g: torch.Tensor, w: torch.Tensor, moment: _Moment | None, setting: Any, step: float) -> None:
    kind = np.float64 if w.dtype is torch.float64 else np.float32
    lr, momentum = float(kind(setting[codes.LR])), float(kind(setting[codes.MOMENTUM]))
    if setting[codes.WEIGHT_DECAY]:
        g = g + w * float(kind(setting[codes.WEIGHT_DECAY]))
    if moment is not None:
        keep = momentum if step > 1 else 0.0
        m = moment.shrink(keep).add_(g * (float(kind(1 - setting[codes.DAMPENING])) if step > 1 else 1.0))
        g = g + m * momentum if setting[codes.NESTEROV] else m
    w -= g * lr


def _load(master: int, parameter: torch.Tensor, kept: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
    if kept is not None and master == codes.MASTER:
        same = kept.to(parameter.dtype).view(torch.int16) == parameter.view(torch.int16)
        return torch.where(same, kept, parameter.float())
    if kept is not None and master == codes.SPLIT:
        return convert.joined(parameter, kept)
    return parameter.to(compute, copy=True)


def _store(
    master: int, parameter: torch.Tensor, kept: torch.Tensor | None, w: torch.Tensor, random: torch.Tensor | None
) -> None:
    if kept is not None and master == codes.MASTER:
        kept.copy_(convert.to_grid(w, parameter.dtype))
        parameter.copy_(kept)
    elif kept is not None and master == codes.SPLIT:
        top, rest = convert.split(w, parameter.dtype)
        parameter.copy_(top)
        kept.copy_(rest)
    elif random is not None and master == codes.STOCHASTIC:
        parameter.copy_(rounded_at_random(w, random, parameter.dtype))
    else:
        parameter.copy_(w)


def rounded_at_random(w: torch.Tensor, random: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A neighbour of each FP32 value in a 16-bit dtype, the nearer the likelier; ``random`` holds 32 bits as int64."""
    bits = w.view(torch.int32)
    if dtype is torch.bfloat16:
        moved = (bits + (random & 0xFFFF).to(torch.int32)) >> 16
        finite = (bits & 0x7F800000) != 0x7F800000
        return torch.where(finite, moved.to(torch.int16).view(torch.bfloat16), w.to(torch.bfloat16))
    normal = ((bits + (random & 0x1FFF).to(torch.int32)) & -0x2000).view(torch.float32)
    part = (random >> 8).float() * 2.0**-24
    small = torch.copysign((w.abs() * 2.0**24 + part).floor() * 2.0**-24, w)
    return torch.where(w.abs() >= 2.0**-14, normal, small).to(torch.float16)


def mix_number(x: int) -> int:
    """`update_kernel`'s hash of one 32-bit number."""
    x &= _MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def stream_key(seed: int, step: int, high: int) -> int:
    """`update_kernel`'s key of a training step and of the upper half of an element's number."""
    return mix_number(mix_number(mix_number(seed + 0x9E3779B9) ^ (step & _MASK)) ^ (high & _MASK))


def random_bits(key: int, first: int, count: int, device: torch.device, every: int = 1) -> torch.Tensor:
    """32 random bits, as int64, for each of so many elements; ``every`` so many."""
    x = (torch.arange(count, device=device) * every + (first & _MASK)) & _MASK
    x ^= key
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def block_bits(key: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits, as int64, for each of so many elements, from blocks that each start anew: `byte_kernel`'s."""
    x = random_bits(key, first, -(-count // codes.TILE), device, codes.TILE)
    x = x[:, None] + torch.arange(codes.TILE, device=device) * codes.RANDOM_STEP & _MASK
    x ^= x >> 15
    return (x * codes.RANDOM_FACTOR & _MASK).view(-1)[:count]
