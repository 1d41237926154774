"""``arenaplan plan FILE.py:FACTORY``: plan a module of the user's."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from planner.pipeline import plan
from planner.trace import trace
from runtime.check import check_against_eager
from runtime.cli.attention import PassName, StrategyName, require_device
from runtime.cli.errors import CallError, one_line_errors
from runtime.cli.output import finish, progress


def plan_module(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="A function returning (module, inputs[, loss]).")
    ],
    pass_name: Annotated[PassName, typer.Option("--pass", help="What to plan.")] = PassName.BACKWARD,
    strategy: Annotated[StrategyName, typer.Option(help="How to hold attention matrices.")] = StrategyName.AUTO,
    budget: Annotated[str | None, typer.Option(help="The arena may not be larger, such as 8GiB.")] = None,
    alignment: Annotated[int, typer.Option(help="Bytes every offset is a multiple of.")] = 256,
    run: Annotated[bool, typer.Option("--run", help="Execute it and compare with eager.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps to run.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option("-o", metavar="PLAN.json", help="Save the plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Plan the module that FACTORY() returns as (module, example_inputs) or (module, example_inputs, loss_fn)."""
    with one_line_errors(debug):
        require_device(device)
        with redirect_stdout(sys.stderr):  # what the user's code prints is not the result
            module, inputs, loss = load_factory(target)
            graph = trace(module, inputs, loss=loss, mode=pass_name.value, attention=strategy.traced)
        planned = plan(
            graph,
            budget=budget,
            alignment=alignment,
            strategy=strategy.value,
            progress=None if as_json else progress,
        )
        check = None
        if run:
            with redirect_stdout(sys.stderr):
                check = check_against_eager(module, inputs, graph, planned, loss=loss, steps=steps, device=device)
        finish(f"{target}, {pass_name.value}", planned, check, output=output, as_json=as_json)


def load_factory(target: str) -> tuple[Callable[..., Any], Any, Callable[[Any], Any] | None]:
    """Import ``FILE.py`` and call ``FACTORY()``.

    Raises:
        CallError: no such file or function, the file or the factory raises, or it returns something else.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise CallError(f"{target}: write FILE.py:FACTORY, the name of a function in the file")
    if not path.is_file():
        raise CallError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"arenaplan_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CallError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
        factory = getattr(module, name, None)
        if not callable(factory):
            known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_") or "none"
            raise CallError(f"{path}: it has no function {name}; functions there: {known}")
        result = factory()
    except (CallError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise CallError(f"{path}: {_where(error, path)} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return _parts(target, result)


def _where(error: BaseException, path: Path) -> str:
    """The line of the user's file an exception came from."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"line {lines[-1]}" if lines else "the file"


def _parts(target: str, result: Any) -> tuple[Callable[..., Any], Any, Callable[[Any], Any] | None]:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise CallError(f"{target}: it must return (module, example_inputs) or (module, example_inputs, loss_fn)")
    module, inputs, loss = result if len(result) == 3 else (*result, None)
    if not callable(module):
        raise CallError(f"{target}: the first item returned is a {type(module).__name__}, not a module or function")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, (tuple, dict)):
        raise CallError(f"{target}: the example inputs are a {type(inputs).__name__}, not a tuple or dict")
    if loss is not None and not callable(loss):
        raise CallError(f"{target}: the loss is a {type(loss).__name__}, not a function")
    return module, inputs, loss
