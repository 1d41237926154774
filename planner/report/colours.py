"""One colour for each role, the same in every picture; readable on a light and on a dark ground."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from planner.graph import Role

ROLE_COLOURS: Mapping[Role, str] = MappingProxyType(
    {
        Role.PARAMETER: "#4269d0",
        Role.BUFFER: "#9c6b4e",
        Role.INPUT: "#6cc5b0",
        Role.SAVED: "#3ca951",
        Role.GRAD_OUTPUT: "#ff725c",
        Role.CONSTANT: "#9498a0",
        Role.TEMPORARY: "#efb118",
        Role.WORKSPACE: "#8f8f3c",
        Role.OUTPUT: "#97bbf5",
        Role.GRADIENT: "#a463f2",
        Role.PARAMETER_GRADIENT: "#ff8ab7",
    }
)


def role_text(role: Role) -> str:
    """The role in plain words."""
    return role.value.replace("_", " ")


def text_colour(role: Role) -> str:
    """Dark or white, whichever stands out more on the role's colour (relative luminance as WCAG 2 defines it)."""
    channels = [int(ROLE_COLOURS[role][start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#14161a" if luminance > 0.19 else "#ffffff"
