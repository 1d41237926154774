"""The estimate of a traced program: what its plan needs, and what eager PyTorch would hold in the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import ShapeError
from planner.estimate.states import MOMENTS, Optimizer, Update
from planner.estimate.terms import NOT_COVERED, Estimate, Phase, Term, nonzero
from planner.estimate.training import choice
from planner.graph import RESIDENT_ROLES, Role
from planner.plan import Plan, padded

if TYPE_CHECKING:
    from planner.trace.eager import EagerMemory

_NAMES = {
    Role.PARAMETER: "weights",
    Role.PARAMETER_GRADIENT: "gradients",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
    Role.CONSTANT: "constants",
}
_STEP_NBYTES = 4
"""torch.optim counts the steps of each parameter in a float32 scalar of its own."""


def traced(
    subject: str,
    plan: Plan,
    eager: EagerMemory,
    *,
    optimizer: str = "adamw",
    update: str = "foreach",
) -> Estimate:
    """Estimate a program from its plan and its run on fake tensors.

    Args:
        subject: what was traced.
        plan: of the program in mode ``"joint"`` (training) or ``"forward"`` (inference).
        eager: from `planner.trace.eager.eager_memory`, in the same mode.
        optimizer: as `training`; without meaning for inference.
        update: as `training`; without meaning for inference.

    Returns:
        An estimate whose total is the plan's own arena, what it lists as allocated outside, and the optimizer's state.

    Raises:
        ShapeError: an option is unknown, or the plan is of a backward alone.
    """
    if plan.graph.mode not in ("joint", "forward"):
        raise ShapeError("mode", plan.graph.mode, "estimate a joint step, or a forward")
    train = plan.graph.mode == "joint"
    rule, how = choice("optimizer", optimizer, Optimizer), choice("update", update, Update)
    nothing = Term("optimizer", "0", 0)
    state, transient = (_state(eager, rule), _transient(eager, rule, how)) if train else (nothing, nothing)
    settings: tuple[tuple[str, str | int], ...] = (("strategy", plan.strategy), ("alignment", plan.alignment))
    if train:
        settings += (("optimizer", optimizer), ("update", update))
    return Estimate(
        kind="training" if train else "inference",
        subject=subject,
        parameters=eager.parameter_elements,
        settings=settings,
        phases=_planned(plan, state, transient),
        eager=eager_step(eager, optimizer=optimizer, update=update) if train else (_eager_peak(eager, nothing),),
        not_covered=NOT_COVERED,
    )


def _planned(plan: Plan, state: Term, transient: Term) -> tuple[Phase, ...]:
    """The arena by what is resident in it, and what lies outside."""
    sizes: dict[str, int] = {}
    for storage in plan.graph.storages:
        if storage.role in RESIDENT_ROLES:
            name = _NAMES.get(storage.role, str(storage.role))
            sizes[name] = sizes.get(name, 0) + padded(storage.nbytes, plan.alignment)
    arena = tuple(Term(name, "in the arena, resident", nbytes) for name, nbytes in sizes.items())
    passing = Term("activations and temporaries", "arena − resident", plan.extra_nbytes)
    outside = Term("outside the arena", "unplanned operators", sum(entry.nbytes for entry in plan.unplanned))
    phases = [Phase("planned step", nonzero(*arena, passing, outside, state))]
    if transient.nbytes:
        phases.append(Phase("optimizer step", nonzero(*arena, passing, state, transient)))
    return tuple(phases)


def eager_step(eager: EagerMemory, *, optimizer: str = "adamw", update: str = "foreach") -> tuple[Phase, ...]:
    """The moments of a training step in eager PyTorch, whose gradients are freed between steps.

    Arguments and errors as `traced`.
    """
    rule, how = choice("optimizer", optimizer, Optimizer), choice("update", update, Update)
    state, transient = _state(eager, rule), _transient(eager, rule, how)
    gradients = Term("gradients", "of every parameter", eager.gradient_nbytes)
    step = Phase("optimizer step", nonzero(*_there(eager), state, gradients, transient))
    return _eager_peak(eager, state), step


def _eager_peak(eager: EagerMemory, state: Term) -> Phase:
    """The peak of the pass itself."""
    return Phase(
        "forward and backward" if eager.gradient_nbytes else "forward",
        nonzero(
            *_there(eager),
            state,
            Term("gradients", "of parameters, alive at the peak", eager.held_nbytes("gradient")),
            Term("activations", "made by the forward, alive at the peak", eager.held_nbytes("saved")),
            Term("transients", "made by the backward, alive at the peak", eager.held_nbytes("transient")),
            Term("workspaces", "of the operator that runs", eager.held_nbytes("workspace")),
        ),
    )


def _there(eager: EagerMemory) -> tuple[Term, ...]:
    """What is there before the pass starts."""
    return (
        Term("weights", "every parameter's storage once", eager.parameter_nbytes),
        Term("buffers", "every buffer's storage once", eager.buffer_nbytes),
        Term("inputs", "the example inputs", eager.input_nbytes),
    )


def _state(eager: EagerMemory, optimizer: Optimizer) -> Term:
    """What torch.optim (or an 8-bit AdamW) keeps for the parameters that are trained."""
    if optimizer is Optimizer.ADAMW_8BIT:
        return Term("optimizer state", "2 · trainable elements", 2 * eager.trainable_elements)
    moments = MOMENTS[optimizer]
    steps = _STEP_NBYTES * eager.trainable_tensors if optimizer is Optimizer.ADAMW else 0
    formula = f"{moments} · trainable bytes" + (f" + {_STEP_NBYTES} for each parameter" if steps else "")
    return Term("optimizer state", formula, moments * eager.trainable_nbytes + steps)


def _transient(eager: EagerMemory, optimizer: Optimizer, update: Update) -> Term:
    """What the update holds besides; `planner.estimate.states.transient` has the reasons."""
    name = "optimizer-step transient"
    if optimizer is not Optimizer.ADAMW or update is Update.FUSED:
        return Term(name, "0: the update works in place", 0)
    if update is Update.FOREACH:
        return Term(name, "trainable bytes, √v of every parameter at once", eager.trainable_nbytes)
    return Term(name, "2 · largest parameter", 2 * eager.largest_parameter_nbytes)
