"""Memory of a training step: what lies there throughout, and what each moment of the step adds."""

from __future__ import annotations

from typing import TypeVar

from planner.errors import ShapeError
from planner.estimate.activations import Activations, Workload, activations
from planner.estimate.architecture import Architecture, Family, Part, size_of
from planner.estimate.states import (
    ITEMSIZE,
    Optimizer,
    Precision,
    Update,
    own_update_terms,
    published,
    published_terms,
    transient,
)
from planner.estimate.terms import NOT_COVERED, NOT_COVERED_DISTRIBUTED, Estimate, Phase, Term, nonzero

Choice = TypeVar("Choice", Optimizer, Precision, Update)
ATTENTION = ("fused", "materialized")
DEVICES = ("cuda", "cpu")


def training(
    model: Architecture,
    *,
    batch: int = 1,
    length: int | None = None,
    precision: str = "mixed",
    optimizer: str = "adamw",
    update: str = "foreach",
    attention: str = "fused",
    zero: int = 0,
    gpus: int = 1,
    live_parameters: int | None = None,
    logits_held: bool = True,
    dropout: bool = True,
    device: str = "cuda",
) -> Estimate:
    """Estimate the memory of one device during a training step.

    Args:
        model: from `preset`, `read_config`, or sizes.
        batch: sequences on this device.
        length: tokens in a sequence; by default the longest the model is made for.
        precision: ``"fp32"``; ``"fp16"`` or ``"bf16"`` for everything in 16 bits; ``"mixed"`` for 16-bit weights,
            gradients and activations with FP32 copies of the first two.
        optimizer: ``"adamw"``, ``"adamw8bit"`` or ``"sgd"`` (with momentum).
        update: ``"foreach"`` (PyTorch's default on CUDA), ``"loop"`` or ``"fused"``.
        attention: ``"fused"`` (no L² tensor) or ``"materialized"``.
        zero: ZeRO stage (Rajbhandari et al., 2020, 1910.02054): 1 divides the optimizer state over the GPUs, 2 the
            gradients too, 3 the weights too.
        gpus: G, how many share.
        live_parameters: elements gathered at once under ZeRO-3; by default the largest part, a layer or an embedding.
        logits_held: whether the caller keeps the model's output until the step ends, as ``out.loss.backward()`` does.
        dropout: whether the model's dropout is active.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        ShapeError: an argument cannot be used.
    """
    work = workload(model, batch, length, precision, attention, device, dropout=dropout)
    chosen, rule = Precision(precision), choice("optimizer", optimizer, Optimizer)
    how = choice("update", update, Update)
    size_of("gpus", gpus)
    if model.quantization:
        raise ShapeError("model", model.name, f"its weights are quantized ({model.quantization}); none are trained so")
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ShapeError("zero", zero, "the stages of ZeRO are 0, 1, 2 and 3")
    step = _Step(model, work, activations(model, work), chosen, rule, how, zero, gpus, live_parameters, logits_held)
    settings: tuple[tuple[str, str | int], ...] = (
        ("batch", batch),
        ("length", work.length),
        ("precision", precision),
        ("optimizer", optimizer),
        ("update", update),
        ("attention", attention),
        ("zero", zero),
        ("gpus", gpus),
        ("device", device),
    )
    return Estimate(
        kind="training",
        subject=model.name,
        parameters=model.parameters,
        settings=settings,
        phases=step.phases(),
        published=published_terms(model, chosen, rule),
        own_update=own_update_terms(model, chosen, rule),
        not_covered=NOT_COVERED + (NOT_COVERED_DISTRIBUTED if gpus > 1 else ()),
    )


def workload(
    model: Architecture,
    batch: int,
    length: int | None,
    precision: str,
    attention: str,
    device: str,
    *,
    dropout: bool,
) -> Workload:
    """The checked batch; raise `ShapeError` if an argument cannot be used."""
    size_of("batch", batch)
    if length is None:
        length = model.longest if model.longest is not None else 1024
    size_of("length", length)
    if model.positions and length > model.positions:
        raise ShapeError("length", length, f"{model.name} has {model.positions} positions")
    chosen = choice("precision", precision, Precision)
    if attention not in ATTENTION:
        raise ShapeError("attention", attention, f"it must be one of {', '.join(ATTENTION)}")
    if device not in DEVICES:
        raise ShapeError("device", device, f"it must be one of {', '.join(DEVICES)}")
    return Workload(int(batch), int(length), ITEMSIZE[chosen], attention == "fused", device, dropout)


