"""Ctrl-C: one line and status 130, whatever a process is doing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Let an interrupt end the process where nothing has been begun that would have to be ended in order.

    While modules load above all: some of them catch it, or say that their import failed.
    """
    with _handled(signal.default_int_handler, _stop):
        yield


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within `stopped_at_once`: raise ``KeyboardInterrupt`` again, as the body of a command expects."""
    with _handled(_stop, signal.default_int_handler):
        yield


@contextmanager
def _handled(before: object, during: object) -> Iterator[None]:
    """Exchange one handler for another; not where the caller ignores interrupts or has a handler of its own."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is before
    if ours:
        signal.signal(signal.SIGINT, during)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)  # type: ignore[arg-type]


def _stop(_signal: int, _frame: object) -> None:
    os.write(2, b"arenaplan: interrupted\n")
    os._exit(130)
