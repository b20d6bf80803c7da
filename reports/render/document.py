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
    groups: tuple[str, ...] = ()
    """Beginning of each column's title, which neighbours share and which stands above them; empty without groups."""

    @property
    def titles(self) -> tuple[str, ...]:
        """The whole title of each column."""
        if not self.groups:
            return self.header
        return tuple(f"{group} {title}".strip() for group, title in zip(self.groups, self.header, strict=True))

    @property
    def named_lines(self) -> list[tuple[str, ...]]:
        """The lines, with the name of a row only where it changes, as papers print rows of several lines."""
        if self.num_words != 2:
            return list(self.lines)
        names = ["", *(line[0] for line in self.lines)]
        return [("" if name == line[0] else line[0], *line[1:]) for name, line in zip(names, self.lines, strict=False)]

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Each group with its first column and the one behind its last, in order, groups without a text included."""
        found: list[tuple[str, int, int]] = []
        for i, group in enumerate(self.groups):
            if found and group and found[-1][0] == group:
                found[-1] = (group, found[-1][1], i + 1)
            else:
                found.append((group, i, i + 1))
        return found


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
