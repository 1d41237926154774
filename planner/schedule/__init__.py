"""The order of operations: any order that respects the dependencies computes the same, some need less memory."""

from planner.schedule.search import Schedule, schedules

__all__ = ["Schedule", "schedules"]
