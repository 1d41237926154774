"""Mixed precision for an ordinary training loop: a 16-bit model with FP32 islands, loss scaling, the fused update.

`initialize` converts the model's parameters and wires the three together. The rules of the islands hold on every
device, and `runtime.TrainingStep` traces through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from runtime.errors import OptimizerError
from runtime.optimizer.adam import FusedAdam, FusedAdamW
from runtime.optimizer.base import FusedOptimizer
from runtime.optimizer.scaling import LossScaler
from runtime.optimizer.sgd import FusedSGD

PRECISIONS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_HALVES = (torch.float16, torch.bfloat16)


def _functions(names: str, *homes: Any) -> frozenset[Callable[..., Any]]:
    """Every function of that name that one of the homes has."""
    found = (getattr(home, name, None) for name in names.split() for home in homes)
    return frozenset(function for function in found if function is not None)


#: Products: an FP32 operand beside a 16-bit one is rounded to 16 bits.
_PRODUCTS = _functions(
    "matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum", torch, torch.Tensor
) | _functions(
    """linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention""",
    F,
)
#: Operators whose 16-bit operands are converted to FP32, and whose result stays so: `torch.autocast`'s list on a GPU.
_FULL = _functions(
    """acos asin cdist cosh cumprod cumsum dist erfinv exp expm1 log log10 log1p log2 log_softmax logsumexp norm pow
    __pow__ __rpow__ prod reciprocal renorm rsqrt sinh square sum tan""",
    torch,
    torch.Tensor,
) | _functions(
    """binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy
    ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss log_softmax margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss normalize poisson_nll_loss
    smooth_l1_loss soft_margin_loss softplus triplet_margin_loss""",
    F,
)
_FULL |= _functions("norm vector_norm matrix_norm", torch.linalg)
#: Normalisations that ATen's CPU kernels do in FP32 if weight and bias are FP32, beside a 16-bit input.
_NORMS = _functions("layer_norm group_norm batch_norm instance_norm", F)


class Islands(TorchFunctionMode):
    """FP32 where 16 bits do not do, while a model of 16-bit parameters runs.

    - Losses, logarithms, exponentials, powers and sums (`torch.autocast`'s FP32 list on a GPU) get their 16-bit
      operands in FP32, and their results stay FP32.
    - Softmax and the normalisations keep 16-bit operands and results: their kernels compute in FP32. On a CPU
      the normalisations get weight and bias in FP32, so that mean and deviation are kept in FP32 as well.
    - Products get all operands in 16 bits if one of them is.

    Unlike autocast's, the rules are the same on every device, and softmax and normalisations leave 16-bit tensors
    behind: what waits for the backward is half as large.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Convert operands as the rules say, and call the function."""
        named = kwargs or {}
        if func in _PRODUCTS and named.get("out") is None:
            if any(tensor.dtype in _HALVES for tensor in _tensors(args, named)):
                args, named = converted(args, torch.float32, self.dtype), converted(named, torch.float32, self.dtype)
        elif func in _FULL and named.get("out") is None:
            args, named = converted(args, self.dtype, torch.float32), converted(named, self.dtype, torch.float32)
        elif func in _NORMS and args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
            args = (args[0], *converted(args[1:], self.dtype, torch.float32))
            named = {
                key: value if key == "input" else converted(value, self.dtype, torch.float32)
                for key, value in named.items()
            }
        return func(*args, **named)


def _tensors(args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]


def converted(items: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """The same structure, its tensors of dtype ``old`` as ``new``."""
    return pytree.tree_map(
        lambda item: item.to(new) if isinstance(item, torch.Tensor) and item.dtype is old else item, items
    )


def _modes() -> list[TorchFunctionMode]:
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def _rules_on() -> bool:
    return any(isinstance(mode, Islands) for mode in _modes())


def _leave() -> None:
    """The rules off, if they are what was put on last: a hook before ours may have failed, and they are not."""
    modes = _modes()
    if modes and isinstance(modes[-1], Islands):
        modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Enter:
    """Before the model's forward: FP32 inputs to 16 bits, and the islands' rules on."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        args, kwargs = converted(args, torch.float32, self.dtype), converted(kwargs, torch.float32, self.dtype)
        Islands(self.dtype).__enter__()  # type: ignore[no-untyped-call]
        return args, kwargs


class _Leave:
    """After it, also if it failed: the rules off, and 16-bit outputs to FP32, so that any loss is computed there."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        _leave()
        return converted(outputs, self.dtype, torch.float32)


class _Again:
    """The rules for a module that runs again in a backward pass, as `torch.utils.checkpoint` has it do."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._depth = 0

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before the module's forward: the rules on, if this is a backward pass and they are off."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return
        if not self._depth and _rules_on():
            return
        self._depth += 1
        if self._depth == 1:
            Islands(self.dtype).__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _module: nn.Module, _args: Any, _outputs: Any) -> None:
        """After it, also if it failed."""
        if torch.compiler.is_compiling() or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            _leave()


