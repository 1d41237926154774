"""``arenaplan estimate``: memory of training or inference before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from planner import estimate as formulas
from planner.estimate import Architecture, Estimate, Family, Phase
from planner.estimate.architecture import size_of
from planner.report.facts import size_text
from runtime.cli.errors import CallError, one_line_errors
from runtime.cli.interrupts import stopped_at_once
from runtime.cli.options import Debug, Json

#: What `inference` computes in where neither the call nor the model says.
_PRECISION = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FILES = ("model.safetensors.index.json", "model.safetensors")
_SIZES = "--layers, --hidden, --heads and --vocabulary"


#: Options, by parameter name, that describe a model of sizes given; that say something of training, or of inference.
_OF_SIZES = frozenset(
    "family layers hidden heads kv_heads head_size intermediate vocabulary tied".split(),
)
_OF_TRAINING = frozenset("optimizer update zero gpus live_parameters drop_logits no_dropout".split())
_OF_INFERENCE = frozenset("new_tokens logits weights".split())
#: All that a traced program leaves to say.
_OF_PROGRAM = frozenset("model inference optimizer update device_memory as_json debug".split())


def estimate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A preset (gpt2, llama-3-8b, …), a config.json, or FILE.py:FACTORY."),
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Inference instead of training.")] = False,
    batch: Annotated[int, typer.Option("--batch", "-B", help="Sequences on one device.")] = 1,
    length: Annotated[int | None, typer.Option("--length", "-L", help="Tokens in a sequence (or prompt).")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate; the KV cache grows by as many.")] = 0,
    precision: Annotated[str | None, typer.Option(help="fp32, fp16, bf16 or mixed.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit or sgd (with momentum).")] = "adamw",
    update: Annotated[str, typer.Option(help="foreach, loop or fused.")] = "foreach",
    attention: Annotated[str, typer.Option(help="fused or materialized.")] = "fused",
    zero: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.")] = 0,
    gpus: Annotated[int, typer.Option(help="GPUs that share under ZeRO.")] = 1,
    live_parameters: Annotated[int | None, typer.Option(help="Elements ZeRO-3 gathers at once.")] = None,
    logits: Annotated[str, typer.Option(help="Inference: of the last position, or all.")] = "last",
    drop_logits: Annotated[bool, typer.Option("--drop-logits", help="The caller drops the model's output.")] = False,
    no_dropout: Annotated[bool, typer.Option("--no-dropout", help="The model's dropout is off.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="A safetensors file, index or directory: dtypes by tensor."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu: size of dropout masks and statistics.")] = "cuda",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Find the largest batch and length that fit, such as 80GiB.")
    ] = None,
    family: Annotated[str, typer.Option(help="With sizes: gpt2, llama or bert.")] = "llama",
    layers: Annotated[int | None, typer.Option(help="Layers, n.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", "-H", help="Hidden size, H.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", "-N", help="Query heads, N.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads, K; N if not given.")] = None,
    head_size: Annotated[int | None, typer.Option(help="Head size, d; H/N if not given.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Inner width of the MLP, F; 4·H if not given.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Vocabulary, V.")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="The head's matrix is the embedding.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate what a model needs: each term with its formula, the total, and what fits."""
    with one_line_errors(debug):
        memory = None if device_memory is None else formulas.memory_nbytes(device_memory)
        sizes = {
            "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
            "head_size": head_size, "intermediate": intermediate, "vocabulary": vocabulary,
        }  # fmt: skip
        _require_fitting(context, model, inference=inference)
        if model is not None and _is_program(model):
            found = _traced(model, optimizer, update, inference=inference)
            _print(found, {}, memory, as_json=as_json)
            return
        architecture = _architecture(model, family, sizes, tied=tied)
        checkpoint = _checkpoint(model, weights) if inference else None

        def made(batch: int, length: int | None) -> Estimate:
            if inference:
                return formulas.inference(
                    architecture,
                    batch=batch,
                    length=length,
                    new_tokens=new_tokens,
                    precision=precision or _PRECISION[architecture.dtype],
                    attention=attention,
                    logits=logits,
                    weight_nbytes=None if checkpoint is None else checkpoint.nbytes,
                    weight_source="" if checkpoint is None else checkpoint.formula,
                    device=device,
                )
            return formulas.training(
                architecture,
                batch=batch,
                length=length,
                precision=precision or "mixed",
                optimizer=optimizer,
                update=update,
                attention=attention,
                zero=zero,
                gpus=gpus,
                live_parameters=live_parameters,
                logits_held=not drop_logits,
                dropout=not no_dropout,
                device=device,
            )

        found = made(batch, length)
        limits = {} if memory is None else _limits(architecture, made, found, memory, new_tokens)
        _print(found, limits, memory, as_json=as_json)


def _is_program(model: str) -> bool:
    return ".py:" in model


def _require_fitting(context: typer.Context, model: str | None, *, inference: bool) -> None:
    """Refuse options that would change nothing, rather than ignore them."""
    given = {
        parameter.name or "": parameter.opts[0]
        for parameter in context.command.params
        if getattr(context.get_parameter_source(parameter.name or ""), "name", "") == "COMMANDLINE"
    }

    def refuse(names: Iterable[str], reason: str) -> None:
        wrong = [option for name, option in given.items() if name in names]
        if wrong:
            raise CallError(f"{', '.join(wrong)}: {reason}")

    if model is not None and _is_program(model):
        reason = f"a traced program has its own sizes, batch, precision and device; leave it out, or set it in {model}"
        refuse(given.keys() - _OF_PROGRAM, reason)
    elif model is not None:
        refuse(_OF_SIZES, f"{model} has its own sizes; leave it out, or name no model")
    if inference:
        refuse(_OF_TRAINING, "it is of training only; leave it out, or leave out --inference")
    else:
        refuse(_OF_INFERENCE, "it is of inference only; leave it out, or add --inference")


