"""The colours of roles stay apart, for colour-blind readers as well, and from both grounds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from planner.report.colours import PALETTE, ROLE_COLOURS, luminance

#: Linear RGB as people with a complete deficiency see it: Machado, Oliveira and Fernandes 2009, severity 1.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
#: Linear RGB to OKLab (Ottosson 2020): to cone responses, and their cube roots to lightness and two colour axes.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def seen(colour: str, deficiency: str) -> np.ndarray:
    """A colour in OKLab, as it appears with the deficiency."""
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    simulated = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ simulated)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_any_two_roles_are_told_apart(deficiency):
    colours = ROLE_COLOURS.values()
    distances = [np.linalg.norm(seen(a, deficiency) - seen(b, deficiency)) for a, b in combinations(colours, 2)]
    # 0.02 is about a just noticeable difference; these are areas apart, so several times as much is asked for.
    assert min(distances) > 0.07


@pytest.mark.parametrize("ground", ["#f3f4f6", "#171c24"])
def test_every_role_stands_out_from_the_ground(ground):
    for colour in ROLE_COLOURS.values():
        light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.7


def test_the_palette_is_of_different_role_colours():
    assert len(set(PALETTE)) == len(PALETTE) == 8
    assert set(PALETTE) <= set(ROLE_COLOURS.values())
