"""The command ``arenaplan``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.cli.interrupts import stopped_at_once

if TYPE_CHECKING:
    from typer import Typer

    from runtime.cli.commands import app


#: Commands that need no torch to start, each in a module of its name.
_LIGHT = frozenset({"pack", "inspect", "snapshot", "estimate"})


def main() -> None:
    """Entry point of the command; those that read files only, and `estimate`, start without importing torch."""
    with stopped_at_once():
        _open_closed_streams()
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        status = _call_light(name) if name in _LIGHT else _call(_all(), sys.argv[1:], "arenaplan")
        sys.exit(_flushed(status))


def _open_closed_streams() -> None:
    """Where standard output or error was closed (``>&-``), Python has none: what is written goes nowhere then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the end)


def _all() -> Typer:
    """Every command; imports torch."""
    from runtime.cli.commands import app

    return app


def _call_light(name: str) -> int:
    import typer

    light = typer.Typer(
        name="arenaplan", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    light.command(name)(getattr(import_module(f"runtime.cli.{name}"), name))
    return _call(light, sys.argv[2:], f"arenaplan {name}")


def _call(app: Typer, arguments: list[str], program: str) -> int:
    """The exit status of a call; a wrong one is told in one line, like every other error."""
    import typer

    from runtime.cli.errors import WRONG_CALL, say

    usage_error: Any = typer.BadParameter.__bases__[0]  # The framework does not export it under a name of its own.
    try:
        status = app(arguments, prog_name=program, standalone_mode=False)
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return WRONG_CALL
        where = program if error.ctx is None else error.ctx.command_path
        message = " ".join(error.format_message().split()).rstrip(".")
        say(f"error: {where.removeprefix('arenaplan').strip() or 'the call'}: {message}; see {where} --help")
        return WRONG_CALL
    return status if isinstance(status, int) else 0


def _flushed(status: int) -> int:
    """The exit status once standard output is written, which a full disk may refuse at the very end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or 1  # The reader went away (`| head`), and nobody waits for a message.
    except OSError as error:
        from runtime.cli.errors import describe, exit_status, say

        say(f"error: {describe(error)}")
        status = exit_status(error)
    else:
        return status
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # What is left cannot fail once more at exit.
    return status


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _all()


__all__ = ["app", "main"]
