"""Facts about operators: what may overwrite what, which dimensions are batch, what scratch each needs, what allocates.

A fact holds for the kernels of `runtime.kernels`; the tests there check every one of them by execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from planner.flash import ATTENTION_DELTA, FUSED, tiling
from planner.graph import Operation, Tensor, TensorRef
from planner.pointwise import decode, registers

COPY = "arenaplan.copy"
FILL = "arenaplan.fill"
MATMUL = "arenaplan.matmul"
ARANGE = "arenaplan.arange"
POINTWISE = "arenaplan.pointwise"
CROSS_ENTROPY_BACKWARD = "arenaplan.cross_entropy_backward"
#: ``(x, seed, p, scale)`` → x · scale where kept, else 0.
DROPOUT = "arenaplan.dropout"
#: ``(x, shape, weight, eps)`` → x / √(mean x² + eps) · weight over the last dimensions, and one number a row.
RMS_NORM = "arenaplan.rms_norm"
#: ``(∇y, x, shape, rstd, weight)`` → the gradients of x and of the weight.
RMS_NORM_BACKWARD = "arenaplan.rms_norm_backward"
CHECK_GRADIENTS = "arenaplan.check_gradients"
UPDATE = "arenaplan.update"

#: Rows, columns and depth of the float32 tiles a 16-bit product is computed in on a CPU.
HALF_TILE = 512
#: Elements from which ATen reduces to one number in two passes, through memory of its own (its grain size).
TWO_PASS_NUMEL = 32768
#: Elements of one chunk of rows that a normalisation works on at a time; three float32 chunks stay in a core's cache.
CHUNK_NUMEL = 65536

#: Elements of one chunk that a pointwise program works on where its loop is not compiled.
POINTWISE_CHUNK = 16384

#: Parts the rows of a root mean square normalisation fall into at most, each summed in order; of at least so many rows.
RMS_PARTS, RMS_PART_ROWS = 128, 32

#: Buffers of oneDNN's threads in the backward of a convolution, as measured.
CONVOLUTION_THREAD_NBYTES = 2**18

HALF = frozenset({"float16", "bfloat16"})

_RANDOM = (
    "bernoulli",
    "rand",
    "normal",
    "uniform",
    "native_dropout",
    "exponential",
    "multinomial",
    "geometric",
    "cauchy",
    "log_normal",
    "random",
    "poisson",
    "rrelu_with_noise",
)

#: Softmax and its backward, and which argument is the dimension; their first operand may be overwritten.
SOFTMAX_AXIS = MappingProxyType({"aten._softmax.default": 1, "aten._softmax_backward_data.default": 2})


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for an operator's kernel on a CPU, for operands of one dtype.

    Attributes:
        elementwise: each output element depends only on input elements at its own (broadcast) position.
        strided: reads and writes strided views without a copy of its own.
        dense: its operands and results must be contiguous; others are copied before and after, planned.
        overwrites: positions of the arguments that the output may be written onto (all of them if elementwise).
        halves: allocates nothing in 16 bits either; otherwise its result in float32.
        note: how it is called, for the table in the documentation.
    """

    elementwise: bool = False
    strided: bool = False
    dense: bool = False
    overwrites: frozenset[int] = frozenset()
    halves: bool = True
    note: str = "out-form"


_ELEMENTWISE = Facts(elementwise=True, strided=True)
_DENSE_ELEMENTWISE = Facts(elementwise=True, dense=True)
_ROWS = Facts(dense=True, overwrites=frozenset({0}))
_OUT = Facts()
_DENSE = Facts(dense=True)
_OUT_STRIDED = Facts(strided=True)

