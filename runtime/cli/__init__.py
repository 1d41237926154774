"""The command ``arenaplan``."""

from __future__ import annotations

import sys
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
        import typer

        light = typer.Typer(
            name="arenaplan", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
        )
        light.command(name)(getattr(import_module(f"runtime.cli.{name}"), name))
        light(sys.argv[2:], prog_name=f"arenaplan {name}")
    else:
        from runtime.cli.commands import app

        app()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runtime.cli.commands import app

    return app


__all__ = ["app", "main"]
