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
from runtime.cli.errors import CallError, one_line_errors
from runtime.cli.options import (
    Alignment,
    Budget,
    Debug,
    Device,
    Json,
    Pass,
    PassName,
    PlanOutput,
    Run,
    Steps,
    Strategy,
    StrategyName,
    require_device,
    require_outputs,
)
from runtime.cli.output import finish, progress


def plan_module(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="A function returning (module, inputs[, loss]).")
    ],
    pass_name: Pass = PassName.BACKWARD,
    strategy: Strategy = StrategyName.AUTO,
    budget: Budget = None,
    alignment: Alignment = 256,
    run: Run = False,
    steps: Steps = 5,
    device: Device = "cpu",
    output: PlanOutput = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan the module that FACTORY() returns as (module, example_inputs) or (module, example_inputs, loss_fn)."""
    with one_line_errors(debug):
        require_device(device)
        require_outputs([output])
        with redirect_stdout(sys.stderr):  # what the user's code prints is not the result
            module, inputs, loss = load_factory(target)
            graph = trace(module, inputs, loss=loss, mode=pass_name.value, attention=strategy.traced)
        planned = plan(
            graph,
            budget=budget,
            alignment=alignment,
            strategy=strategy.value,
            device=device,
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
    if path.is_dir():
        raise CallError(f"{path}: it is a directory; name the Python file in it, as in {path / 'model.py'}:{name}")
    if not path.is_file():
        raise CallError(f"{path}: no such file; write FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(f"arenaplan_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CallError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    doing = "loading it"
    try:
        spec.loader.exec_module(module)
        doing = f"{name}()"
        factory = getattr(module, name, None)
        if not callable(factory):
            known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_") or "none"
            raise CallError(f"{path}: it has no function {name}; functions there: {known}")
        result = factory()
    except (CallError, KeyboardInterrupt):
        raise
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}"
        raise CallError(f"{path}{_line(error, path)}: {doing} raised {cause}; mend it there") from error
    finally:
        sys.path.pop(0)
    return _parts(target, result)


def _line(error: BaseException, path: Path) -> str:
    """The line of the user's file an exception came from, ``", line 3"``, or ``""``."""
    whole = path.absolute()
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).absolute() == whole]
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).absolute() == whole:
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""


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