#: Operators that allocate nothing, by `base_name`; every other ATen operator is called unplanned.
FACTS: Mapping[str, Facts] = MappingProxyType(
    {
        **dict.fromkeys(
            """
            abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
            bitwise_xor ceil clamp clamp_max clamp_min conj_physical cos cosh div elu elu_backward eq erf erfc exp exp2
            expm1 floor floor_divide fmax fmin fmod ge gt hardsigmoid hardswish hardtanh hardtanh_backward hypot le
            leaky_relu leaky_relu_backward lerp log log1p log2 logaddexp logical_and logical_not logical_or logical_xor
            lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu remainder round rsqrt rsub sgn sigmoid
            sigmoid_backward sign silu silu_backward sin sinh softplus softplus_backward sqrt square sub tan tanh
            tanh_backward threshold_backward trunc where xlogy
            """.split(),
            _ELEMENTWISE,
        ),
        # oneDNN's GELU works on dense tensors and reorders others.
        "gelu": _DENSE_ELEMENTWISE,
        "gelu_backward": _DENSE_ELEMENTWISE,
        "sum": _OUT_STRIDED,
        "mean": Facts(strided=True, note="sum, then one division in place"),
        "amax": _OUT_STRIDED,
        "amin": _OUT_STRIDED,
        "max": _OUT,
        "min": _OUT,
        "topk": _OUT,
        "var": _OUT,
        "std": _OUT,
        "argmax": _OUT,
        "argmin": _OUT,
        "prod": _OUT,
        "cumsum": _OUT,
        "linalg_vector_norm": _OUT,
        "addmm": Facts(halves=False),
        "baddbmm": Facts(halves=False),
        "triu": _OUT,
        "tril": _OUT,
        "_softmax": _ROWS,
        "_log_softmax": _ROWS,
        "_softmax_backward_data": _ROWS,
        "_log_softmax_backward_data": _ROWS,
        "nll_loss_forward": _DENSE,
        "nll_loss_backward": _DENSE,
        "mse_loss_backward": Facts(elementwise=True, strided=True),
        "gather": Facts(halves=False),
        "index": _OUT,
        "index_select": _OUT,
        **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_put"), Facts(note="in place")),
        **dict.fromkeys(("scatter", "scatter_add"), Facts(halves=False, note="in place")),
        "native_layer_norm": Facts(dense=True, overwrites=frozenset({0}), note="sums and norms of rows"),
        "native_layer_norm_backward": Facts(dense=True, overwrites=frozenset({0, 1}), note="chunks of rows"),
        "native_batch_norm": Facts(dense=True, overwrites=frozenset({0}), note="channel by channel in float64"),
        "native_batch_norm_backward": Facts(
            dense=True, overwrites=frozenset({0, 1}), note="channel by channel in float64"
        ),
        "max_pool2d_with_indices": _DENSE,
        "max_pool2d_with_indices_backward": _DENSE,
        "avg_pool2d": _DENSE,
        POINTWISE: Facts(elementwise=True, dense=True, note="compiled loop"),
        DROPOUT: Facts(dense=True, overwrites=frozenset({0}), note="mask from counters, by chunks of rows"),
        CROSS_ENTROPY_BACKWARD: Facts(dense=True, overwrites=frozenset({1}), note="softmax less one-hot, by row"),
        RMS_NORM: Facts(dense=True, overwrites=frozenset({0}), note="row by row, sums in float64"),
        RMS_NORM_BACKWARD: Facts(dense=True, overwrites=frozenset({0, 1}), note="row by row, sums in float64"),
    }
)


def base_name(operator: str) -> str:
    """``"aten.add_.Tensor"`` → ``"add"``; operators of this project keep their full name."""
    parts = operator.split(".")
    return parts[1].rstrip("_") if parts[0] == "aten" and len(parts) > 1 else operator


def facts(operator: str) -> Facts | None:
    """The facts of an operator; ``None`` for one that runs unplanned, or that is mere movement of data."""
    return FACTS.get(base_name(operator))


def is_random(operator: str) -> bool:
    """Whether the operator draws from the generator, so that its order among its like must not change."""
    name = base_name(operator)
    return operator.startswith("aten.") and name.startswith(_RANDOM) and not name.endswith("_backward")


def is_elementwise(operator: str) -> bool:
    """Whether each output element depends only on input elements at its own (broadcast) position."""
    found = facts(operator)
    return found is not None and found.elementwise


def has_out_form(operator: str) -> bool:
    """Whether the ATen operator's out-form on the CPU writes into given memory without memory of its own."""
    return facts(operator) is not None


