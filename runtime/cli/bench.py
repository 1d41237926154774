"""``arenaplan bench``: measured against what a user would run instead, side by side in one process."""

from __future__ import annotations

import typer

bench_app = typer.Typer(no_args_is_help=True, help="Measure ours and its peers, interleaved in one process.")
