"""Run a module on fake tensors under ``make_fx`` and keep the torch.fx graph, forward and backward in one.

The graph is not functionalised: in-place operators stay, and fake storages tell which tensors alias, so lowering
needs no rule for any single view operator.
"""

from __future__ import annotations

import linecache
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from planner.errors import TraceError
from planner.trace.fused import attention_as
from planner.trace.origins import Origins

_TORCH_ROOT = str(Path(torch.__file__).parent)
#: This package, and the module that puts a user's model and loss together.
_OWN = (str(Path(__file__).parent), str(Path(__file__).parents[2] / "runtime" / "training.py"))


@dataclass(frozen=True, slots=True)
class Captured:
    """A traced step as torch.fx.

    Attributes:
        module: the fx graph; placeholders are ``states``, then ``inputs``, then the incoming gradients.
        mode: as `planner.trace.trace`.
        state_names, input_names, grad_output_names: of the placeholders.
        parameter_names: those of the states that are parameters.
        gradient_names: of the gradients the graph returns, in order.
        output_names: of the tensors the module returns, flattened.
        backward_starts_after: name of the last fx node of the forward pass, or ``None``.
        bindings: the live tensors behind the states.
        rebuild: puts flattened outputs back into the module's structure, beside what it returned that is no tensor.
    """

    module: torch.fx.GraphModule
    mode: str
    state_names: tuple[str, ...]
    input_names: tuple[str, ...]
    grad_output_names: tuple[str, ...]
    parameter_names: frozenset[str]
    gradient_names: tuple[str, ...]
    output_names: tuple[str, ...]
    backward_starts_after: str | None
    bindings: Mapping[str, torch.Tensor]
    rebuild: Callable[[list[object]], object]


@dataclass(slots=True)
class _Found:
    """What the traced function notes on its way."""

    backward_starts_after: str | None = None
    outputs_spec: pytree.TreeSpec | None = None
    grad_output_names: list[str] = field(default_factory=list)
    output_count: int = 0
    plain: dict[int, object] = field(default_factory=dict)