def accepts_strides(operator: str) -> bool:
    """Whether the kernel reads and writes strided views without a copy of its own."""
    found = facts(operator)
    return operator in (COPY, FILL, MATMUL, ARANGE) or operator in FUSED or (found is not None and found.strided)


def needs_dense(operator: str) -> bool:
    """Whether the kernel takes and gives contiguous tensors only."""
    found = facts(operator)
    return found is not None and found.dense


def batch_rank(operation: Operation, rank: int) -> int:
    """How many leading dimensions of a ``rank``-dimensional operand are mere batch: splitting them changes nothing."""
    if operation.operator == MATMUL:
        return rank - 2
    if operation.operator in SOFTMAX_AXIS:
        return rank - 1 if operation.arguments[SOFTMAX_AXIS[operation.operator]] == -1 else 0
    if operation.operator in (COPY, FILL) or is_elementwise(operation.operator):
        return rank
    if operation.operator == "aten.amax.default" and operation.arguments[1:] == ((-1,), True):
        return rank - 1
    return 0


def may_overwrite(operation: Operation, output: Tensor, operand: Tensor, operand_index: int) -> bool:
    """Whether ``output`` may be written onto ``operand``, an input with the same layout that dies here."""
    same = (output.shape, output.strides, output.itemsize) == (operand.shape, operand.strides, operand.itemsize)
    found = facts(operation.operator)
    if not same or found is None:
        return False
    if found.elementwise:
        return True
    return any(
        position in found.overwrites and argument == TensorRef(operand_index)
        for position, argument in enumerate(operation.arguments)
    )


def unplanned_nbytes(operation: Operation, tensors: Sequence[Tensor], *, on_cpu: bool = True) -> int:
    """Bytes the operation allocates outside the arena; zero for one with a true out-form.

    ``tensors`` are the graph's. On a CPU a 16-bit product needs its float32 tiles (once, shared by all). An operator
    without an out-form returns new tensors; a convolution needs room besides. What ATen's operators allocate is as
    measured on a CPU.
    """
    outputs = [tensors[index] for index in operation.outputs if index is not None]
    result_nbytes = sum(output.numel * output.itemsize for output in outputs)
    if operation.operator == MATMUL:
        return _tile_nbytes(operation, tensors) if on_cpu and outputs and outputs[0].dtype in HALF else 0
    if operation.operator.startswith("arenaplan."):
        return 0
    found = facts(operation.operator)
    if found is not None:
        in_half = any(output.dtype in HALF for output in outputs)
        return 2 * result_nbytes if in_half and not found.halves else 0
    if is_random(operation.operator) and is_mutating(operation):
        return 0
    if base_name(operation.operator) in ("convolution", "convolution_backward"):
        return result_nbytes + _convolution_nbytes(operation, tensors)
    return result_nbytes


def is_mutating(operation: Operation) -> bool:
    """Whether everything the operation writes is also among its arguments: it works in place by its own definition."""
    return bool(operation.outputs) and all(output in operation.reads for output in operation.outputs)


def mutated(operation: Operation) -> frozenset[int]:
    """The arguments an operation changes by its own definition."""
    if is_mutating(operation) or base_name(operation.operator) == "native_batch_norm":
        return frozenset(index for index in operation.outputs if index is not None and index in operation.reads)
    return frozenset()


