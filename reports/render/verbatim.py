"""Text of a grid in a figure, letter by letter."""

from __future__ import annotations

ROW = "\N{ZERO WIDTH SPACE}"
"""Stands before a label that begins with an underscore, which matplotlib would leave out of a legend."""


def verbatim(text: str) -> str:
    """The text for matplotlib, which takes what stands between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def named(label: str) -> str:
    """The label of an artist that a legend names."""
    return ROW + label if label.startswith("_") else label