def choice(name: str, value: str, kind: type[Choice]) -> Choice:
    """The member of that value; raise `ShapeError` listing them all if there is none."""
    try:
        return kind(value)
    except ValueError:
        raise ShapeError(name, value, f"it must be one of {', '.join(kind)}") from None


class _Step:
    """The moments of one training step."""

    def __init__(
        self,
        model: Architecture,
        work: Workload,
        acts: Activations,
        precision: Precision,
        optimizer: Optimizer,
        update: Update,
        zero: int,
        gpus: int,
        live: int | None,
        logits_held: bool,
    ) -> None:
        self.model, self.work, self.acts = model, work, acts
        self.each = published(precision, optimizer)
        self.zero, self.gpus = zero, gpus
        self.logits_held = logits_held
        # Plain PyTorch frees gradients between steps; mixed-precision and ZeRO trainers keep a buffer for them.
        self.kept_gradients = precision is Precision.MIXED or zero > 0
        count = model.parameters
        share = -(-count // gpus)
        over = f" / {gpus}"
        self.weights = Term(
            "weights",
            f"{self.each.weight} · P{over if zero == 3 else ''}",
            self.each.weight * (share if zero == 3 else count),
        )
        self.state = Term(
            "optimizer state",
            f"{self.each.optimizer} · P{over if zero else ''} ({self.each.breakdown})",
            self.each.optimizer * (share if zero else count),
        )
        largest = max(part.numel for part in _tensors(model))
        nbytes, formula = transient(precision, optimizer, update, share if zero else count, largest)
        self.update = Term("optimizer-step transient", formula + (over if zero and nbytes else ""), nbytes)
        self.live = self._live(live)

    def _live(self, elements: int | None) -> Term:
        """ZeRO-3 gathers the parameters it computes with, and their gradients before they are divided."""
        part = self.model.largest_part
        if elements is not None:
            size_of("live_parameters", elements)
            part = Part("as given", str(elements), min(elements, self.model.parameters))
        if self.zero < 3:
            return Term("live parameters (ZeRO-3)", "0", 0)
        both = self.each.weight + self.each.gradient
        return Term(
            "live parameters (ZeRO-3)",
            f"({self.each.weight} + {self.each.gradient}) · {part.name} ({part.formula})",
            both * part.numel,
        )

    def phases(self) -> tuple[Phase, ...]:
        """The moments that can be the peak, in order."""
        m, a, w = self.model, self.acts, self.work.itemsize
        n, count = m.layers, m.parameters
        head = m.part("head").numel or m.part("token embedding").numel
        transform = m.part("head transform").numel + m.part("final norm").numel
        attention, mlp = m.part("attention").numel, m.part("mlp").numel
        embedding = 0 if m.tied else m.part("token embedding").numel
        embeddings = embedding + m.part("position embedding").numel
        layer = a.attention.nbytes + a.mlp.nbytes
        outside = a.outside.nbytes - a.freed_by_head
        layer_formula = f"{a.attention.formula} + {a.mlp.formula}"
        whole = f"n · ({layer_formula}) + {a.outside.formula}"
        last = f"n · ({layer_formula}) + {a.outside.formula} − head"
        vocabulary = self.work.tokens * m.vocabulary

        def saved(layers: int, half: bool, rest: int, formula: str) -> tuple[Term, Term]:
            """Activations and attention matrices of the layers whose backward is still to come."""
            acts = layers * layer - (a.mlp.nbytes if half else 0) + rest
            scores = Term("attention matrices", f"{layers} · ({a.scores.formula})", layers * a.scores.nbytes)
            return Term("activations", formula, acts), scores

        # Causal models compute their loss in FP32 whatever the logits are; BERT's is computed in the logits' dtype.
        loss = w if m.family is Family.BERT else 4
        name = "logits, FP32 upcast (log-softmax)" if loss == 4 else "log-softmax of the logits"
        upcast = Term(name, f"{loss}·T·V", loss * vocabulary)
        return (
            self._phase(
                "loss",
                0,
                Term("logits", "w·T·V", w * vocabulary),
                Term("logits, FP32 copy", "4·T·V", 4 * vocabulary if w < loss else 0),
                upcast,
                *saved(n, half=False, rest=a.outside.nbytes, formula=whole),
                held=False,
            ),
            self._phase(
                "backward of the loss",
                0,
                upcast,
                Term("gradients of the logits", f"2·{loss}·T·V", 2 * loss * vocabulary),
                *saved(n, half=False, rest=a.outside.nbytes, formula=whole),
            ),
            self._phase(
                "backward of the head",
                head + m.part("head transform").numel,
                *saved(n, half=False, rest=a.outside.nbytes, formula=whole),
                Term("transients", a.head_transient.formula, a.head_transient.nbytes),
            ),
            self._phase(
                "backward of the last layer's MLP",
                head + transform + m.hidden * m.intermediate,
                *saved(n, half=False, rest=outside, formula=last),
                Term("transients", a.mlp_transient.formula, a.mlp_transient.nbytes),
            ),
            self._phase(
                "backward of the last layer's attention",
                head + transform + mlp + m.hidden * m.width,
                *saved(n, half=True, rest=outside, formula=f"{last} − MLP"),
                Term("transients", a.attention_transient.formula, a.attention_transient.nbytes),
            ),
            self._phase(
                "backward of the first layer's MLP",
                count - embeddings - attention - mlp + m.hidden * m.intermediate,
                *saved(1, half=False, rest=outside, formula=f"{layer_formula} + {a.outside.formula} − head"),
                Term("transients", a.mlp_transient.formula, a.mlp_transient.nbytes),
            ),
            self._phase(
                "backward of the first layer's attention",
                count - embeddings - attention + m.hidden * m.width,
                *saved(1, half=True, rest=outside, formula=f"{a.attention.formula} + {a.outside.formula} − head"),
                Term("transients", a.attention_transient.formula, a.attention_transient.nbytes),
            ),
            self._phase(
                "backward of the embedding",
                count,
                Term(
                    "transients",
                    "w·T·H" + (f" + 2·{self.each.gradient}·V·H, a tied gradient and the sum" if m.tied else ""),
                    w * self.work.tokens * m.hidden + (2 * self.each.gradient * head if m.tied else 0),
                ),
            ),
            self._phase("optimizer step", count, self.update),
        )

    def _phase(self, name: str, gradients: int, *terms: Term, held: bool = True) -> Phase:
        """A moment: what is always there, gradients of so many parameters, and what the moment adds."""
        count = self.model.parameters
        elements, formula = gradients, "of the parameters done so far" if gradients < count else "P"
        if self.kept_gradients:
            elements, formula = count, "P"
        if self.zero >= 2:
            elements, formula = -(-count // self.gpus), f"P / {self.gpus}"
        logits = self.work.itemsize * self.work.tokens * self.model.vocabulary
        inputs = Term("inputs", "2·8·T (token and label numbers)", 16 * self.work.tokens)
        return Phase(
            name,
            nonzero(
                self.weights,
                Term("gradients", f"{self.each.gradient} · {formula}", self.each.gradient * elements),
                self.state,
                self.live,
                inputs,
                Term("logits", "w·T·V, held by the caller", logits if held and self.logits_held else 0),
                *terms,
            ),
        )


def _tensors(model: Architecture) -> tuple[Part, ...]:
    """The largest single tensors: embedding and head, the matrices of a layer."""
    H, F = model.hidden, model.intermediate
    return (
        Part("token embedding", "V·H", model.vocabulary * H),
        Part("mlp", "H·F", H * F),
        Part("attention", "H·D", H * model.width * (3 if model.family is Family.GPT2 else 1)),
    )