def _convolution_nbytes(operation: Operation, tensors: Sequence[Tensor]) -> int:
    """What a convolution allocates beside its results: columns in float64, else operands in blocks of 16 channels.

    The first is exact. The second is what oneDNN was measured to need at most: each operand once (in the backward
    twice, and buffers of its threads), in float32; twice that for 16-bit operands.
    """
    backward = base_name(operation.operator) == "convolution_backward"
    operands = [tensors[argument.tensor] for argument in operation.arguments[:3] if isinstance(argument, TensorRef)]
    image, weight = operands[1:3] if backward else operands[:2]
    produced = operands[0] if backward else tensors[operation.outputs[0] or 0]
    steps, padding = operation.arguments[4:6] if backward else operation.arguments[3:5]
    if image.dtype == "float64":
        dimensions = len(image.shape) - 2
        if prod(weight.shape[2:]) == 1 and (steps, padding) == ((1,) * dimensions, (0,) * dimensions):
            return 0
        return image.shape[0] * prod(weight.shape[1:]) * prod(produced.shape[2:]) * image.itemsize
    blocked = 0
    for tensor, axes in ((image, (1,)), (weight, (0, 1)), (produced, (1,))):
        blocked += 4 * prod(-(-size // 16) * 16 if axis in axes else size for axis, size in enumerate(tensor.shape))
    needed = 2 * blocked + CONVOLUTION_THREAD_NBYTES if backward else blocked
    return 2 * needed if image.dtype in HALF else needed


def _tile_nbytes(operation: Operation, tensors: Sequence[Tensor]) -> int:
    left, right = (tensors[index] for index in operation.reads[:2])
    rows, depth, columns = (min(size, HALF_TILE) for size in (left.shape[-2], left.shape[-1], right.shape[-1]))
    return 4 * (rows * depth + depth * columns + rows * columns)


# -- scratch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scratch:
    """A dense workspace an operation needs while it runs."""

    shape: tuple[int, ...]
    dtype: str


#: Reductions that to one number, of many elements, are done in two steps of our own.
_SPLIT = frozenset({"sum", "mean", "amax", "amin", "linalg_vector_norm"})


def workspaces(operation: Operation, tensors: Sequence[Tensor]) -> tuple[Scratch, ...]:
    """The scratch an operation's kernel needs, in the kernel's order; ``tensors`` are the graph's."""
    outputs = [None if index is None else tensors[index] for index in operation.outputs]
    operands = [tensors[index] for index in operation.reads]
    if not operands or operands[0].numel == 0:
        return ()
    if operation.operator in FUSED:
        return _attention_scratch(operation, tensors)
    name = base_name(operation.operator)
    if name in ("native_layer_norm", "native_layer_norm_backward"):
        source = operands[0]
        width = _normalized_numel(operation)
        return _row_scratch(source.numel // max(width, 1), width, accumulator(source.dtype), name)
    if name in (RMS_NORM, RMS_NORM_BACKWARD):
        return _rms_scratch(operation, tensors)
    if name in ("native_batch_norm", "native_batch_norm_backward"):
        return _channel_scratch(operands[0])
    counted = name == "linalg_vector_norm" and operation.arguments[1:2] == (0,)
    if name in _SPLIT and not counted and outputs and outputs[0] is not None:
        return _partial_sums(operands[0], outputs[0])
    if name == POINTWISE:
        _, count = registers(decode(operation.arguments), len(operation.arguments) - 1)
        stored = [tensors[item.tensor] for item in operation.arguments[1:] if isinstance(item, TensorRef)]
        count += sum(item is not None and item.dtype in HALF for item in (*stored, *outputs))
        chunk = pointwise_chunk(operands[0].numel, outputs[0].dtype if outputs[0] is not None else "float32")
        return (Scratch((count, chunk), "float32"),) if count else ()
    if name == DROPOUT:
        width = operands[0].shape[-1] if operands[0].shape else 1
        chunk = chunk_rows(operands[0].numel // width, width)
        return (Scratch((chunk, width), "bool"), Scratch((-(-width // 4) * 4,), "uint32"))
    if name == CROSS_ENTROPY_BACKWARD and outputs[0] is not None:
        rows = outputs[0].shape[:1]
        return (Scratch(rows, outputs[0].dtype), Scratch(rows, "bool"), Scratch(rows, "int64"))
    if name == "index_add" and operands[0].dtype in HALF:
        return (Scratch(operands[0].shape, "float32"), Scratch(operands[-1].shape, "float32"))
    return ()


def pointwise_chunk(numel: int, dtype: str) -> int:
    """Elements of a chunk of a pointwise program: in 16 bits fewer, as operands are copied to float32 besides."""
    return min(POINTWISE_CHUNK // 4, max(numel // 16, 32), numel) if dtype in HALF else min(POINTWISE_CHUNK, numel)


def accumulator(dtype: str) -> str:
    """The dtype normalisations compute in."""
    return "float32" if dtype in HALF else dtype


def chunk_rows(rows: int, width: int) -> int:
    """Rows that a normalisation works on at a time."""
    return max(min(rows, CHUNK_NUMEL // max(width, 1)), 1)


def _normalized_numel(operation: Operation) -> int:
    position = 1 if base_name(operation.operator) == "native_layer_norm" else 2
    shape = operation.arguments[position]
    return prod(size for size in shape if isinstance(size, int)) if isinstance(shape, tuple) else 0


def _row_scratch(rows: int, width: int, dtype: str, name: str) -> tuple[Scratch, ...]:
    """Chunks of rows, one number a row, and six rows: what a layer normalisation works on."""
    chunk = chunk_rows(rows, width)
    count = 1 if name == "native_layer_norm" else 3
    lines = Scratch((6, width + width % 2), dtype)
    return (Scratch((count, chunk, width), dtype), Scratch((4, chunk, 1), dtype), lines)


def rms_parts(rows: int) -> int:
    """The parts that the rows of a root mean square normalisation fall into."""
    return max(min(rows // RMS_PART_ROWS, RMS_PARTS), 1)


def _rms_scratch(operation: Operation, tensors: Sequence[Tensor]) -> tuple[Scratch, ...]:
    """Sums of each part and of all (backward only), two rows a part or two chunks of rows, lines, a number a row."""
    backward = operation.operator == RMS_NORM_BACKWARD
    x = tensors[operation.reads[1 if backward else 0]]
    shape = operation.arguments[2 if backward else 1]
    width = prod(size for size in shape if isinstance(size, int)) if isinstance(shape, tuple) else 1
    rows = x.numel // max(width, 1)
    count, dtype = rms_parts(rows), accumulator(x.dtype)
    # A small tensor is not worth scratch of its own size: eight chunks at least.
    chunk = max(min(-(-rows // 8), CHUNK_NUMEL // max(width, 1)), 1)
    lines = Scratch((2 if backward else 1, max(count, chunk), width), dtype)
    if not backward:
        return (lines, Scratch((1, width), dtype))
    return (Scratch((count + 1, width), "float64"), lines, Scratch((3, width), dtype), Scratch((chunk, 1), dtype))


def _channel_scratch(source: Tensor) -> tuple[Scratch, ...]:
    """Two chunks of whole channels, and seven numbers a channel: what a batch normalisation works on."""
    channels = max(source.shape[1], 1)
    numel = source.numel // channels
    fit = min(max(CHUNK_NUMEL // max(numel, 1), 2), channels)
    return (Scratch((2, fit * numel), "float64"), Scratch((7, channels), "float64"))


def split_axis(shape: tuple[int, ...]) -> int | None:
    """The axis that a large sum to one number is first done across, or ``None`` if it has only one."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    return axes[0] if len(axes) > 1 else None


def _attention_scratch(operation: Operation, tensors: Sequence[Tensor]) -> tuple[Scratch, ...]:
    """The tiles of every lane; for the row sums two chunks of rows."""
    if operation.operator == ATTENTION_DELTA:
        _, heads, length, width = tensors[operation.reads[0]].shape
        rows = min(length, max(CHUNK_NUMEL // (heads * width), 1))
        return (Scratch((2, heads * width * rows), accumulator(tensors[operation.reads[0]].dtype)),)
    tiles = tiling(operation, tensors)
    return () if tiles is None else (Scratch((tiles.lanes, tiles.numel), tiles.dtype),)


def _partial_sums(source: Tensor, output: Tensor) -> tuple[Scratch, ...]:
    """One partial sum for each place along the first axis, or for each of up to 64 equal parts of the only one."""
    if output.numel != 1 or (source.numel < TWO_PASS_NUMEL and source.dtype not in HALF):
        return ()
    axis = split_axis(source.shape)
    return (Scratch((parts(source.numel) if axis is None else source.shape[axis],), output.dtype),)


def parts(numel: int) -> int:
    """The largest number of equal parts up to 64 that ``numel`` elements fall into."""
    return next(count for count in range(64, 0, -1) if numel % count == 0)
