"""Memory of inference: weights, the KV cache as it grows, a prefill and a decoding step."""

from __future__ import annotations

from planner.errors import ShapeError
from planner.estimate.activations import Workload, activations
from planner.estimate.architecture import Architecture, Family, size_of
from planner.estimate.states import Precision
from planner.estimate.terms import NOT_COVERED, Estimate, Phase, Term, nonzero
from planner.estimate.training import workload

LOGITS = ("last", "all")


def inference(
    model: Architecture,
    *,
    batch: int = 1,
    length: int | None = None,
    new_tokens: int = 0,
    precision: str = "bf16",
    attention: str = "fused",
    logits: str = "last",
    weight_nbytes: int | None = None,
    weight_source: str = "",
    device: str = "cuda",
) -> Estimate:
    """Estimate the memory of one device that runs a model without gradients.

    Args:
        model: from `preset`, `read_config`, or sizes.
        batch: sequences at once.
        length: tokens of the prompt; by default the longest the model is made for, less ``new_tokens``.
        new_tokens: tokens to generate; the cache grows by as many.
        precision: ``"fp32"``, ``"fp16"`` or ``"bf16"``, of weights, activations and cache.
        attention: ``"fused"`` (no L² tensor) or ``"materialized"``.
        logits: ``"last"`` (generation computes those of the last position) or ``"all"`` (of every position).
        weight_nbytes: bytes of the weights where a checkpoint says; by default every parameter in ``precision``.
        weight_source: what said so, for the formula.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        ShapeError: an argument cannot be used.
    """
    if precision == Precision.MIXED:
        raise ShapeError("precision", precision, "inference has no FP32 copies; use fp32, fp16 or bf16")
    size_of("new_tokens", new_tokens, least=0)
    if length is None and model.longest is not None:
        length = max(model.longest - new_tokens, 1)
    work = workload(model, batch, length, precision, attention, device, dropout=False)
    if model.positions and work.length + new_tokens > model.positions:
        raise ShapeError(
            "new_tokens", new_tokens, f"{model.name} has {model.positions} positions for prompt and answer"
        )
    if logits not in LOGITS:
        raise ShapeError("logits", logits, f"it must be one of {', '.join(LOGITS)}")
    if model.family is Family.BERT and new_tokens:
        raise ShapeError("new_tokens", new_tokens, f"{model.name} does not generate; it has no cache")
    if weight_nbytes is None and model.quantization:
        cause = f"the weights are quantized ({model.quantization}); give the checkpoint, whose dtypes differ by tensor"
        raise ShapeError("weights", None, cause)
    if weight_nbytes is not None:
        size_of("weight_nbytes", weight_nbytes)
        weights = Term("weights", weight_source or "as given", weight_nbytes)
    else:
        weights = Term("weights", f"{work.itemsize} · P", work.itemsize * model.parameters)
    settings: tuple[tuple[str, str | int], ...] = (
        ("batch", batch),
        ("length", work.length),
        ("new_tokens", new_tokens),
        ("precision", precision),
        ("attention", attention),
        ("logits", "all" if model.family is Family.BERT else logits),
        ("device", device),
    )
    return Estimate(
        kind="inference",
        subject=model.name,
        parameters=model.parameters,
        settings=settings,
        phases=_phases(model, work, new_tokens, logits, weights),
        not_covered=NOT_COVERED,
    )


def _phases(model: Architecture, work: Workload, new_tokens: int, logits: str, weights: Term) -> tuple[Phase, ...]:
    """The prefill's layers, its logits, and the last decoding step."""
    w, n = work.itemsize, model.layers
    layer = activations(model, work).forward_transient
    everything = logits == "all" or model.family is Family.BERT
    positions, formula = (work.tokens, "T") if everything else (work.batch, "B")
    inputs = Term("inputs", "8·T (token numbers)", 8 * work.tokens)
    prompt = cache(model, work.batch, work.length, w)
    phases = [
        Phase(
            "prefill, inside a layer",
            nonzero(weights, prompt, inputs, Term("activations", layer.formula, layer.nbytes)),
        ),
        Phase(
            "prefill, logits",
            nonzero(
                weights,
                prompt,
                inputs,
                Term("activations", "2·w·T·H", 2 * w * work.tokens * model.hidden),
                Term("logits", f"w·{formula}·V", w * positions * model.vocabulary),
                Term(
                    "logits, FP32 upcast",
                    f"4·{formula}·V (sampling)",
                    0 if everything or w == 4 else 4 * positions * model.vocabulary,
                ),
            ),
        ),
    ]
    if new_tokens:
        total = work.length + new_tokens
        step = Workload(work.batch, 1, w, True, work.device, dropout=False)
        held = cache(model, work.batch, total, w)
        one = activations(model, step).forward_transient
        rows = 0 if work.fused else work.batch * model.heads * _seen(model, total) * (8 if w < 4 else 2 * w)
        phases.append(
            Phase(
                "last decoding step",
                nonzero(
                    weights,
                    held,
                    Term(
                        "cache growth (one layer's keys, old and new)",
                        "KV cache / 2·n",
                        held.nbytes // (2 * n),
                    ),
                    Term("inputs", "8·(L + new)·B", 8 * work.batch * total),
                    Term("activations", f"{one.formula} at L = 1, and a row of scores", one.nbytes + rows),
                    Term("logits", "w·B·V", w * work.batch * model.vocabulary),
                    Term("logits, FP32 upcast", "4·B·V", 4 * work.batch * model.vocabulary if w < 4 else 0),
                ),
            )
        )
    return tuple(phases)


def _seen(model: Architecture, length: int) -> int:
    """Keys that are kept of a sequence: a sliding window forgets the rest."""
    return length if model.window is None else min(length, model.window)


def cache(model: Architecture, batch: int, length: int, itemsize: int) -> Term:
    """Keys and values of every layer: 2 · n · B · L · K · d elements; L at most the sliding window's."""
    if model.family is Family.BERT:
        return Term("KV cache", "0", 0)
    kept = _seen(model, length)
    formula = "2·n·B·K·d·(L + new)·w" if kept == length else f"2·n·B·K·d·{kept}·w (sliding window)"
    return Term("KV cache", formula, 2 * model.layers * batch * kept * model.kv_width * itemsize)