def capture(
    module: Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Any] | None,
    wrt: Sequence[str] | None,
    mode: str,
    attention: str = "math",
) -> Captured:
    """Trace; arguments as `planner.trace.trace`."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live_parameters, live_buffers = _states(module)
    live = {**live_parameters, **live_buffers}
    states = {name: _as_fake(fake, tensor, name in live_parameters) for name, tensor in live.items()}
    leaves, spec, input_names = _flatten_inputs(example_inputs)
    inputs = {
        name: _as_fake(fake, leaf, leaf.requires_grad)
        for name, leaf in zip(input_names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    targets = _differentiated(states, inputs, wrt, mode)

    found = _Found()
    origins = Origins(module)

    # `_user_frames` knows it by its name.
    def forward(states: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> Any:
        filled = [inputs.get(name, leaf) for name, leaf in zip(input_names, leaves, strict=True)]
        arguments, keywords = pytree.tree_unflatten(filled, spec)
        if isinstance(module, torch.nn.Module):
            result = _functional(module, states, tuple(arguments), keywords)
        else:
            result = module(*arguments, **keywords)
        return result if loss is None else loss(result)

    def program(
        states: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], grad_outputs: list[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        _keep_user_frames()
        outputs, found.outputs_spec = pytree.tree_flatten(forward(states, inputs))
        _require_plain(outputs)
        found.output_count = len(outputs)
        found.plain = {k: item for k, item in enumerate(outputs) if not isinstance(item, torch.Tensor)}
        if mode == "forward":
            origins.finish()
            return outputs, []
        found.backward_starts_after = _last_node_name()
        differentiable = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
        if not differentiable:
            raise TraceError("the output", "it does not depend on anything that requires a gradient", _NO_GRADIENT)
        if loss is not None and (len(outputs) != 1 or differentiable[0].numel() != 1):
            raise TraceError("the loss", "it is not one scalar tensor", "return a scalar from `loss`")
        everything = {**states, **{name: inputs[name] for name in inputs}}
        origins.backward(differentiable)
        gradients = torch.autograd.grad(
            differentiable,
            [everything[name] for name in targets],
            grad_outputs=None if loss is not None else grad_outputs,
            allow_unused=True,
        )
        origins.finish()
        return outputs, list(gradients)

    # Without oneDNN, recurrent layers are traced as the products they consist of.
    routed = attention_as() if attention == "fused" else nullcontext()
    with fake, sdpa_kernel(SDPBackend.MATH), _without_onednn(), _refusals(), routed:
        grad_outputs: list[torch.Tensor] = []
        if mode != "forward" and loss is None:
            grad_outputs, found.grad_output_names = _grad_outputs(forward, states, inputs)
        with origins.noted():
            traced = make_fx(program, tracing_mode="real", record_stack_traces=True)(states, inputs, grad_outputs)

    spec_of_outputs = found.outputs_spec
    if spec_of_outputs is None:
        raise TraceError("the module", "it was never called", "report this as a bug")
    return Captured(
        module=traced,
        mode=mode,
        state_names=tuple(states),
        input_names=tuple(inputs),
        grad_output_names=tuple(found.grad_output_names),
        parameter_names=frozenset(live_parameters),
        gradient_names=tuple(targets) if mode != "forward" else (),
        output_names=tuple(f"output.{index}" for index in range(found.output_count)),
        backward_starts_after=found.backward_starts_after,
        bindings={name: tensor for name, tensor in live.items() if tensor.device.type != "meta"},
        rebuild=lambda flat: pytree.tree_unflatten(
            [found.plain.get(index, item) for index, item in enumerate(flat)], spec_of_outputs
        ),
    )


CONTROL_FLOW = "it is control flow, whose path or number of turns only the data decide"
CONTROL_FLOW_REMEDY = "choose with torch.where, write a loop of fixed length in Python, or run it outside the module"
_NO_GRADIENT = 'call requires_grad_() on an input or parameter, or trace with mode="forward"'


#: What a module may return beside tensors, None and numbers: what torch.fx keeps as it is.
_PLAIN = (torch.Tensor, bool, int, float, complex, str, type(None), type(...), range, slice, Enum)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _require_plain(outputs: Sequence[object]) -> None:
    """Refuse outputs that hold tensors where nobody finds them, such as the cache of a Hugging Face model.

    Raises:
        TraceError: one is an object that is none of those torch.fx keeps.
    """
    for item in outputs:
        if not isinstance(item, (*_PLAIN, *_PLAIN_OF_TORCH)):
            raise TraceError(
                "the output",
                f"it holds a {type(item).__name__}, which cannot be taken apart into tensors",
                "return tensors in tuples, lists or dicts (of a Hugging Face model: pass use_cache=False)",
            )


def _functional(
    module: torch.nn.Module, states: dict[str, torch.Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call a module on other parameters and buffers; a buffer it assigns anew counts as changed in place.

    Raises:
        TraceError: it assigns a tensor to a plain attribute, which then would hold a fake one.
    """
    attributes = [(name, item, dict(vars(item))) for name, item in module.named_modules()]
    with _reparametrize_module(module, states, tie_weights=True):
        result = module(*arguments, **keywords)
        for name, item in module.named_buffers():
            before = states.get(name)
            if before is not None and item is not before:
                if (item.shape, item.dtype) != (before.shape, before.dtype):
                    raise TraceError(
                        f"buffer {name}", "it is assigned another shape or dtype", "keep its shape and dtype"
                    )
                before.copy_(item)
                _restore_buffer(module, name, before)
    for name, item, kept in attributes:
        for key, value in dict(vars(item)).items():
            if isinstance(value, torch.Tensor) and value is not kept.get(key):
                if key in kept:
                    setattr(item, key, kept[key])
                else:
                    delattr(item, key)
                where = f"{name}.{key}" if name else key
                raise TraceError(
                    f"attribute {where}",
                    "the module assigns a tensor to it",
                    "register it as a buffer (register_buffer)",
                )
    return result


def _restore_buffer(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    module.get_submodule(owner)._buffers[key] = value


def _states(module: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if not isinstance(module, torch.nn.Module):
        return {}, {}
    return dict(module.named_parameters()), dict(module.named_buffers())


def _flatten_inputs(
    example_inputs: Sequence[Any] | Mapping[str, Any],
) -> tuple[list[Any], pytree.TreeSpec, tuple[str, ...]]:
    """Leaves, structure of ``(args, kwargs)``, and a name for every leaf (tensors are numbered among themselves)."""
    if isinstance(example_inputs, Mapping):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(example_inputs))
    elif isinstance(example_inputs, (tuple, list)):
        arguments = (tuple(example_inputs), {})
    else:
        raise TraceError(
            "the example inputs",
            f"they are a {type(example_inputs).__name__}",
            "pass a tuple of positional inputs or a dict of keyword inputs",
        )
    with_paths, spec = pytree.tree_flatten_with_path(arguments)
    names: list[str] = []
    for path, leaf in with_paths:
        if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
            raise TraceError("an input", f"its layout is {leaf.layout}", "pass a dense (strided) tensor")
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]]
        names.append("input." + ".".join(keys))
    return [leaf for _, leaf in with_paths], spec, tuple(names)


