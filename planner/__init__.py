"""arenaplan's planner: trace a training step, plan where every tensor lies, inspect and save the plan."""

from planner.pipeline import plan
from planner.plan import Plan
from planner.trace import trace
from planner.verify import verify

__all__ = ["Plan", "plan", "trace", "verify"]