class Amp:
    """The scaled backward and step of one model and optimizer.

    ``amp.backward(loss); stepped = amp.step(); optimizer.zero_grad()`` once for each training step. Several backwards
    may come before one step: gradients of micro-batches add up at one scale. They stay scaled; to look at them or clip
    them between the two, call ``amp.scaler.unscale_(optimizer)``.

    Attributes:
        optimizer: what `step` steps.
        scaler: the loss scale; disabled unless the precision is ``"fp16"``.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        hooks: what was registered on the model and its modules.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler, precision: str) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.precision = precision
        self.hooks: list[RemovableHandle] = []

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, for a backward of the caller's own."""
        return self.scaler.scale(loss)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backward of the scaled loss; ``options`` as for `torch.Tensor.backward`. Gradients stay scaled."""
        self.scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]

    def step(self) -> bool:
        """Unscale, check, clip and update in one pass, then adapt the scale; false if the step changed nothing."""
        done = self.scaler.step(self.optimizer)
        self.scaler.update()
        return done and not (isinstance(self.optimizer, FusedOptimizer) and self.optimizer.last_step_skipped)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; model and optimizer have theirs."""
        return {"precision": self.precision, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over.

        Raises:
            OptimizerError: it is of another precision.
        """
        if state.get("precision", self.precision) != self.precision:
            raise OptimizerError(
                f"the saved state is of precision {state['precision']!r}, this one of {self.precision!r}: "
                "initialize with the precision it was saved with"
            )
        self.scaler.load_state_dict(state["scaler"])


class Initialized(NamedTuple):
    """What `initialize` returns."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    amp: Amp


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: str = "fp16",
    *,
    scaler: LossScaler | None = None,
    master: str = "split",
) -> Initialized:
    """Mixed precision in one line: convert the model, wire loss scaling to the fused update.

    ``model, optimizer, amp = initialize(model, optimizer, "fp16")``, then in the loop ``amp.backward(loss)``,
    ``stepped = amp.step()``, ``optimizer.zero_grad()``.

    Args:
        model: its FP32 parameters become 16-bit, in place; buffers keep their dtype. Its forward takes FP32 or 16-bit
            inputs, runs by the rules of `Islands`, and returns FP32.
        optimizer: a fused optimizer, over the model's parameters; their FP32 values move into its masters exactly.
            A `torch.optim` AdamW, Adam or SGD is replaced by the fused one of the same settings and state: build
            schedulers on the one that is returned.
        precision: ``"fp16"`` (loss scaling), ``"bf16"`` (none), or ``"fp32"``, which converts nothing.
        scaler: by default a `LossScaler` for ``"fp16"``, and one that is off otherwise.
        master: of a `torch.optim` optimizer's replacement, as `runtime.optimizer.Precision`.

    Returns:
        The same model, the fused optimizer, and `Amp`, whose ``step()`` says whether the step was taken.

    Raises:
        OptimizerError: an unknown precision, or an optimizer that has no fused form.
    """
    if precision not in PRECISIONS:
        raise OptimizerError(f"precision={precision!r}: choose one of {', '.join(map(repr, PRECISIONS))}")
    dtype = PRECISIONS[precision]
    if scaler is None:
        scaler = LossScaler(enabled=precision == "fp16")
    if dtype is torch.float32:
        return Initialized(model, optimizer, Amp(optimizer, scaler, precision))
    fused = optimizer if isinstance(optimizer, FusedOptimizer) else fused_from(optimizer, master)
    amp = Amp(fused, scaler, precision)
    amp.hooks += _convert(model, fused, dtype)
    return Initialized(model, fused, amp)


def undo(amp: Amp, values: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Take a conversion back: parameters get the values they had, and the model loses its rules.

    A value of ``None`` is the FP32 one that the optimizer keeps.

    The fused optimizer lays its workspaces out anew at its next step.
    """
    for handle in amp.hooks:
        handle.remove()
    optimizer: Any = amp.optimizer
    made: dict[int, torch.Tensor] = {}  # by address: tied parameters stay tied
    with torch.no_grad():
        for parameter, given in values.items():
            place = parameter.data_ptr() or id(parameter)
            value = made.setdefault(place, optimizer.master(parameter)) if given is None else given
            if parameter.dtype is not value.dtype:
                parameter.grad = None
                parameter.data = value


def _convert(model: nn.Module, optimizer: FusedOptimizer, dtype: torch.dtype) -> list[RemovableHandle]:
    """16-bit parameters, and the hooks round the forward, returned; what is done already stays as it is."""
    optimizer.convert(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype is torch.float32:
                parameter.grad = None
                parameter.data = parameter.data.to(dtype)
    if any(isinstance(hook, _Enter) for hook in model._forward_pre_hooks.values()):
        return []
    hooks = [
        model.register_forward_pre_hook(_Enter(dtype), with_kwargs=True),
        model.register_forward_hook(_Leave(dtype), always_call=True),
    ]
    again = _Again(dtype)
    for module in model.modules():
        if module is not model:
            hooks.append(module.register_forward_pre_hook(again.enter))
            hooks.append(module.register_forward_hook(again.leave, always_call=True))
    return hooks


def fused_from(optimizer: torch.optim.Optimizer, master: str = "split") -> FusedOptimizer:
    """The fused optimizer of the same kind, groups, settings and state.

    Raises:
        OptimizerError: there is none.
    """
    kinds: dict[type[torch.optim.Optimizer], type[FusedAdamW | FusedSGD]] = {
        torch.optim.AdamW: FusedAdamW,
        torch.optim.Adam: FusedAdam,
        torch.optim.SGD: FusedSGD,
    }
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} has no fused form, and torch's own keeps no master of 16-bit parameters: "
            "use AdamW, Adam or SGD, or train in fp32"
        )
    fused = kind([dict(group) for group in optimizer.param_groups], master=master)
    if optimizer.state:
        fused.load_state_dict(optimizer.state_dict())
    return fused