def _as_fake(fake: FakeTensorMode, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A fake twin; a meta tensor becomes one on the CPU, so that a laptop plans what only a large GPU could run."""
    wanted = requires_grad and tensor.requires_grad
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is not fake:
        twin = _fresh_fake(fake, tensor, tensor.fake_device)
    elif tensor.device.type == "meta":
        twin = _fresh_fake(fake, tensor, torch.device("cpu"))
    else:
        twin = fake.from_tensor(tensor.detach())
    return twin.detach().requires_grad_(wanted)


def _fresh_fake(fake: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _differentiated(
    states: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], wrt: Sequence[str] | None, mode: str
) -> list[str]:
    everything = {**states, **inputs}
    if mode == "forward":
        return []
    if isinstance(wrt, str):
        raise TraceError(f"wrt={wrt!r}", "it is one string", f"write wrt=[{wrt!r}]")
    if wrt is not None:
        if not wrt or len(set(wrt)) != len(wrt):
            raise TraceError(f"wrt={list(wrt)!r}", "it is empty or names something twice", "name each target once")
        for name in wrt:
            if name not in everything:
                known = ", ".join(list(everything)[:8])
                raise TraceError(f"wrt name {name!r}", "there is no such parameter or input", f"known: {known}, …")
            if not everything[name].requires_grad:
                everything[name].requires_grad_(True)
        return list(wrt)
    targets = [name for name, tensor in everything.items() if tensor.requires_grad]
    if not targets:
        raise TraceError("the module", "no parameter or input requires a gradient", _NO_GRADIENT)
    return targets


def _grad_outputs(
    call: Callable[..., Any], states: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[str]]:
    """One incoming gradient for every differentiable output, shaped by a dry run on fakes of their own."""
    scratch: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if key not in scratch:
            scratch[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return scratch[key]

    outputs = pytree.tree_leaves(
        call({name: copy(t) for name, t in states.items()}, {name: copy(t) for name, t in inputs.items()})
    )
    gradients: list[torch.Tensor] = []
    names: list[str] = []
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            gradients.append(torch.empty(output.shape, dtype=output.dtype, device=output.device))
            names.append(f"grad_output.{index}")
    return gradients, names


def _keep_user_frames() -> None:
    """Record the user's own frames with every operation; torch.fx would keep only those of methods called `forward`."""
    mode = get_proxy_mode()
    if mode is not None:
        mode.tracer.__dict__["_filter_traceback_frames"] = _user_frames  # of this tracer only


def _user_frames(frames: traceback.StackSummary) -> traceback.StackSummary:
    """The frames below this module's own `forward`; none in the backward, whose lines are those of its forward."""
    first = next((place for place, frame in enumerate(frames) if frame.filename == __file__), len(frames))
    inside = [frame for frame in frames[first:] if is_user_file(frame.filename)]
    if not any(frame.filename == __file__ and frame.name == "forward" for frame in frames[first:]):
        inside = []
    return traceback.StackSummary.from_list(inside)


def _last_node_name() -> str | None:
    mode = get_proxy_mode()
    if mode is None:
        return None
    name = None
    for node in mode.tracer.graph.nodes:
        name = node.name
    return name


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what PyTorch raises while tracing into a `TraceError` that names the operation and the source line."""
    # Fake tensors log a traceback for every error that is raised anyway.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        source = _user_frame(traceback.extract_tb(error.__traceback__))
        kind = type(error).__name__
        flow = _control_flow(error.__traceback__)
        if flow:
            raise TraceError(f"torch.{flow}", CONTROL_FLOW, CONTROL_FLOW_REMEDY, source) from error
        operation = str(getattr(error, "func", "") or "the module")
        if kind in {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}:
            raise TraceError(
                operation, "its result depends on data, not only on shapes", "compute it outside the module", source
            ) from error
        if kind == "UnsupportedOperatorException":
            raise TraceError(operation, "it has no shape function", "register a fake implementation", source) from error
        first = str(error).strip().splitlines()
        cause = first[0] if first else kind
        raise TraceError(operation, f"{kind}: {cause}", "check that it runs eagerly on these inputs", source) from error
    finally:
        logger.setLevel(level)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch oneDNN off, its other flags untouched (setting those warns on a CPU build)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _user_frame(frames: traceback.StackSummary) -> str:
    """``file.py:12`` of the innermost frame outside PyTorch and this package."""
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def _control_flow(frames: TracebackType | None) -> str:
    """The control-flow operator (`while_loop`, `scan`, …) in which an error was raised, or ``""``."""
    inside = [Path(frame.filename) for frame in traceback.extract_tb(frames)]
    return next((file.stem for file in inside if file.parent.name == "_higher_order_ops"), "")


def is_user_file(filename: str) -> bool:
    """Whether a stack frame's file is the user's own."""
    if filename.startswith("<"):
        return not filename.startswith("<eval_with_key>") and bool(linecache.getlines(filename))
    return not filename.startswith((_TORCH_ROOT, *_OWN))
