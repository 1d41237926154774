"""Recognise a self-attention backward in a graph, to hold its plan against the closed formulas."""

from __future__ import annotations

from planner.flash import ATTENTION_BACKWARD
from planner.graph import Graph, Operation
from planner.operators import MATMUL, base_name
from planner.plan import Formula


def attention_formula(graph: Graph) -> Formula | None:
    """The formulas' values if the graph holds exactly one softmax backward fed by one batched product, else ``None``.

    S is the size of the softmax's gradient, X that of the product's left operand, the gradient of the context. Of a
    fused attention they are read off its backward.
    """
    fused = [o for o in graph.operations if o.operator == ATTENTION_BACKWARD]
    if fused:
        return _fused_formula(graph, fused[0]) if len(fused) == 1 else None
    softmaxes = [o for o in graph.operations if base_name(o.operator) == "_softmax_backward_data"]
    if len(softmaxes) != 1 or softmaxes[0].outputs[0] is None:
        return None
    scores = graph.tensors[softmaxes[0].outputs[0]]
    if len(scores.shape) < 3:
        return None
    context = None
    for operation in graph.operations:
        if operation is softmaxes[0]:
            break
        if operation.operator == MATMUL and operation.outputs[0] is not None:
            product = graph.tensors[operation.outputs[0]]
            if product.numel == scores.numel and product.shape[-2:] == scores.shape[-2:]:
                context = graph.tensors[operation.reads[0]].numel
    if context is None:
        return None
    return _formula(scores.numel, context, scores.itemsize)


def _fused_formula(graph: Graph, operation: Operation) -> Formula:
    incoming, q, k = (graph.tensors[index] for index in operation.reads[:3])
    return _formula(q.numel // max(q.shape[3], 1) * k.shape[2], incoming.numel, q.itemsize)


def _formula(scores: int, context: int, itemsize: int) -> Formula:
    return Formula(
        target=max(scores, 3 * context) * itemsize,
        lightseq2=(3 * context + max(3 * context, scores)) * itemsize,
    )
