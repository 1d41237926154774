"""All subcommands, one file each, registered under one command."""

from __future__ import annotations

import typer

from runtime.cli.attention import attention
from runtime.cli.bench import bench_app
from runtime.cli.demo import demo
from runtime.cli.estimate import estimate
from runtime.cli.inspect import inspect
from runtime.cli.pack import pack
from runtime.cli.plan_module import plan_module
from runtime.cli.run_plan import run_plan
from runtime.cli.snapshot import snapshot

app = typer.Typer(
    name="arenaplan",
    help="Plan where every tensor of a training step lies in one block of memory, and run the step there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("attention")(attention)
app.command("plan")(plan_module)
app.command("run")(run_plan)
app.command("inspect")(inspect)
app.command("pack")(pack)
app.command("estimate")(estimate)
app.command("snapshot")(snapshot)
app.add_typer(bench_app, name="bench")
