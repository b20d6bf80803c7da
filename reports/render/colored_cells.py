"""Draws the table of a report as a heat map: every cell is a field, coloured by its mean.

The rows are sorted by their mean over the columns in which no row lacks a value, the best first. A cell without a
value is white, and rows and columns without any are left out. Beside each row is a dot at what it costs, if the figure
asks for a cost.

Percentages are coloured from 0 to 100. Other units may differ by orders of magnitude between rows and between columns:
each column has a logarithmic scale of its own, from its worst mean to its best, and rows are sorted by the geometric
mean. Of metrics such as times and losses the smallest is the best (`suite.metrics`).
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from reports.render.cells import Cell
from reports.render.figure import Figure
from reports.render.verbatim import verbatim
from suite.metrics import smaller_is_better

COLUMN_WIDTH, COLUMN_LETTERS = 1.1, 15
COST_WIDTH, COST_LETTERS = 2.0, 32
"""Widths of a column and of the panel of costs, in inches, and the number of letters at which their labels wrap."""
NO_VALUE = float("nan")


def draw_cells(canvas: Any, figure: Figure, unit: str, decimals: int) -> None:
    """Draws the cells. `unit` and `decimals` are those of the report."""
    cells = figure.cells
    columns = filled_columns(cells)
    means = {(cell.row, cell.column): cell.mean for cell in cells if cell.mean is not None}
    rows = ranked(figure, unit)
    ax, *beside = canvas.subplots(
        1,
        1 + bool(figure.costs),
        sharey=True,
        squeeze=False,
        width_ratios=[COLUMN_WIDTH * len(columns), COST_WIDTH][: 1 + bool(figure.costs)],
    )[0]
    shades = [_shades([means.get((row, column)) for row in rows], figure, unit) for column in columns]
    ax.imshow(list(zip(*shades, strict=True)), aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if (row, column) in means:
                color = "black" if shades[j][i] > 0.5 else "white"
                ax.text(j, i, f"{means[row, column]:.{decimals}f}", ha="center", va="center", color=color, fontsize=8)
    ax.grid(visible=False)
    names = [textwrap.fill(verbatim(column), COLUMN_LETTERS, break_long_words=False) for column in columns]
    ax.set_xticks(range(len(columns)), names)
    ax.set_yticks(range(len(rows)), [verbatim(row) for row in rows])
    ax.tick_params(length=0)
    ax.set_xlabel(", ".join(filter(None, (verbatim(unit), "" if figure.spec.y == "time" else _seeds(cells)))))
    for dots in beside:
        costs = dict(figure.costs)
        places = [i for i, row in enumerate(rows) if row in costs]
        dots.plot([costs[rows[i]] for i in places], places, "o", ms=5, color="#440154")
        dots.set_xscale("log", base=2 if figure.spec.x_log2 else 10)
        dots.set_xlabel("\n".join(textwrap.fill(verbatim(line), COST_LETTERS) for line in figure.x_label.splitlines()))
        dots.tick_params(axis="y", length=0)


def filled_columns(cells: Sequence[Cell]) -> list[str]:
    """Returns the columns in which at least one row has a value, in the table's order."""
    filled = {cell.column for cell in cells if cell.mean is not None}
    return [column for column in dict.fromkeys(cell.column for cell in cells) if column in filled]


def ranked(figure: Figure, unit: str) -> list[str]:
    """Returns the rows that have a value, the best mean first; rows of equal mean keep the table's order.

    The mean is taken over the columns in which all of these rows have a value.
    """
    values: dict[str, dict[str, float]] = {}
    for cell in figure.cells:
        if cell.mean is not None:
            values.setdefault(cell.row, {})[cell.column] = _scaled(cell.mean, figure, unit)
    shared = set.intersection(*(set(line) for line in values.values())) if values else set()
    return sorted(values, key=lambda row: -statistics.fmean(values[row][column] for column in shared) if shared else 0)


def _scaled(mean: float, figure: Figure, unit: str) -> float:
    """Returns a mean on the scale of the colours, where larger is better."""
    scaled = mean if unit == "%" else math.log(mean) if mean > 0 else -math.inf
    return -scaled if smaller_is_better(figure.spec.y) else scaled


def _shades(means: Sequence[float | None], figure: Figure, unit: str) -> list[float]:
    """Returns the places of a column's means on the colour map, from 0 to 1; NaN where there is none."""
    scaled = [NO_VALUE if mean is None else _scaled(mean, figure, unit) for mean in means]
    finite = [value for value in scaled if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if unit == "%":
        low, high = (-100.0, 0.0) if smaller_is_better(figure.spec.y) else (0.0, 100.0)
    # of equal means, each is the best
    return [min(max((value - low) / (high - low), 0.0), 1.0) if high > low else value - low + 1.0 for value in scaled]


def _seeds(cells: Sequence[Cell]) -> str:
    """Returns the label that says over how many seeds the cells are averaged."""
    counts = sorted({cell.num_seeds for cell in cells if cell.mean is not None})
    if counts == [1]:
        return "one seed"
    return f"mean over {counts[0]} seeds" if len(counts) == 1 else f"mean over {counts[0]} to {counts[-1]} seeds"
