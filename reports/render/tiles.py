"""Draws figures of fields: the cells of a table, successes by setting, and learned kernels.

**Cells** have the median over the seeds as a number. Where the grid says what success is (`select.success`), a cell's
colour is the number of its seeds that succeed. Where the columns have different levels of chance, it is
(median - chance) / (100 - chance). Other percentages are coloured from 0 to 100. Other units may differ by orders of
magnitude between rows and between columns: each column has a logarithmic scale of its own, from its worst median to its
best. The best rows stand first. Rows and columns without any value are left out.

**Successes** have a line for every cell of the table and a field for every value of the setting. A field's colour and
its first number are the share of the seeds that succeed. The number below is their median.

**Learned kernels** have a panel for each run (DSS, Gupta et al. 2022, figures 2 and 3). A row of pixels is one kernel,
|K_k| divided by its largest value at any lag; white lines separate the layers. Below are the eigenvalues of all layers
at (Re, arcsinh(Im / 2)), in black those before the first step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from subquad.reports.render.figure import KernelPanel
from subquad.reports.render.finding import Words
from subquad.reports.render.judge import Cell, rank, setting_text
from subquad.reports.render.report import Report
from subquad.reports.render.seeds import has_main_metric, is_percent, lines_of, ranked, succeeds
from subquad.reports.render.sheet import (
    SMALL,
    TEXT,
    WIDTHS,
    Canvas,
    Heading,
    Width,
    filled,
    label_rows,
    labelled,
    measure,
    sheet,
    verbatim,
)
from subquad.suite.metrics import smaller_is_better

SHADES = LinearSegmentedColormap.from_list("shades", ["#f4f4f4", "#c3d9ee", "#6aaad4", "#0a4f9e"])
"""From light to dark, so that a print in black and white has the same order."""
ROW_HEIGHT = 0.155
"""Height of a row of cells, in inches."""
DEEPEST = 1.0
"""An upright header is wrapped at this length, in inches."""


@dataclass(frozen=True)
class Colouring:
    """The colours of a table's cells, from 0 to 1, and what they mean."""

    shares: Mapping[tuple[str, str], float]
    note: str
    legend: tuple[tuple[Any, str], ...] = ()
    shows_chance: bool = False


def draw_cells(report: Report, words: Words, width: Width) -> Canvas:
    """The cells of a report that have values. `words`: title and captions (`finding.words_of`)."""
    cells = {(cell.row, cell.column): cell for cell in report.cells if cell.median is not None}
    columns = [column for column in report.spec.columns if any((row, column) in cells for row, _ in cells)]
    found = colouring(report, cells, columns)
    rows = _rows(report, cells, columns)
    labels, wide, high = labelled(rows, width)
    slot = (WIDTHS[width] - 0.29 - wide) / len(columns)
    decimals = report.decimals if report.unit != "%" or slot > 0.5 else 0
    chances = {column: report.spec.of(column, "chance") for column in columns}
    names = [f"{c}, chance {chances[c]:g}" if found.shows_chance and chances[c] is not None else c for c in columns]
    upright = max(measure(word, SMALL) for name in names for word in name.split()) > slot - 0.04
    # an upright header has two lines only where two are beside each other in a column
    headers = [filled(name, (DEEPEST if slot > 0.24 else 3.0) if upright else slot - 0.04) for name in names]
    lines = max(header.count("\n") + 1 for header in headers)
    head = max(measure(part, SMALL) for header in headers for part in header.splitlines()) if upright else 0.115 * lines
    body = max(ROW_HEIGHT, high) * len(rows) + head + 0.15
    heading = Heading(words.title, words.details, note=f"{found.note} {words.note}")
    canvas = sheet(width, body, heading, found.legend)
    ax = canvas.subplots()
    shares = [[found.shares.get((row, column), float("nan")) for column in columns] for row in rows]
    _fields(ax, shares)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            cell = cells.get((row, column))
            if cell is not None and cell.median is not None:
                _number(ax, j, i, _text(report, cell, decimals), shares[i][j])
    ax.xaxis.tick_top()
    place: Any = {"rotation": 90} if upright else {"va": "baseline", "linespacing": 1.12}
    ax.set_xticks(range(len(columns)), headers, **place)
    label_rows(ax, labels)
    return canvas


def _fields(ax: Any, shares: Sequence[Sequence[float]]) -> None:
    """Fields with white lines between them, the first row on top."""
    edges_x = [j - 0.5 for j in range(len(shares[0]) + 1)]
    edges_y = [i - 0.5 for i in range(len(shares) + 1)]
    ax.pcolormesh(edges_x, edges_y, shares, cmap=SHADES, vmin=0.0, vmax=1.0, edgecolors="white", linewidth=0.8)
    ax.set_ylim(len(shares) - 0.5, -0.5)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _number(ax: Any, x: float, y: float, text: str, share: float) -> None:
    """A number in a field, black or white, whichever can be read on it."""
    red, green, blue = to_rgb(SHADES(share)) if math.isfinite(share) else (1.0, 1.0, 1.0)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
    ax.text(x, y, text, ha="center", va="center_baseline", color="white" if dark else "black", fontsize=SMALL)


