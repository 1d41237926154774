"""arenaplan's runtime: execute a plan out of one preallocated arena."""

from runtime.arena import Arena
from runtime.executor import ArenaRuntime
from runtime.training import TrainingStep

__all__ = ["Arena", "ArenaRuntime", "TrainingStep"]
