"""What autograd keeps of a forward pass, and what a backward holds besides, family by family.

Counted on Hugging Face's implementations (transformers 5): each saved tensor once. `tests/models/test_estimate.py`
compares the sums with what a run measures. Letters: T = B·L tokens, H hidden size, D = N·d and E = K·d widths of the
queries and keys, F inner width of the MLP, S = B·N·L² attention scores; w bytes of an activation, m bytes of an element
of a dropout mask (w on a CPU, 1 on CUDA), s bytes of a norm's statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.estimate.architecture import Architecture, Family


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch and how it is computed.

    Attributes:
        batch, length: B, L.
        itemsize: w, bytes of an activation.
        fused: whether attention keeps no L² tensor (flash attention and its like).
        device: ``"cuda"`` or ``"cpu"``; decides the size of dropout masks and statistics.
        dropout: whether dropout is active (training mode).
    """

    batch: int
    length: int
    itemsize: int
    fused: bool
    device: str = "cuda"
    dropout: bool = True

    @property
    def tokens(self) -> int:
        """T = B·L."""
        return self.batch * self.length

    @property
    def mask_itemsize(self) -> int:
        """m, bytes of an element of a dropout mask."""
        return 1 if self.device == "cuda" else self.itemsize

    @property
    def statistic_itemsize(self) -> int:
        """s, bytes of a mean or reciprocal deviation that LayerNorm keeps."""
        return 4 if self.device == "cuda" else self.itemsize


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes and the formula it came from."""

    nbytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Activations:
    """What a pass keeps and holds, in bytes.

    Attributes:
        attention, mlp: saved by the two halves of one layer, scores left out.
        scores: attention matrices (scores, dropout mask, dropped scores) saved by one layer.
        outside: saved outside the layers, logits left out.
        freed_by_head: how much of ``outside`` is gone when the backward reaches the last layer.
        head_transient, mlp_transient, attention_transient: most that the backward of the head's norm, of an MLP and of
            an attention holds besides, with all that the pass saved before them still alive.
        forward_transient: most that one layer's forward holds without a backward to come.
    """

    attention: Bytes
    mlp: Bytes
    scores: Bytes
    outside: Bytes
    freed_by_head: int
    head_transient: Bytes
    mlp_transient: Bytes
    attention_transient: Bytes
    forward_transient: Bytes


def activations(model: Architecture, work: Workload) -> Activations:
    """What the family's implementation keeps of one batch."""
    return {Family.GPT2: _gpt2, Family.LLAMA: _llama, Family.BERT: _bert}[model.family](model, work)


def score_count(model: Architecture, work: Workload) -> int:
    """S = B·N·L², elements of one attention matrix."""
    return work.batch * model.heads * work.length**2


def _scores(model: Architecture, work: Workload, *, upcast: bool) -> tuple[Bytes, Bytes]:
    """What attention keeps of its matrices, and what its backward holds of them besides.

    Materialised: the softmax's output, and with dropout the mask and the dropped output; a softmax computed in FP32
    keeps its result and the cast one. Fused: the logarithm of each row's sum, FP32.
    """
    w, S = work.itemsize, score_count(model, work)
    rows = work.batch * model.heads * work.length
    if work.fused:
        return Bytes(4 * rows, "4·B·N·L (fused: one logarithm for each row)"), Bytes(0, "0")
    dropped = work.dropout and model.attention_dropout > 0
    softmax, formula = (4 + w, "4·S + w·S") if upcast and w < 4 else (w, "w·S")
    saved = softmax * S
    if dropped:
        saved += (work.mask_itemsize + w) * S
        formula += " + m·S + w·S"
    # With dropout one matrix of gradients lies beside what was saved; without, the softmax's backward has both ends.
    if dropped:
        return Bytes(saved, formula), Bytes(w * S, "w·S")
    if upcast and w < 4:
        return Bytes(saved, formula), Bytes((8 - w) * S, "(8 − w)·S")
    return Bytes(saved, formula), Bytes(2 * w * S, "2·w·S")