def _text(report: Report, cell: Cell, decimals: int) -> str:
    """The median of a cell; a time has three digits, because its spread is about a percent."""
    if report.timed and cell.median:
        decimals = max(2 - math.floor(math.log10(abs(cell.median))), 0)
    else:
        decimals = max(cell.decimals(decimals), 0)
    return f"{cell.median:.{decimals}f}"


def colouring(report: Report, cells: Mapping[tuple[str, str], Cell], columns: Sequence[str]) -> Colouring:
    """Chooses what the colours of cells mean, from the chance and the threshold of success in the grid.

    cells: those that have a median, by row and column.
    """
    chances = {column: report.spec.of(column, "chance") for column in columns}
    select = report.config.select
    most = max(len(cell.values) for cell in cells.values())
    unit = f" in {report.unit}" if report.unit else ""
    number = "median over seeds" if most > 1 else "value"
    every = all(is_percent(report, column) for column in columns)
    if every and None not in chances.values() and len(set(chances.values())) > 1:
        shares = {
            place: min(max((cell.median - chances[place[1]]) / (100 - chances[place[1]]), 0.0), 1.0)
            for place, cell in cells.items()
            if cell.median is not None
        }
        note = f"Number: {number}{unit}. Colour: (median - chance) / (100 - chance), dark is 100 %, light is chance."
        return Colouring(shares, note, shows_chance=True)
    main = every and all(has_main_metric(report, column) for column in columns)
    if main and select is not None and select.success is not None and most > 1:
        counts = {
            place: sum(bool(succeeds(report, cell, value)) for value in cell.values) for place, cell in cells.items()
        }
        legend = tuple(
            (
                Patch(facecolor=SHADES(n / most), edgecolor="#999999", lw=0.4),
                f"{n} of {most}" if n in (0, most) else f"{n}",
            )
            for n in range(most + 1)
        )
        sign = "or less" if smaller_is_better(report.spec.metric) else "or more"
        note = f"Colour: seeds with {select.success:g} % {sign}. Number: {number}{unit}."
        return Colouring({place: count / most for place, count in counts.items()}, note, legend)
    found: dict[tuple[str, str], float] = {}
    for column in columns:
        medians = {
            place: cell.median for place, cell in cells.items() if place[1] == column and cell.median is not None
        }
        found |= dict(zip(medians, _shades(list(medians.values()), report, column), strict=True))
    scale = "from 0 to 100 %" if every else "from the worst (light) to the best (dark) of a column, logarithmic"
    return Colouring(found, f"Number: {number}{unit}. Colour: {scale}.")


def _rows(report: Report, cells: Mapping[tuple[str, str], Cell], columns: Sequence[str]) -> list[str]:
    """The rows that have a value, the best first."""
    rows = list(dict.fromkeys(row for row, _ in cells))
    if all(is_percent(report, column) for column in columns):
        lines = {place: line for place, line in lines_of(report).items() if place in cells}
        return ranked(lines, bool(smaller_is_better(report.spec.metric)))
    shared = [column for column in columns if all((row, column) in cells for row in rows)]

    def worst_first(row: str) -> float:
        scaled = [_scaled(cells[row, column].median or 0.0, report, column) for column in shared]
        return statistics.fmean(scaled) if scaled else 0.0

    return sorted(rows, key=worst_first, reverse=True)


def _scaled(median: float, report: Report, column: str) -> float:
    """A median on the scale of the colours, where larger is better."""
    scaled = median if is_percent(report, column) else math.log(median) if median > 0 else -math.inf
    return -scaled if smaller_is_better(report.spec.of(column, "metric")) else scaled


