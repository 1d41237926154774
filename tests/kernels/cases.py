"""One example call for every operator the facts name: overload, arguments drawn for a dtype, and what it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.operators import CROSS_ENTROPY_BACKWARD, DROPOUT, POINTWISE, RMS_NORM, RMS_NORM_BACKWARD

ROWS, COLUMNS = 7, 13


@dataclass(frozen=True)
class Call:
    """An example: ``operator(*arguments(dtype), **keywords)``; ``mutated`` is the argument it works on in place."""

    operator: str
    arguments: Callable[[torch.dtype], list[Any]]
    keywords: dict[str, Any] = field(default_factory=dict)
    mutated: int | None = None
    halves: bool = True


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(dtype: torch.dtype, seed: int = 0, *, positive: bool = False) -> torch.Tensor:
    values = _numbers(seed, ROWS, COLUMNS)
    return ((values.abs() + 0.1) if positive else values).to(dtype)


def mask(seed: int = 5) -> torch.Tensor:
    return _numbers(seed, ROWS, COLUMNS) > 0


def integers(high: int, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _unary(name: str, *, positive: bool = False) -> Call:
    return Call(f"aten.{name}.default", lambda dtype: [matrix(dtype, positive=positive)])


def _binary(name: str, overload: str = "Tensor", *numbers: float) -> Call:
    return Call(
        f"aten.{name}.{overload}",
        lambda dtype: [matrix(dtype), *(numbers or (matrix(dtype, 1, positive=True),))],
    )


_UNARY = """
abs ceil cos erf exp exp2 expm1 floor neg reciprocal relu round sigmoid sign silu sin softplus square tan tanh trunc
sgn sinh cosh atan asinh erfc mish elu gelu hardsigmoid hardswish hardtanh leaky_relu
""".split()
_POSITIVE = "log log1p log2 rsqrt sqrt".split()
_WITHIN_ONE = "asin acos atanh".split()
_ABOVE_ONE = ["acosh"]
_COMPARED = "eq ge gt le lt ne".split()

ELEMENTWISE: list[Call] = [
    *(_unary(name) for name in _UNARY),
    *(_unary(name, positive=True) for name in _POSITIVE),
    *(Call(f"aten.{name}.default", lambda dtype: [matrix(dtype).tanh() * 0.9]) for name in _WITHIN_ONE),
    *(Call(f"aten.{name}.default", lambda dtype: [matrix(dtype, positive=True) + 1]) for name in _ABOVE_ONE),
    *(_binary(name) for name in ("fmod", "xlogy", "add", "sub", "mul", "div", "remainder", *_COMPARED)),
    *(_binary(name, "Scalar", 0.75) for name in ("add", "sub", "mul", "div", "remainder", "rsub", *_COMPARED)),
    *(
        _binary(name, "default")
        for name in (
            "maximum",
            "minimum",
            "floor_divide",
            "atan2",
            "logaddexp",
            "fmax",
            "fmin",
            "hypot",
            "gelu_backward",
            "silu_backward",
        )
    ),
    _binary("sigmoid_backward", "default"),
    _binary("tanh_backward", "default"),
    _binary("rsub"),
    _binary("clamp_min", "default", 0.25),
    _binary("clamp_max", "default", 0.25),
    _binary("clamp", "default", -0.5, 0.5),
    _binary("pow", "Tensor_Scalar", 2),
    _binary("pow", "Tensor_Scalar", 3.0),
    Call("aten.pow.Tensor_Tensor", lambda dtype: [matrix(dtype, positive=True), matrix(dtype, 1)]),
    Call("aten.pow.Scalar", lambda dtype: [1.5, matrix(dtype)]),
    Call("aten.gelu.default", lambda dtype: [matrix(dtype)], {"approximate": "tanh"}),
    Call("aten.gelu_backward.default", lambda dtype: [matrix(dtype), matrix(dtype, 1)], {"approximate": "tanh"}),
    Call("aten.threshold_backward.default", lambda dtype: [matrix(dtype), matrix(dtype, 1), 0]),
    Call("aten.leaky_relu_backward.default", lambda dtype: [matrix(dtype), matrix(dtype, 1), 0.1, False]),
    Call("aten.elu_backward.default", lambda dtype: [matrix(dtype), 1.0, 1.0, 1.0, False, matrix(dtype, 1)]),
    Call("aten.softplus_backward.default", lambda dtype: [matrix(dtype), matrix(dtype, 1), 1, 20]),
    Call("aten.hardtanh_backward.default", lambda dtype: [matrix(dtype), matrix(dtype, 1), -1, 1]),
    Call("aten.lerp.Scalar", lambda dtype: [matrix(dtype), matrix(dtype, 1), 0.3]),
    Call("aten.addcmul.default", lambda dtype: [matrix(dtype), matrix(dtype, 1), matrix(dtype, 2)], {"value": 0.5}),
    Call(
        "aten.addcdiv.default",
        lambda dtype: [matrix(dtype), matrix(dtype, 1), matrix(dtype, 2, positive=True)],
        {"value": 0.5},
    ),
    Call("aten.where.self", lambda dtype: [mask(), matrix(dtype), matrix(dtype, 1)]),
    Call("aten.masked_fill.Scalar", lambda dtype: [matrix(dtype), mask(), -3.5]),
    Call("aten.masked_fill.Scalar", lambda dtype: [matrix(dtype), mask()[:, :1].contiguous(), 0]),
    Call("aten.masked_fill.Scalar", lambda dtype: [matrix(dtype), mask()[:1], float("-inf")]),
    Call("aten.masked_fill.Tensor", lambda dtype: [matrix(dtype), mask(), torch.tensor(2.5, dtype=dtype)]),
    Call("aten.add_.Tensor", lambda dtype: [matrix(dtype), matrix(dtype, 1)], {"alpha": 0.5}, mutated=0),
    Call("aten.mul_.Scalar", lambda dtype: [matrix(dtype), 1.5], mutated=0),
    Call("aten.relu_.default", lambda dtype: [matrix(dtype)], mutated=0),
    Call("aten.masked_fill_.Scalar", lambda dtype: [matrix(dtype), mask(), 0], mutated=0),
    Call("aten.conj_physical.default", lambda _: [torch.complex(_numbers(0, 7, 13), _numbers(1, 7, 13))], halves=False),
    *(
        Call(f"aten.{name}.default", lambda _: [mask(), mask(6)], halves=False)
        for name in ("logical_and", "logical_or", "logical_xor")
    ),
    Call("aten.logical_not.default", lambda _: [mask()], halves=False),
    *(
        Call(f"aten.{name}.Tensor", lambda _: [integers(9, 7, 13), integers(9, 7, 13, seed=2)], halves=False)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "add", "eq")
    ),
    Call("aten.bitwise_not.default", lambda _: [mask()], halves=False),
    *(
        Call(f"aten.{name}.Scalar", lambda _: [integers(9, 7, 13), 5], halves=False)
        for name in ("add", "ne", "remainder")
    ),
    Call(
        "aten.mse_loss_backward.default",
        lambda dtype: [torch.ones((), dtype=dtype), matrix(dtype), matrix(dtype, 1), 1],
    ),
]


def _softmaxed(dtype: torch.dtype) -> torch.Tensor:
    return matrix(dtype, 3).float().softmax(-1).to(dtype)


def _normal(dtype: torch.dtype) -> list[Any]:
    return [
        (matrix(dtype) * 2 + 1).to(dtype),
        [COLUMNS],
        _numbers(8, COLUMNS).to(dtype),
        _numbers(9, COLUMNS).to(dtype),
        1e-5,
    ]


def _normal_backward(dtype: torch.dtype) -> list[Any]:
    x, shape, weight, bias, eps = _normal(dtype)
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    return [matrix(dtype, 4), x, shape, mean, rstd, weight, bias, [True, True, True]]


def _image(seed: int = 0) -> torch.Tensor:
    return _numbers(seed, 3, 5, 6, 6)


def _batch(training: bool) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [
        _image().to(dtype),
        _numbers(1, 5).to(dtype),
        _numbers(2, 5).to(dtype),
        _numbers(3, 5).to(dtype),
        _numbers(4, 5).abs().to(dtype),
        training,
        0.1,
        1e-5,
    ]


def _batch_backward(training: bool) -> Callable[[torch.dtype], list[Any]]:
    def arguments(dtype: torch.dtype) -> list[Any]:
        x, weight, bias, mean, var, _, momentum, eps = _batch(training)(dtype)
        _, save_mean, save_invstd = torch.native_batch_norm(
            x, weight, bias, mean.clone(), var.clone(), training, momentum, eps
        )
        if not training:
            save_mean, save_invstd = mean, (var + eps).rsqrt()
        return [_image(9).to(dtype), x, weight, mean, var, save_mean, save_invstd, training, eps, [True, True, True]]

    return arguments


def _pooled(dtype: torch.dtype) -> list[Any]:
    out, places = torch.ops.aten.max_pool2d_with_indices(_image().to(dtype), [3, 3], [2, 2], [1, 1])
    return [out, _image().to(dtype), [3, 3], [2, 2], [1, 1], [1, 1], False, places]


def _targets() -> torch.Tensor:
    targets = integers(COLUMNS, ROWS)
    targets[2] = -100
    return targets


OTHERS: list[Call] = [
    Call("aten.sum.dim_IntList", lambda dtype: [matrix(dtype), [0], True]),
    Call("aten.sum.dim_IntList", lambda dtype: [matrix(dtype), [-1], False]),
    Call("aten.sum.default", lambda dtype: [matrix(dtype)]),
    Call("aten.sum.default", lambda dtype: [_numbers(0, 300, 512).to(dtype)]),
    Call("aten.sum.dim_IntList", lambda dtype: [_numbers(0, 66000, 1).to(dtype), [0], True]),
    Call("aten.mean.dim", lambda dtype: [matrix(dtype), [-1], True]),
    Call("aten.mean.default", lambda dtype: [_numbers(0, 300, 512).to(dtype)]),
    Call("aten.amax.default", lambda dtype: [matrix(dtype), [-1], True]),
    Call("aten.amin.default", lambda dtype: [matrix(dtype), [0]]),
    Call("aten.max.dim", lambda dtype: [matrix(dtype), 1]),
    Call("aten.min.dim", lambda dtype: [matrix(dtype), 0, True]),
    Call("aten.max.default", lambda dtype: [matrix(dtype)]),
    Call("aten.min.default", lambda dtype: [_numbers(0, 300, 512).to(dtype)]),
    Call("aten.topk.default", lambda dtype: [matrix(dtype), 3]),
    Call("aten.var.correction", lambda dtype: [matrix(dtype), [-1]], {"correction": 1, "keepdim": True}),
    Call("aten.std.correction", lambda dtype: [matrix(dtype), [-1]], {"correction": 0}),
    Call("aten.amax.default", lambda dtype: [_numbers(0, 300, 512).to(dtype), []]),
    Call("aten.argmax.default", lambda dtype: [matrix(dtype), 1]),
    Call("aten.argmin.default", lambda dtype: [matrix(dtype), 1]),
    Call("aten.prod.dim_int", lambda dtype: [matrix(dtype), 1]),
    Call("aten.cumsum.default", lambda dtype: [matrix(dtype), 1]),
    Call("aten.cumsum.default", lambda _: [integers(2, 7, 13), -1], halves=False),
    Call("aten.linalg_vector_norm.default", lambda dtype: [matrix(dtype), 2, [-1]]),
    Call("aten.linalg_vector_norm.default", lambda dtype: [_numbers(0, 300, 512).to(dtype)]),
    Call("aten.linalg_vector_norm.default", lambda dtype: [_numbers(0, 30, 512).to(dtype), 0]),
    Call("aten.addmm.default", lambda dtype: [_numbers(3, 7), matrix(dtype), _numbers(4, 13, 7)], halves=False),
    Call(
        "aten.baddbmm.default",
        lambda _: [_numbers(3, 2, 7, 5), _numbers(1, 2, 7, 6), _numbers(2, 2, 6, 5)],
        halves=False,
    ),
    Call("aten.triu.default", lambda dtype: [matrix(dtype), 1]),
    Call("aten.tril.default", lambda dtype: [matrix(dtype)]),
    Call("aten._softmax.default", lambda dtype: [matrix(dtype), -1, False]),
    Call("aten._softmax.default", lambda dtype: [matrix(dtype), 0, False]),
    Call("aten._log_softmax.default", lambda dtype: [matrix(dtype), 1, False]),
    Call("aten._softmax_backward_data.default", lambda dtype: [matrix(dtype), _softmaxed(dtype), -1, dtype]),
    Call("aten._log_softmax_backward_data.default", lambda dtype: [matrix(dtype), matrix(dtype, 3), 1, dtype]),
    Call("aten.nll_loss_forward.default", lambda dtype: [matrix(dtype), _targets(), None, 1, -100]),
    Call(
        "aten.nll_loss_forward.default", lambda dtype: [matrix(dtype), _targets(), _numbers(1, 13).to(dtype), 2, -100]
    ),
    Call(
        "aten.nll_loss_backward.default",
        lambda dtype: [
            torch.ones((), dtype=dtype),
            matrix(dtype),
            _targets(),
            None,
            1,
            -100,
            torch.tensor(6.0, dtype=dtype),
        ],
    ),
    Call("aten.gather.default", lambda dtype: [matrix(dtype), 1, integers(13, 7, 4)]),
    Call("aten.index.Tensor", lambda dtype: [matrix(dtype), [integers(7, 5), integers(13, 5)]]),
    Call("aten.index_select.default", lambda dtype: [matrix(dtype), 0, integers(7, 11)]),
    Call(
        "aten.index_add_.default",
        lambda dtype: [matrix(dtype), 0, integers(7, 11), _numbers(2, 11, 13).to(dtype)],
        mutated=0,
    ),
    Call(
        "aten.index_copy_.default",
        lambda dtype: [matrix(dtype), 0, torch.tensor([3, 1]), _numbers(2, 2, 13).to(dtype)],
        mutated=0,
    ),
    Call("aten.index_fill_.int_Scalar", lambda dtype: [matrix(dtype), 0, torch.tensor([3, 1]), 2.5], mutated=0),
    Call(
        "aten.index_put_.default",
        lambda dtype: [matrix(dtype), [integers(7, 5)], _numbers(2, 5, 13).to(dtype), False],
        mutated=0,
    ),
    Call(
        "aten.index_put_.default",
        lambda dtype: [matrix(dtype), [integers(7, 5)], _numbers(2, 5, 13).to(dtype), True],
        mutated=0,
    ),
    Call("aten.scatter_.src", lambda dtype: [matrix(dtype), 1, integers(13, 7, 1), matrix(dtype, 1)], mutated=0),
    Call("aten.scatter_.value", lambda dtype: [matrix(dtype), 1, integers(13, 7, 1), 1.5], mutated=0),
    Call(
        "aten.scatter_add_.default", lambda dtype: [matrix(dtype), 1, integers(13, 7, 4), matrix(dtype, 1)], mutated=0
    ),
    Call("aten.native_layer_norm.default", _normal),
    Call("aten.native_layer_norm.default", lambda dtype: [_numbers(0, 70, 2000).to(dtype), [2000], None, None, 1e-5]),
    Call("aten.native_layer_norm_backward.default", _normal_backward),
    Call(
        "aten.native_layer_norm_backward.default",
        lambda dtype: [*_normal_backward(dtype)[:5], None, None, [True, False, False]],
    ),
    Call("aten.native_batch_norm_backward.default", _batch_backward(training=True)),
    Call("aten.native_batch_norm_backward.default", _batch_backward(training=False)),
    Call("aten.max_pool2d_with_indices.default", lambda dtype: [_image().to(dtype), [3, 3], [2, 2], [1, 1]]),
    Call("aten.max_pool2d_with_indices_backward.default", _pooled),
    Call("aten.avg_pool2d.default", lambda dtype: [_image().to(dtype), [2, 2], [2, 2]]),
]

#: Tested on their own, as their results are not what the functional form returns.
ELSEWHERE = frozenset({"native_batch_norm", CROSS_ENTROPY_BACKWARD, DROPOUT, POINTWISE, RMS_NORM, RMS_NORM_BACKWARD})