def _layernorm_halves(model: Architecture, work: Workload, inner: int, inner_formula: str) -> tuple[Bytes, Bytes]:
    """Saved by the attention and the MLP of a layer with LayerNorm: input, output and statistics of the norm; Q, K, V
    and the attention's output; the MLP's inner activations; masks of the two residual dropouts.
    """
    w, X = work.itemsize, work.tokens * model.hidden
    norm = 2 * w * X + 2 * work.statistic_itemsize * work.tokens
    mask = work.mask_itemsize * X if work.dropout and model.residual_dropout > 0 else 0
    mask_formula = " + m·T·H" if mask else ""
    attention = norm + 4 * w * X + mask
    mlp = norm + inner * w * work.tokens * model.intermediate + mask
    return (
        Bytes(attention, f"6·w·T·H + 2·s·T{mask_formula}"),
        Bytes(mlp, f"2·w·T·H + {inner_formula}·w·T·F + 2·s·T{mask_formula}"),
    )


def _gpt2(model: Architecture, work: Workload) -> Activations:
    w, T, X, TF = work.itemsize, work.tokens, work.tokens * model.hidden, work.tokens * model.intermediate
    inner, formula = (5, "5") if model.composite_gelu else (2, "2")
    attention, mlp = _layernorm_halves(model, work, inner, formula)
    scores, score_transient = _scores(model, work, upcast=False)
    dropped = work.dropout and model.residual_dropout > 0
    mask = work.mask_itemsize * X if dropped else 0
    norm = w * X + 2 * work.statistic_itemsize * T
    products = 3 * w * X if work.fused else 0
    return Activations(
        attention=attention,
        mlp=mlp,
        scores=scores,
        outside=Bytes(w * X + norm + mask + 16 * T, "2·w·T·H + 2·s·T + 16·T" + (" + m·T·H" if dropped else "")),
        freed_by_head=norm,
        head_transient=Bytes(w * X, "w·T·H"),
        mlp_transient=Bytes(2 * w * TF + w * X, "2·w·T·F + w·T·H"),
        attention_transient=Bytes(
            score_transient.nbytes + products + w * X,
            f"{score_transient.formula} + {'4' if work.fused else '1'}·w·T·H",
        ),
        forward_transient=_forward(model, work),
    )


def _bert(model: Architecture, work: Workload) -> Activations:
    w, T, X, TF = work.itemsize, work.tokens, work.tokens * model.hidden, work.tokens * model.intermediate
    attention, mlp = _layernorm_halves(model, work, 2, "2")
    scores, score_transient = _scores(model, work, upcast=False)
    dropped = work.dropout and model.residual_dropout > 0
    mask = work.mask_itemsize * X if dropped else 0
    # The embedding's sum and its norm's output; the head's product, activation and norm.
    head = 3 * w * X + 2 * work.statistic_itemsize * T
    return Activations(
        attention=attention,
        mlp=mlp,
        scores=scores,
        outside=Bytes(
            2 * w * X + mask + 2 * work.statistic_itemsize * T + head + 16 * T,
            "5·w·T·H + 4·s·T + 16·T" + (" + m·T·H" if dropped else ""),
        ),
        freed_by_head=head,
        head_transient=Bytes(w * X, "w·T·H"),
        mlp_transient=Bytes(w * TF, "w·T·F"),
        attention_transient=Bytes(
            score_transient.nbytes + 3 * w * X if work.fused else score_transient.nbytes + w * X,
            f"{score_transient.formula} + {'3' if work.fused else '1'}·w·T·H",
        ),
        forward_transient=_forward(model, work),
    )


