"""Content of a report in every format: tables of strings, notes and provenance. All formats print the same strings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DASH = "—"
"""Text of a cell that has no value."""


@dataclass(frozen=True)
class Grid:
    """A table of strings."""

    heading: str
    """Title above the table; empty for the first table of a document."""
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    num_words: int
    """Number of columns, from the left, that hold words; the others hold numbers and are aligned to the right."""
    run_ids: tuple[tuple[str, ...], ...]
    """The runs behind each line."""


@dataclass(frozen=True)
class Document:
    """A report, or the history of the operators' speed, ready to print."""

    name: str
    title: str
    where: str
    """The line below the title: source and scale, or device."""
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    """Lines under the first grid."""
    provenance: tuple[str, ...]
    draw: Callable[[], Canvas | None]
    """Draws the figure; gives None where there is nothing to draw. Only this call imports matplotlib."""
