"""The states that an optimizer shows in ``optimizer.state``: dictionaries that remember whether someone wrote to them.

The tensors in them are views of the workspaces, so writing *into* one takes effect by itself. Another tensor put in its
place, or an entry taken out, as programs do that prune or grow a model, is taken over before the next step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch


class _Noted:
    """What both levels of dictionaries share: every way of changing them sets ``touched``."""

    touched: bool

    def __setitem__(self, key: Any, value: Any) -> None:
        self.touched = True
        super().__setitem__(key, value)  # type: ignore[misc]

    def __delitem__(self, key: Any) -> None:
        self.touched = True
        super().__delitem__(key)  # type: ignore[misc]

    def pop(self, *arguments: Any) -> Any:
        self.touched = True
        return super().pop(*arguments)  # type: ignore[misc]

    def popitem(self) -> Any:
        self.touched = True
        return super().popitem()  # type: ignore[misc]

    def clear(self) -> None:
        self.touched = True
        super().clear()  # type: ignore[misc]

    def update(self, *arguments: Any, **named: Any) -> None:
        self.touched = True
        super().update(*arguments, **named)  # type: ignore[misc]

    def setdefault(self, *arguments: Any) -> Any:
        self.touched = True
        return super().setdefault(*arguments)  # type: ignore[misc]

    def __ior__(self, other: Any) -> Any:
        self.touched = True
        return super().__ior__(other)  # type: ignore[misc]


def _plain(held: dict[Any, Any]) -> Any:
    """How pickle writes one of these: as an ordered dictionary, which `torch.load` reads with weights_only=True."""
    return OrderedDict, (), None, None, iter(held.items())


class _Entry(_Noted, dict[str, Any]):
    """One parameter's states; tells the dictionary that it is in."""

    def __init__(self, values: Mapping[str, Any], owner: Shown) -> None:
        super().__init__(values)
        self._owner = owner

    @property
    def touched(self) -> bool:
        """Whether anything in the whole dictionary was changed."""
        return self._owner.touched

    @touched.setter
    def touched(self, value: bool) -> None:
        self._owner.touched = value

    def __reduce__(self) -> Any:
        return _plain(self)


class Shown(_Noted, defaultdict[torch.Tensor, Any]):
    """States by parameter; a parameter without gets an empty dictionary, as torch.optim's do.

    Attributes:
        touched: whether an entry was set or removed since `show`, by anyone.
    """

    def __init__(self) -> None:
        self.touched = False
        super().__init__(dict)

    def show(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Show these, and nothing else."""
        super().clear()
        for parameter, state in states.items():
            super().__setitem__(parameter, _Entry(state, self))
        self._published = {parameter: dict(state) for parameter, state in states.items()}
        self.touched = False

    def edited(self, given: Mapping[torch.Tensor, Any], parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Any]:
        """The entries of ``given`` that are not what was shown; an entry that was removed is empty.

        A value that still is the one that was shown is left out and its name listed under ``None``.
        """
        found: dict[torch.Tensor, Any] = {}
        for parameter in parameters:
            entry = given.get(parameter, {})
            shown = self._published.get(parameter, {})
            kept = tuple(name for name, value in shown.items() if entry.get(name) is value)
            if len(kept) != len(shown) or len(entry) != len(shown):
                new = {name: value for name, value in entry.items() if name not in kept}
                found[parameter] = {**new, None: kept}
        self.touched = bool(found)
        return found

    def __reduce__(self) -> Any:
        return _plain(self)

    def copy(self) -> Any:
        """A plain dictionary."""
        return dict(self)

    __copy__ = copy
