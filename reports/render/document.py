"""Content of a report in every format: tables of strings, notes and provenance. All formats print the same strings.

Marks stand behind a value; a footnote under the table explains each one that is used (`report.notes_of`). Units are
those in which stored values are shown, with their factors and the number of digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas
from collections.abc import Iterable

DASH = "—"
"""Text of a cell that has no value."""
LISTED = ": the column `best at` of the table of every cell"
"""End of a note that names another table of the document."""


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
    draw: Callable[..., Canvas | None] | None = None
    """Draws the figure at a width, `column` or `page` (the default); gives None where there is nothing to draw. Only
    this call imports matplotlib. None for tables that have no figure."""
    caption: str = ""
    """The text that a paper shows above the first table; where it is empty, the title is shown."""
    label: str = ""
    """The word by which a paper refers to the first table; empty: the name."""


"""Marks that a cell may carry; a footnote under the table explains each one that is used (`report.notes_of`)."""

REDUCED = "†"
"""The runs are of a smaller scale than the paper's."""
FEW_SEEDS = "‡"
"""The mean is of fewer than three seeds."""
STAND_IN = "§"
"""The runs used stand-in data."""
MIXED = "¶"
"""The runs behind the mean used different operators, versions or backends of one, or devices."""
SELECTED = "*"
"""The best one of several values of a setting, by rows that are not those of the test."""
SELECTED_ON_TEST = "‖"
"""The best one of several values of a setting, by the rows of the test."""
EPOCH_ON_TEST = "◊"
"""Weights of the best epoch, by the rows of the test."""
EDGE = "⌉"
"""The chosen value of a setting is the smallest or the largest that the grid has, so a better one may lie beyond it."""
NOISY = "⇕"
"""A timing, or a ratio of timings, whose raw samples have a spread above `judge.LARGE_SPREAD`."""

MARKS = (REDUCED, FEW_SEEDS, STAND_IN, MIXED, SELECTED, SELECTED_ON_TEST, EPOCH_ON_TEST, EDGE, NOISY)
"""All marks, in the order in which they stand behind a value."""


SHOWN = {"bytes": (2.0**-30, "GiB"), "tokens/s": (1e-3, "K tokens/s")}
"""Stored units that tables and figures show in larger ones: stored unit to (factor, shown unit)."""


def shown(value: float, unit: str, percent: bool) -> float:
    """A stored value in the unit it is shown in.

    percent: whether fractions are shown as percentages.
    """
    return value * (100 if percent and unit == "fraction" else SHOWN.get(unit, (1.0, unit))[0])


def shared_unit(units: Iterable[str]) -> str:
    """The shown unit that all stored units have in common; empty where there are several, or none, or fractions."""
    distinct = set(units)
    if len(distinct) != 1:
        return ""
    unit = distinct.pop()
    return "" if unit == "fraction" else SHOWN.get(unit, (1.0, unit))[1]


def unit_shown(units: Iterable[str], percent: bool) -> str:
    """`shared_unit`, and the unit in which fractions are shown where all units are fractions."""
    distinct = set(units)
    if distinct == {"fraction"}:
        return "%" if percent else "fraction"
    return shared_unit(distinct)


def fixed(value: float, decimals: int, sign: bool = False) -> str:
    """A number with a fixed count of decimals and no negative zero; 1234 with -2 decimals is 1200."""
    if decimals < 0:
        value, decimals = round(value, decimals), 0
    text = f"{value:+.{decimals}f}" if sign else f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.replace("-", "+") if sign else text.lstrip("-")
    return text


def amount(value: float, binary: bool = False) -> str:
    """Three significant digits and a prefix: `74.1K`, `1.25M`; `2.50Gi` where binary."""
    base = 1024 if binary else 1000
    prefixes = ("", "Ki", "Mi", "Gi", "Ti") if binary else ("", "K", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= base * 0.9995 and power < len(prefixes) - 1:
        value /= base
        power += 1
    decimals = 0 if power == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}{prefixes[power]}"
