"""The fused update: parameters, gradients and states in contiguous memory, updated in one pass.

Interface, for training loops and for those who build on it:

`FusedAdamW`, `FusedAdam`, `FusedSGD`, `AdamW8bit` are `torch.optim.Optimizer`s. At construction the parameters become
views of a workspace for each device and dtype (same objects, shapes, strides); backward passes deliver gradients into
views of a second one. ``step()`` is one launch for each device and dtype.

- ``optimizer.grad_scale``, ``optimizer.found_inf``: set before ``step()`` by a scaler, numbers or tensors; ``None`` or
  absent otherwise. With a scale and no ``found_inf`` the step looks for overflow by itself.
- ``optimizer.last_step_skipped``, ``optimizer.skipped_steps``, ``optimizer.grad_norm``: what the last steps did.
- ``optimizer.master(p)``, ``optimizer.set_master(p, value)``: a 16-bit parameter in full precision. A model converted
  from FP32 keeps its weights exactly by ``set_master(p, fp32_weight)`` after construction.
- ``optimizer.follow()``, or ``link=False``: parameters and gradients are used where they lie, whoever placed them; the
  addresses are read at each step, so views of an arena need no copies. Even a linked optimizer follows a parameter or
  gradient that has been moved elsewhere with its strides kept.
- ``optimizer.state_blocks()``, ``optimizer.place_states(blocks)``: the flat states by name, and a way to move them into
  memory of the caller's, such as an arena.
- `Precision.bytes_per_parameter`: what a choice costs.

`LossScaler`: ``scale(loss)``, ``step(optimizer) -> bool``, ``update()``; `docs/optimizer.md` explains the choices.
"""

from __future__ import annotations

from runtime.optimizer.adam import AdamW8bit, FusedAdam, FusedAdamW
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.precision import Precision
from runtime.optimizer.scaling import LossScaler
from runtime.optimizer.sgd import FusedSGD

__all__ = ["AdamW8bit", "FusedAdam", "FusedAdamW", "FusedOptimizer", "FusedSGD", "LossScaler", "Precision"]
