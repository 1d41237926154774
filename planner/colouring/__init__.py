"""Colouring: offsets for lifetimes, a colour being a range of bytes. One algorithm a file, one call in front."""

from planner.colouring.portfolio import colour

__all__ = ["colour"]
