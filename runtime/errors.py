"""The errors the runtime raises on purpose: one class per cause, facts as attributes, the remedy in the message."""

from __future__ import annotations


class ArenaError(Exception):
    """Base of every error the runtime raises on purpose."""
