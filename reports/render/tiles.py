"""Draws figures of fields: the cells of a table, successes by setting, and learned kernels.

**Cells** are coloured by their means. The rows are sorted by their mean over the columns in which no row lacks a
value, the best first. A cell without a value is white, and rows and columns without any are left out. Beside each row
is a at what it costs, if the figure asks for a cost. Percentages are coloured from 0 to 100. Other units may differ by
orders of magnitude between rows and between columns: each column has a logarithmic scale of its own, from its worst
mean to its best, and rows are sorted by the geometric mean. Of metrics such as times and losses the smallest is the
best (`suite.metrics`).

**Successes** have a line for every cell of the table and a field for every value of the setting. A field's colour and
its first number are the share of the seeds that succeed. The number below is their median.

**Learned kernels** have a panel for each run (DSS, Gupta et al. 2022, figures 2 and 3). A row of pixels is one kernel,
|K_k| divided by its largest value at any lag; white lines separate the layers. Below are the eigenvalues of all layers
at (Re, arcsinh(Im / 2)), in black those before the first step.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from subquad.reports.render.figure import Figure, KernelPanel
from subquad.reports.render.judge import Cell, Sensitivity, rank, setting_text
from subquad.suite.metrics import smaller_is_better

COLUMN_WIDTH, COLUMN_LETTERS = 1.1, 15
COST_WIDTH, COST_LETTERS = 2.0, 32
"""Widths of a column and of the panel of costs, in inches, and the number of letters at which their labels wrap."""
NO_VALUE = float("nan")
ROW = "\N{ZERO WIDTH SPACE}"
"""Stands before a label that begins with an underscore, which matplotlib would leave out of a legend."""


def verbatim(text: str) -> str:
    """The text for matplotlib, which takes what stands between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def named(label: str) -> str:
    """The label of an artist that a legend names."""
    return ROW + label if label.startswith("_") else label


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
    # equal means are all the best
    return [min(max((value - low) / (high - low), 0.0), 1.0) if high > low else value - low + 1.0 for value in scaled]


def _seeds(cells: Sequence[Cell]) -> str:
    """Returns the label that says over how many seeds the cells are averaged."""
    counts = sorted({cell.num_seeds for cell in cells if cell.mean is not None})
    if counts == [1]:
        return "one seed"
    return f"mean over {counts[0]} seeds" if len(counts) == 1 else f"mean over {counts[0]} to {counts[-1]} seeds"


def draw_successes(canvas: Any, found: Sequence[Sensitivity], x_label: str, unit: str) -> None:
    """Draws the fields; `unit` is that of the median."""
    values = sorted({value for line in found for value, _, _ in line.tried}, key=rank)
    shares = [[float("nan")] * len(values) for _ in found]
    ax = canvas.subplots()
    for i, line in enumerate(found):
        for (value, successes, runs), median in zip(line.tried, line.medians, strict=True):
            at, share = values.index(value), successes / runs
            shares[i][at] = share
            color = "black" if share > 0.5 else "white"
            ax.text(at, i - 0.18, f"{successes}/{runs}", ha="center", va="center", color=color)
            ax.text(at, i + 0.24, f"{median:.1f}", ha="center", va="center", color=color, fontsize=7)
    image = ax.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    ax.grid(visible=False)
    ax.set_xticks(range(len(values)), [verbatim(setting_text(value)) for value in values])
    columns = {line.column for line in found}
    ax.set_yticks(range(len(found)), [verbatim(line.row + f", {line.column}" * (len(columns) > 1)) for line in found])
    ax.tick_params(length=0)
    ax.set_xlabel(verbatim(x_label))
    canvas.colorbar(image, ax=ax, label=f"seeds that succeed (below: median, {unit})" if unit else "seeds that succeed")


LEARNED, INITIAL = "#0072b2", "#000000"


def draw_kernels(canvas: Any, panels: Sequence[KernelPanel]) -> None:
    """Draws one column for each panel: pixels above, and eigenvalues below where there are any."""
    spectra = any(panel.eigenvalues for panel in panels)
    axes = canvas.subplots(1 + spectra, len(panels), squeeze=False, height_ratios=[2, 1][: 1 + spectra])
    image = None
    for above, below, panel in zip(axes[0], axes[-1], panels, strict=True):
        image = _pixels(above, panel)
        if spectra:
            _spectrum(below, panel)
    axes[0][0].set_ylabel("layer")
    canvas.colorbar(image, ax=list(axes[0]), label="|K| / largest |K|", pad=0.01)
    if spectra:
        axes[1][0].set_ylabel("arcsinh(Im λ / 2)")
        handles, labels = axes[1][0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", frameon=False, ncols=2)


def _pixels(ax: Any, panel: KernelPanel) -> Any:
    width = panel.span * max(map(len, panel.kernels))
    extent = (0, width, len(panel.kernels), 0)
    image = ax.imshow(
        panel.kernels, aspect="auto", interpolation="nearest", cmap="magma", vmin=0, vmax=1, extent=extent
    )
    names = list(dict.fromkeys(panel.layers))
    starts = [panel.layers.index(name) for name in names]
    for start in starts[1:]:
        ax.axhline(start, color="white", lw=1)
    ends = [*starts[1:], len(panel.layers)]
    ax.set_yticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)], [str(n + 1) for n in names])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title(verbatim(panel.title))
    ax.set_xlabel("lag")
    return image


def _spectrum(ax: Any, panel: KernelPanel) -> None:
    for values, color, size, label in (
        (panel.eigenvalues, LEARNED, 8, "λ after training"),
        (panel.initial, INITIAL, 3, "λ before"),
    ):
        x, y = [re for re, _ in values], [math.asinh(im / 2) for _, im in values]
        ax.scatter(x, y, s=size, color=color, linewidths=0, label=label)
    ax.set_xlabel("Re λ")