def _llama(model: Architecture, work: Workload) -> Activations:
    w, T, X, TF = work.itemsize, work.tokens, work.tokens * model.hidden, work.tokens * model.intermediate
    D, E = T * model.width, T * model.kv_width
    # RMSNorm in FP32: its input, the normalised and the scaled activation, one reciprocal for each token.
    norm = (4 + 2 * w) * X + 4 * T
    norm_formula = "(4 + 2·w)·T·H + 4·T"
    scores, score_transient = _scores(model, work, upcast=True)
    # Fused kernels take grouped keys as they are; else they are repeated for every query head.
    heads, heads_formula = (2 * D + 2 * E, "2·w·T·D + 2·w·T·E") if work.fused else (4 * D, "4·w·T·D")
    products = w * (D + 2 * E) if work.fused else 0
    rotary = 2 * w * work.length * model.head_size
    spread, spread_formula = (16, "16·T·H") if w < 4 else (12, "12·T·H")
    return Activations(
        attention=Bytes(norm + w * heads, f"{norm_formula} + {heads_formula}"),
        mlp=Bytes(norm + 4 * w * TF, f"{norm_formula} + 4·w·T·F"),
        scores=scores,
        outside=Bytes(norm + rotary + 16 * T, f"{norm_formula} + 2·w·L·d + 16·T"),
        freed_by_head=norm,
        head_transient=Bytes(spread * X, spread_formula),
        mlp_transient=Bytes(2 * w * TF + w * X, "2·w·T·F + w·T·H"),
        attention_transient=Bytes(
            score_transient.nbytes + products + 2 * w * X,
            f"{score_transient.formula} + 2·w·T·H" + (" + w·T·(D + 2·E)" if work.fused else ""),
        ),
        forward_transient=_forward(model, work),
    )


def _forward(model: Architecture, work: Workload) -> Bytes:
    """Most that one layer's forward holds by itself, KV cache left out: around its MLP, or around its attention.

    Beside what the layer computes there are the embedding's output (a local variable of the model), the residual and
    the norm's output, a mask of B·L² where attention is materialised, and its matrix until the layer ends.
    """
    w, T = work.itemsize, work.tokens
    X, TF, D, E = T * model.hidden, T * model.intermediate, T * model.width, T * model.kv_width
    S = 0 if work.fused else score_count(model, work)
    mask = 0 if work.fused or model.family is Family.BERT else w * work.batch * work.length**2
    kept = (w * S, " + w·S") if S else (0, "")
    masked = (mask, " + w·B·L²") if mask else (0, "")
    upcast = model.family is Family.LLAMA and w < 4
    matrices = (S * (8 + w if upcast else 2 * w), f" + {'(8 + w)' if upcast else '2·w'}·S") if S else (0, "")
    if model.family is Family.GPT2:
        inner = 4 if model.composite_gelu else 2
        mlp = Bytes((5 * X + inner * TF) * w, f"5·w·T·H + {inner}·w·T·F")
        attention = Bytes((3 * X + 3 * D) * w, "3·w·T·H + 3·w·T·D")
    elif model.family is Family.LLAMA:
        mlp = Bytes((4 * X + 3 * TF) * w, "4·w·T·H + 3·w·T·F")
        repeated = 3 if model.kv_heads < model.heads else 1  # materialised: grouped keys and values for every head
        queries = (repeated * D, f"{repeated}·w·T·D") if S else (4 * D + 2 * E, "w·T·(4·D + 2·E)")
        attention = Bytes((3 * X + queries[0]) * w, f"3·w·T·H + {queries[1]}")
    else:
        wide = 2 * TF + 3 * X >= TF + 6 * X
        widest = 2 * TF + 3 * X if wide else TF + 6 * X
        mlp = Bytes(widest * w, "3·w·T·H + 2·w·T·F" if wide else "6·w·T·H + w·T·F")
        attention = Bytes((2 * X + 3 * D) * w, "2·w·T·H + 3·w·T·D")
    halves = (
        Bytes(mlp.nbytes + kept[0] + masked[0], mlp.formula + kept[1] + masked[1]),
        Bytes(attention.nbytes + matrices[0] + masked[0], attention.formula + matrices[1] + masked[1]),
    )
    return max(halves, key=lambda half: half.nbytes)
