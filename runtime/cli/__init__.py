"""The command ``arenaplan``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.cli.commands import app


def main() -> None:
    """Entry point of the command; `pack`, `inspect` and `snapshot` read files only and do without importing torch."""
    if sys.argv[1:2] in (["pack"], ["inspect"], ["snapshot"]):
        import typer

        name = sys.argv[1]
        light = typer.Typer(
            name="arenaplan", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
        )
        if name == "pack":
            from runtime.cli.pack import pack

            light.command(name)(pack)
        elif name == "snapshot":
            from runtime.cli.snapshot import snapshot

            light.command(name)(snapshot)
        else:
            from runtime.cli.inspect import inspect

            light.command(name)(inspect)
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
