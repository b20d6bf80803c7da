"""Colours of models, the same in every figure and on every page.

A family of models has one colour. Several rows of one family in a figure, such as attention with two kinds of
positions, have shades of it. A name of no known family takes a colour that the figure does not use otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FAMILIES = {
    r"linear attention|linear-attention|lightning|based": "#e69f00",
    r"attention|flashattention|transformer|xfmr|gpt|mha|sdpa|pythia|llama": "#6b6b6b",
    r"gated[ -]deltanet|deltanet|delta[ -]?product|kda": "#6a5acd",
    r"retnet": "#a6841b",
    r"gla": "#56b4e9",
    r"hgrn2": "#009e73",
    r"abc": "#cc79a7",
    r"gsa": "#d55e00",
    r"sashimi": "#aa4499",
    r"rwkv": "#4d7c8a",
    r"mlstm|slstm|xlstm": "#c2185b",
    r"dss": "#17a2a2",
    r"s4d": "#98a010",
    r"s4|s6|ssm": "#8c564b",
    r"gss|gated state spaces": "#9467bd",
    r"h3": "#0072b2",
    r"hyena|hyenadna": "#882255",
    r"mamba|scan": "#2a8a2a",
    r"convolution": "#bb5566",
    r"triton": "#4477aa",
    r"pytorch|torch": "#e07b6a",
}
"""Pattern of a name to the colour of its family, which is visible on a white and on a black background."""
OTHERS = ("#66a61e", "#aa3377", "#bb9f24", "#3aa6c4", "#ee6677", "#7f7f7f")
"""Colours of names that belong to no family, such as implementations of an operator."""
SHADES = (0.0, 0.38, -0.35, 0.6)
"""Shades of a family in the order in which a figure uses them: towards white where positive, else towards black."""


def _family(label: str) -> tuple[int, str] | None:
    """Where a label names a family first, and the colour of that family; None where it names none."""
    places = []
    for pattern, color in FAMILIES.items():
        found = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z])", label.lower())
        if found:
            places.append((found.start(), -len(found.group()), color))
    if not places:
        return None
    start, _, color = min(places)
    return start, color


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """The colour of every label of one figure, as `#rrggbb`."""
    members: dict[str, list[tuple[int, int, str]]] = {}
    unknown = 0
    for label in dict.fromkeys(labels):
        found = _family(label)
        if found is None:
            found = 0, OTHERS[unknown % len(OTHERS)]
            unknown += 1
        members.setdefault(found[1], []).append((found[0], len(label), label))
    colors = {}
    for base, found_in in members.items():
        # the family's own colour is for its plain name, which begins with it and is the shortest
        for i, (_, _, label) in enumerate(sorted(found_in, key=lambda member: member[:2])):
            colors[label] = shade(base, SHADES[i % len(SHADES)])
    return colors


def shade(color: str, amount: float) -> str:
    """A colour moved towards white by a share `amount`, or towards black where it is negative."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    target = 255 if amount > 0 else 0
    return "#" + "".join(f"{round(part + (target - part) * abs(amount)):02x}" for part in parts)
