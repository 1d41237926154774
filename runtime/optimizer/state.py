"""State in and out of the workspaces, under the names torch.optim uses: copies out, copies in, no aliases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runtime.errors import OptimizerError
from runtime.optimizer import codes
from runtime.optimizer.workspace import Slot, Workspace

State = dict[str, Any]


def export_state(workspace: Workspace, slot: Slot) -> State:
    """A parameter's state in tensors of its own: ``step``, moments in FP32, and ``master`` where one is kept."""
    state: State = {"step": workspace.steps[slot.number].clone()}
    for name, signed in workspace.moments:
        state[name] = workspace.moment(slot, name, signed)
    if workspace.master in (codes.MASTER, codes.SPLIT):
        state["master"] = workspace.full_precision(slot)
    return state


def worth_saving(state: State, parameter: torch.Tensor) -> bool:
    """Whether a state says more than a new optimizer would know."""
    if float(state["step"]) > 0:
        return True
    master = state.get("master")
    return master is not None and not torch.equal(master, parameter.detach().to(master.dtype))


def import_states(
    slots: Mapping[torch.Tensor, tuple[Workspace, Slot]], states: Mapping[torch.Tensor, Mapping[str, Any]]
) -> None:
    """Copy states in; what a state lacks keeps its value at the start. SGD's of torch have no step: they have begun."""
    touched: dict[int, Workspace] = {}
    for parameter, state in states.items():
        workspace, slot = slots[parameter]
        touched[id(workspace)] = workspace
        found = False
        for name, signed in workspace.moments:
            value = state.get(name)
            if value is not None:
                workspace.set_moment(slot, name, signed, value)
                found = True
        step = state.get("step")
        if step is None:
            step = 1.0 if found else 0.0
        workspace.steps[slot.number] = float(step)
        master = state.get("master")
        if master is not None and workspace.master in (codes.MASTER, codes.SPLIT):
            workspace.set_full_precision(slot, master)
    for workspace in touched.values():
        workspace.classify()


def import_edited(slots: Mapping[torch.Tensor, tuple[Workspace, Slot]], edited: Mapping[torch.Tensor, State]) -> None:
    """Take over entries that `Shown.edited` found: new values in, kept ones stay, all others as at the start.

    Raises:
        OptimizerError: a new moment is of integers, as 8-bit codes are, which mean nothing without their scales.
    """
    states = {}
    with torch.no_grad():
        for parameter, new in edited.items():
            if parameter not in slots:
                continue
            workspace, slot = slots[parameter]
            now = export_state(workspace, slot)
            kept = {"master", *new.get(None, ())}  # type: ignore[call-overload]
            for name, signed in workspace.moments:
                if name in new and not new[name].is_floating_point():
                    raise OptimizerError(
                        f"state {name} of {slot.name} was replaced by {new[name].dtype}: give it in float32, as "
                        "state_dict() does; codes mean nothing without their scales"
                    )
                workspace.set_moment(slot, name, signed, torch.zeros(slot.shape, device=workspace.device))
            workspace.steps[slot.number] = 0.0
            workspace.classify()
            states[parameter] = {**{name: value for name, value in now.items() if name in kept}, **new}
        import_states(slots, states)


def clear_states(slots: Mapping[torch.Tensor, tuple[Workspace, Slot]]) -> None:
    """Set every state to its value at the start; a master becomes what its parameter is."""
    for workspace in {id(held): held for held, _ in slots.values()}.values():
        for name, block in workspace.blocks.items():
            if name != "master":
                block.zero_()
        if workspace.master == codes.MASTER:
            for slot in workspace.slots:
                slot.view(workspace.blocks["master"]).copy_(slot.parameter.detach())
        workspace.steps.zero_()
        workspace.classify()