def _shades(medians: Sequence[float], report: Report, column: str) -> list[float]:
    """The places of a column's medians on the colour map, from 0 to 1."""
    scaled = [_scaled(median, report, column) for median in medians]
    finite = [value for value in scaled if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if is_percent(report, column):
        low, high = (-100.0, 0.0) if smaller_is_better(report.spec.of(column, "metric")) else (0.0, 100.0)
    # equal medians are all the best
    return [min(max((value - low) / (high - low), 0.0), 1.0) if high > low else value - low + 1.0 for value in scaled]


def draw_successes(report: Report, words: Words, width: Width) -> Canvas:
    """The seeds that succeed at every value of `select.best_of`."""
    found = report.figure.successes
    values = sorted({value for line in found for value, _, _ in line.tried}, key=rank)
    several = len({line.column for line in found}) > 1
    labels = [line.row + f", {line.column}" * several for line in found]
    names = [setting_text(value) for value in values]
    room = WIDTHS[width] - 0.2
    # long labels have two lines, as a field has
    wrap = min(max(measure(label, SMALL) for label in labels) + 0.02, room / 3)
    slot = (room - wrap) / len(values)
    upright = max(measure(name, SMALL) for name in names) > slot - 0.04
    head = max(measure(name, SMALL) for name in names) if upright else 0.12
    select = report.config.select
    assert select is not None
    unit = f" {report.unit}".rstrip()
    sign = "less" if smaller_is_better(select.by) else "more"
    note = (
        f"A field: how many of its seeds have {select.success:g}{unit} or {sign}, which is its colour, and below their "
        f"median{f' ({report.unit})' if report.unit else ''}."
    )
    body = 0.3 * len(found) + head + 0.2
    heading = Heading(words.title, words.details, report.figure.spec.x_label, note=f"{note} {words.note}")
    canvas = sheet(width, body, heading)
    ax = canvas.subplots()
    shares = [[float("nan")] * len(values) for _ in found]
    for i, line in enumerate(found):
        for value, successes, runs in line.tried:
            shares[i][values.index(value)] = successes / runs
    _fields(ax, shares)
    for i, line in enumerate(found):
        for (value, successes, runs), median in zip(line.tried, line.medians, strict=True):
            at = values.index(value)
            _number(ax, at, i - 0.2, f"{successes}/{runs}", shares[i][at])
            _number(ax, at, i + 0.24, f"{median:.1f}" if slot > 0.35 else f"{median:.0f}", shares[i][at])
    ax.set_xticks(range(len(values)), [verbatim(name) for name in names], rotation=90 if upright else 0)
    ax.set_yticks(range(len(found)), [filled(label, wrap) for label in labels])
    return canvas


LEARNED, INITIAL = "#0072b2", "#000000"


def draw_kernels(report: Report, words: Words, width: Width) -> Canvas:
    """A panel for each run that recorded kernels: pixels above, and eigenvalues below where there are any."""
    panels = report.figure.kernels
    spectra = any(panel.eigenvalues for panel in panels)
    across = min(len(panels), 4 if width == "page" else 2)
    down = math.ceil(len(panels) / across)
    room = (WIDTHS[width] - 0.5) / across - 0.15
    titles = [filled(panel.title, room, TEXT) for panel in panels]
    head = 0.14 * max(title.count("\n") + 1 for title in titles)
    note = "Colour: |K| over the largest |K| of its kernel at any lag, black is 0 and white is 1."
    names = [(LEARNED, 3.0, "eigenvalue after training"), (INITIAL, 1.8, "before")]
    legend = [(Line2D([], [], ls="none", marker="o", ms=size, color=color), name) for color, size, name in names]
    body = down * (1.9 + head + 1.2 * spectra)
    heading = Heading(words.title, words.details, note=f"{note} {words.note}")
    canvas = sheet(width, body, heading, legend if spectra else ())
    grid = canvas.subplots(
        down * (1 + spectra), across, squeeze=False, height_ratios=[1.9 + head, 1.2][: 1 + spectra] * down
    )
    for ax in grid.flat:
        ax.set_visible(False)
    for i, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        line, column = divmod(i, across)
        above = grid[line * (1 + spectra)][column]
        above.set_visible(True)
        _pixels(above, panel, title)
        above.set_ylabel("layer" if column == 0 else "")
        if spectra:
            below = grid[line * 2 + 1][column]
            below.set_visible(True)
            _spectrum(below, panel)
            below.set_ylabel("arcsinh(Im λ / 2)" if column == 0 else "")
    return canvas


def _pixels(ax: Any, panel: KernelPanel, title: str) -> None:
    width = panel.span * max(map(len, panel.kernels))
    extent = (0, width, len(panel.kernels), 0)
    ax.imshow(panel.kernels, aspect="auto", interpolation="nearest", cmap="gray", vmin=0, vmax=1, extent=extent)
    names = list(dict.fromkeys(panel.layers))
    starts = [panel.layers.index(name) for name in names]
    for start in starts[1:]:
        ax.axhline(start, color="white", lw=1)
    ends = [*starts[1:], len(panel.layers)]
    ax.set_yticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)], [str(n + 1) for n in names])
    ax.xaxis.set_major_locator(MaxNLocator(2))
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title(title, fontsize=TEXT)
    ax.set_xlabel("lag")


def _spectrum(ax: Any, panel: KernelPanel) -> None:
    for values, color, size in ((panel.eigenvalues, LEARNED, 6), (panel.initial, INITIAL, 2.5)):
        x, y = [re for re, _ in values], [math.asinh(im / 2) for _, im in values]
        ax.scatter(x, y, s=size, color=color, linewidths=0)
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.set_xlabel("Re λ")