def _architecture(model: str | None, family: str, sizes: dict[str, int | None], *, tied: bool) -> Architecture:
    """The model named, or the one the sizes describe."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if model is not None:
        path = Path(model)
        if path.suffix == ".json" or path.is_dir() or len(path.parts) > 1:
            return formulas.read_config(path)
        return formulas.preset(model)
    missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocabulary") if name not in given]
    if missing:
        lacking = f" (missing: {', '.join(missing)})" if given else ""
        raise CallError(f"name a preset, a config.json or FILE.py:FACTORY, or give {_SIZES}{lacking}")
    try:
        kind = Family(family)
    except ValueError:
        raise CallError(f"--family {family}: it must be one of {', '.join(Family)}") from None
    size, count = size_of("hidden", given["hidden"]), size_of("heads", given["heads"])
    if "head_size" not in given and size % count:
        raise CallError(f"--heads {count}: they do not divide --hidden {size}; give --head-size")
    learned = 0 if kind is Family.LLAMA else 1024
    return Architecture(
        name="sizes given",
        family=kind,
        layers=given["layers"],
        hidden=size,
        heads=count,
        kv_heads=given.get("kv_heads", count),
        head_size=given.get("head_size", size // count),
        intermediate=given.get("intermediate", 4 * size),
        vocabulary=given["vocabulary"],
        positions=learned,
        longest=learned or None,
        tied=tied,
    )


def _checkpoint(model: str | None, weights: Path | None) -> formulas.Checkpoint | None:
    """The checkpoint named, or the one that lies beside the config.json."""
    if weights is not None:
        return formulas.read_checkpoint(weights)
    if model is None:
        return None
    place = Path(model) if Path(model).is_dir() else Path(model).parent
    if Path(model).exists() and any((place / name).is_file() for name in _FILES):
        return formulas.read_checkpoint(place)
    return None


def _traced(target: str, optimizer: str, update: str, *, inference: bool) -> Estimate:
    """Trace and plan ``FILE.py:FACTORY``; the only path that needs torch."""
    import sys

    with stopped_at_once():
        from planner.pipeline import plan
        from planner.trace import trace
        from planner.trace.eager import eager_memory
        from runtime.cli.plan_module import load_factory

    mode = "forward" if inference else "joint"
    with redirect_stdout(sys.stderr):
        module, inputs, loss = load_factory(target)
        graph = trace(module, inputs, loss=loss, mode=mode)
        eager = eager_memory(module, inputs, loss=loss, mode=mode)
    return formulas.traced(target, plan(graph), eager, optimizer=optimizer, update=update)


def _limits(
    model: Architecture,
    made: Callable[[int, int | None], Estimate],
    found: Estimate,
    memory: int,
    new_tokens: int,
) -> dict[str, int]:
    """The largest batch at this length, and the longest sequence at this batch."""
    settings = dict(found.settings)
    batch, length = int(settings["batch"]), int(settings["length"])
    longest = model.positions or model.longest
    most = 2**24 if longest is None else max(longest - new_tokens, 1)
    return {
        "largest_batch": formulas.largest(lambda number: made(number, length), memory),
        "longest_length": formulas.largest(lambda number: made(batch, number), memory, most=most),
    }


def _print(found: Estimate, limits: dict[str, int], memory: int | None, *, as_json: bool) -> None:
    if as_json:
        fields = found.as_json()
        if memory is not None:
            fields |= {"device_memory_bytes": memory, "fits_device": found.total_nbytes <= memory, **limits}
        typer.echo(json.dumps(fields, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    settings = ", ".join(f"{name} {value}" for name, value in found.settings)
    console.print(f"[bold]{found.kind} of {found.subject}[/bold], {found.parameters:,} parameters", markup=True)
    console.print(settings)
    console.print(_table(f"at its peak: {found.peak.name}", found.peak))
    _print_moments(console, found)
    for title, terms in (("published bytes per parameter", found.published), ("fused update", found.own_update)):
        for term in terms:
            console.print(f"{title}: {term.name}, {term.formula} = {size_text(term.nbytes)}", markup=False)
    console.print("not covered: " + "; ".join(found.not_covered), markup=False)
    names = "; ".join(f"{gpu.name} ({gpu.nbytes // 2**30} GiB)" for gpu in found.fits)
    console.print(f"fits: {names or 'none of the common GPUs'}", markup=False)
    if memory is not None:
        verdict = "fits" if found.total_nbytes <= memory else "does not fit"
        console.print(f"{verdict} in {size_text(memory)}", markup=False)
    for name, value in limits.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)


def _table(title: str, phase: Phase) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("term", style="bold")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("formula")
    for term in phase.terms:
        table.add_row(term.name, size_text(term.nbytes), term.formula)
    table.add_row("total", size_text(phase.total_nbytes), "")
    return table


def _print_moments(console: Any, found: Estimate) -> None:
    """The totals of the other moments, and of eager's where a program was traced."""
    for phase in found.phases:
        if phase is not found.peak:
            console.print(f"{phase.name}: {size_text(phase.total_nbytes)}", markup=False)
    for phase in found.eager:
        console.print(f"eager PyTorch, {phase.name}: {size_text(phase.total_nbytes)}", markup=False)
