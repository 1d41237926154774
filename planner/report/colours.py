"""One colour for each role, the same in every picture; readable on a light and on a dark ground."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from planner.graph import Role

#: Chosen to stay apart for readers with normal vision and with protan, deutan and tritan deficiencies (simulated as
#: by Machado, Oliveira and Fernandes 2009), and from both grounds; tests/unit/test_report_colours.py has the distances.
ROLE_COLOURS: Mapping[Role, str] = MappingProxyType(
    {
        Role.PARAMETER: "#4360c0",
        Role.BUFFER: "#9b5b74",
        Role.INPUT: "#649ab0",
        Role.SAVED: "#3c902a",
        Role.GRAD_OUTPUT: "#d76e72",
        Role.CONSTANT: "#9c97f2",
        Role.TEMPORARY: "#fd9e17",
        Role.WORKSPACE: "#5d632c",
        Role.OUTPUT: "#8dbed8",
        Role.GRADIENT: "#a464f3",
        Role.PARAMETER_GRADIENT: "#cfa794",
        Role.OPTIMIZER_STATE: "#82046c",
    }
)
#: For groups without an order of their own (dtypes, a few modules), most distinct first.
PALETTE = tuple(
    ROLE_COLOURS[role]
    for role in (
        Role.PARAMETER,
        Role.TEMPORARY,
        Role.SAVED,
        Role.GRADIENT,
        Role.OUTPUT,
        Role.GRAD_OUTPUT,
        Role.WORKSPACE,
        Role.PARAMETER_GRADIENT,
    )
)


def role_text(role: Role) -> str:
    """The role in plain words."""
    return role.value.replace("_", " ")


def luminance(colour: str) -> float:
    """Relative luminance of ``"#rrggbb"`` as WCAG 2 defines it, 0 to 1."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_colour(role: Role) -> str:
    """Dark or white, whichever stands out more on the role's colour."""
    return "#14161a" if luminance(ROLE_COLOURS[role]) > 0.19 else "#ffffff"
