"""The command ``arenaplan``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.cli.commands import app


#: Commands that need no torch to start, each in a module of its name.
_LIGHT = frozenset({"pack", "inspect", "snapshot", "estimate"})


def main() -> None:
    """Entry point of the command; those that read files only, and `estimate`, start without importing torch."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in _LIGHT:
        with _stopped_at_once():
            import typer

            command = getattr(import_module(f"runtime.cli.{name}"), name)
        light = typer.Typer(
            name="arenaplan", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
        )
        light.command(name)(command)
        light(sys.argv[2:], prog_name=f"arenaplan {name}")
    else:
        with _stopped_at_once():
            from runtime.cli.commands import app

        app()


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Let an interrupt end the process while modules load: some of them catch it, or say that their import failed.

    Nothing has been begun then that would have to be ended in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where the caller ignores interrupts or has a handler of its own
        signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _stop(_signal: int, _frame: object) -> None:
    os.write(2, b"arenaplan: interrupted\n")
    os._exit(130)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runtime.cli.commands import app

    return app


__all__ = ["app", "main"]
