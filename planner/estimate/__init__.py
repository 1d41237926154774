"""Memory of training and inference before anything runs: by formula from a model's sizes, or from a traced program.

Only `planner.trace.eager` and the planner need torch; everything here is arithmetic.
"""

from __future__ import annotations

from planner.estimate.architecture import Architecture, Family, Part
from planner.estimate.checkpoint import Checkpoint, read_checkpoint
from planner.estimate.config_file import ConfigError, architecture_of, read_config
from planner.estimate.devices import GPUS, Gpu
from planner.estimate.fit import largest, memory_nbytes
from planner.estimate.inference import inference
from planner.estimate.presets import PRESETS, preset
from planner.estimate.states import Optimizer, Precision, Update, published
from planner.estimate.terms import NOT_COVERED, Estimate, Phase, Term
from planner.estimate.traced import eager_step, traced
from planner.estimate.training import training

__all__ = [
    "GPUS",
    "NOT_COVERED",
    "PRESETS",
    "Architecture",
    "Checkpoint",
    "ConfigError",
    "Estimate",
    "Family",
    "Gpu",
    "Optimizer",
    "Part",
    "Phase",
    "Precision",
    "Term",
    "Update",
    "architecture_of",
    "eager_step",
    "inference",
    "largest",
    "memory_nbytes",
    "preset",
    "published",
    "read_checkpoint",
    "read_config",
    "traced",
    "training",
]
