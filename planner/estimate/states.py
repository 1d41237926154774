"""Bytes that every parameter costs: weights, gradients, optimizer state, and the transient of an update.

The published counts for 16-bit training keep FP32 copies of parameters and gradients besides the moments: 2 + 2 + 16
for AdamW. DeepSpeed's documentation, "Memory Requirements", names what the 16 consist of: four bytes each for the FP32
parameter, the FP32 gradient, momentum and variance. With 8-bit moments (Dettmers et al., 2022, 2110.02861) it is 4 + 4
+ 1 + 1 = 10, with SGD's single momentum 4 + 4 + 4 = 12. FP32 training has no copies: 4 + 4 and the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from planner.estimate.architecture import Architecture
from planner.estimate.terms import Term

#: Elements that share one FP32 scale in 8-bit states of the fused update.
BLOCK = 256


class Precision(StrEnum):
    """How weights, gradients and activations are kept."""

    FP32 = "fp32"
    FP16 = "fp16"  # everything in 16 bits, moments too
    BF16 = "bf16"
    MIXED = "mixed"  # 16-bit weights, gradients and activations; FP32 copies of the first two; FP32 moments


class Optimizer(StrEnum):
    """The update rule."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"
    SGD = "sgd"  # with momentum


class Update(StrEnum):
    """How the update is computed (torch.optim's three implementations)."""

    FOREACH = "foreach"
    LOOP = "loop"
    FUSED = "fused"


#: Bytes of a weight, of its gradient and of an activation.
ITEMSIZE: Mapping[Precision, int] = MappingProxyType(
    {Precision.FP32: 4, Precision.FP16: 2, Precision.BF16: 2, Precision.MIXED: 2}
)
MOMENTS: Mapping[Optimizer, int] = MappingProxyType({Optimizer.ADAMW: 2, Optimizer.ADAMW_8BIT: 2, Optimizer.SGD: 1})
#: What `runtime.optimizer` keeps besides a 16-bit parameter for each choice of ``master``.
OWN_MASTERS: Mapping[str, int] = MappingProxyType({"fp32": 4, "split": 2, "stochastic": 0, "none": 0})


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes that one parameter costs, and how the optimizer's are made up."""

    weight: int
    gradient: int
    optimizer: int
    breakdown: str


def published(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """The published bytes per parameter.

    Moments are FP32, except that plain 16-bit training keeps them in the parameter's dtype, as torch.optim does.
    """
    itemsize = ITEMSIZE[precision]
    moment = 1 if optimizer is Optimizer.ADAMW_8BIT else 4 if precision is Precision.MIXED else itemsize
    parts = [moment] * MOMENTS[optimizer]
    names = "moments" if MOMENTS[optimizer] > 1 else "momentum"
    breakdown = f"{' + '.join(map(str, parts))} {names}"
    if precision is Precision.MIXED:
        parts = [4, 4, *parts]
        breakdown = f"4 FP32 parameter + 4 FP32 gradient + {breakdown}"
    return BytesPerParameter(itemsize, itemsize, sum(parts), breakdown)


def published_terms(model: Architecture, precision: Precision, optimizer: Optimizer) -> tuple[Term, ...]:
    """Weights, gradients and optimizer state of the whole model at the published bytes per parameter."""
    each, count = published(precision, optimizer), model.parameters
    return (
        Term("weights", f"{each.weight} · P", each.weight * count),
        Term("gradients", f"{each.gradient} · P", each.gradient * count),
        Term("optimizer state", f"{each.optimizer} · P ({each.breakdown})", each.optimizer * count),
    )


def own_update_terms(model: Architecture, precision: Precision, optimizer: Optimizer) -> tuple[Term, ...]:
    """Weights, gradients and state with `runtime.optimizer`: no FP32 gradients, and a choice of master."""
    itemsize, count, moments = ITEMSIZE[precision], model.parameters, MOMENTS[optimizer]
    eight = optimizer is Optimizer.ADAMW_8BIT
    state = moments * (count + 4 * -(-count // BLOCK)) if eight else 4 * moments * count
    state_formula = f"{moments}·(1 + 4/{BLOCK})" if eight else f"{moments}·4"
    masters = OWN_MASTERS if itemsize == 2 else {"none": 0}
    return tuple(
        Term(
            f'master="{master}"' if itemsize == 2 else "fused update, FP32",
            f"({itemsize} + {itemsize} + {kept} + {state_formula}) · P"
            if kept
            else f"({itemsize} + {itemsize} + {state_formula}) · P",
            (2 * itemsize + kept) * count + state,
        )
        for master, kept in masters.items()
    )


def transient(
    precision: Precision, optimizer: Optimizer, update: Update, parameters: int, largest: int
) -> tuple[int, str]:
    """Bytes an update holds besides its state, and the formula.

    ``foreach`` AdamW computes the square roots of all second moments at once, a list as large as they are
    (pytorch/pytorch#97712); the loop does so for one parameter at a time and divides into a second temporary; SGD with
    momentum works in place; fused and 8-bit updates hold nothing.

    Args:
        parameters: elements this device updates.
        largest: elements of the largest parameter tensor.
    """
    if optimizer is not Optimizer.ADAMW or update is Update.FUSED:
        return 0, "0: the update works in place"
    itemsize = 4 if precision is Precision.MIXED else ITEMSIZE[precision]
    if update is Update.FOREACH:
        return itemsize * parameters, f"{itemsize} · P, √v of every parameter at once"
    return 2 * itemsize * min(largest, parameters), f"2 · {itemsize} · largest parameter"
