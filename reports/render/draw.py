"""Draws the figure of a report, and the scoreboard as bars, with matplotlib's Agg and SVG backends.

There is no window and no global state.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from subquad.reports.render.count import FEW, JUDGED
from subquad.reports.render.document import REDUCED, STAND_IN, Document
from subquad.reports.render.figure import Figure, Series, colors_of, shade
from subquad.reports.render.report import Report
from subquad.reports.render.tiles import (
    COLUMN_WIDTH,
    COST_WIDTH,
    ROW,
    draw_cells,
    draw_kernels,
    draw_successes,
    filled_columns,
    named,
    ranked,
    verbatim,
)
from subquad.suite.settings.grid import order

MARKERS = "osD^vP*XhX"
LEGEND_LINE = 0.19
"""Height of a line of the legend, in inches."""
LEGEND_PLACE: Any = {"loc": "outside right center", "frameon": False}
AXIS_LETTERS = 54
"""Number of letters of a tick that fit below a panel."""
MANY_TICKS = 8
"""With more ticks than this, the words below the bars are turned upright, because they no longer fit side by side."""
STYLE: Any = {
    "svg.hashsalt": "subquad",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def draw(report: Report) -> Canvas | None:
    """The figure of a report, or None where it has none or where there is nothing to show."""
    figure = report.figure
    if figure is None or figure.empty:
        return None
    if figure.cells:
        width = 3.0 + COLUMN_WIDTH * len(filled_columns(figure.cells)) + COST_WIDTH * bool(figure.costs)
        size = width, 1.0 + 0.24 * len(ranked(figure, report.unit))
        return _painted(report, size, lambda canvas: draw_cells(canvas, figure, report.unit, report.decimals))
    if figure.kernels:
        size = 1.6 + 2.6 * len(figure.kernels), 6.0
        return _painted(report, size, lambda canvas: draw_kernels(canvas, figure.kernels))
    if figure.successes:
        size = 6.6, 1.4 + 0.42 * len(figure.successes)
        label = figure.spec.x_label
        return _painted(report, size, lambda canvas: draw_successes(canvas, figure.successes, label, report.unit))
    width = 4.6 if figure.spec.kind == "lines" else max(4.6, *(0.45 * len(_ticks(panel)) for _, panel in figure.panels))
    # upright words below the bars need more height
    tall = figure.spec.kind == "bars" and any(len(_ticks(panel)) > MANY_TICKS for _, panel in figure.panels)
    # the panels share a legend, which has up to two more lines than rows
    rows = {series.label for _, panel in figure.panels for series in panel}
    height = max(6.6 if tall else 3.6, LEGEND_LINE * (len(rows) + 2))
    return _painted(report, (1.2 + width * len(figure.panels), height), lambda canvas: _panels(canvas, figure))


def _painted(report: Report, size: tuple[float, float], paint: Callable[[Canvas], None]) -> Canvas:
    """Returns a canvas of this size, in inches, that `paint` has drawn on, with the heading of the report."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        paint(canvas)
        canvas.suptitle(verbatim(_heading(report)), fontsize=10)
    return canvas


def _panels(canvas: Canvas, figure: Figure) -> None:
    """Draws lines or bars, panel by panel, with one legend."""
    axes = canvas.subplots(1, len(figure.panels), sharey=True, squeeze=False)[0]
    for ax, (title, panel) in zip(axes, figure.panels, strict=True):
        if figure.spec.kind == "lines":
            _lines(ax, figure, panel)
        else:
            _bars(ax, figure, panel)
        ax.set_title(verbatim(title))
        ax.set_xlabel(verbatim(figure.x_label))
    axes[0].set_ylabel(verbatim(figure.spec.y_label or figure.spec.y))
    found = _legend(figure, axes)
    legend = canvas.legend(list(found.values()), list(map(str, range(len(found)))), **LEGEND_PLACE)
    # set afterwards, because a label that begins with an underscore is left out here, too
    for text, label in zip(legend.get_texts(), found, strict=True):
        text.set_text(verbatim(label))


def _heading(report: Report) -> str:
    marks = {mark for cell in report.cells for mark in cell.marks}
    words = {REDUCED: f"reduced: scale {report.scale}", STAND_IN: "stand-in data"}
    kinds = [word for mark, word in words.items() if mark in marks]
    where = f", {report.device}" if report.timed and report.device else ""
    return report.experiment + where + (f" ({', '.join(kinds)})" if kinds else "")


def _looks(figure: Figure) -> dict[str, tuple[str, str]]:
    """Row label to its colour and marker, the same in all panels, which share one legend and may lack some rows."""
    labels = list(dict.fromkeys(series.label for _, panel in figure.panels for series in panel))
    colors = colors_of(labels)
    return {label: (colors[label], MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)}


def _lines(ax: Any, figure: Figure, panel: tuple[Series, ...]) -> None:
    looks = _looks(figure)
    found = sorted(_ticks(panel), key=order)
    numbers = all(isinstance(x, (int, float)) for x in found)
    # words stand side by side
    place = {x: x if numbers else i for i, x in enumerate(found)}
    for series in panel:
        color, marker = looks[series.label]
        x = [place[point.x] for point in series.points]
        y = [point.y for point in series.points]
        if x:
            ax.plot(x, y, color=color, marker=marker, ms=4, lw=1.4, label=named(series.label))
            _seeds(ax, x, series, color, "none")
            if series.ended:
                ax.annotate(
                    verbatim(series.ended), (x[-1], y[-1]), (5, 0), textcoords="offset points", color=color, va="center"
                )
        if series.published:
            theirs = sorted((place[x], y) for x, y in series.published)
            ax.plot(
                [x for x, _ in theirs],
                [y for _, y in theirs],
                color=color,
                marker=marker,
                ms=5,
                mfc="none",
                ls="--",
                lw=1,
                # a row of which nothing is measured has no other line that would name it
                label="_paper" if x else named(series.label),
            )
    if figure.spec.x_log2 and numbers:
        ax.set_xscale("log", base=2)
    # costs are no round numbers, which could be ticks
    stated = not figure.spec.x.startswith("metric.")
    if not numbers:
        ax.set_xticks(range(len(found)), [verbatim(str(x)) for x in found])
    elif stated and (figure.spec.x_log2 or (figure.spec.x != "step" and len(found) <= MANY_TICKS)):
        # every second one where there are many, the last one in any case
        step = -(-len(found) // MANY_TICKS)
        kept = found[::-1][::step][::-1]
        ax.set_xticks(kept, [short(x) for x in kept])
        ax.xaxis.set_minor_locator(NullLocator())
    if figure.spec.y_log10:
        _log_y(ax)
    hidden = _below(figure.spec.y_log10, [y for s in panel for y in _heights(s)])
    hidden += _below(figure.spec.x_log2 and numbers, [x for x in found if numbers])
    _note(ax, hidden)


def _heights(series: Series) -> list[float]:
    """The y of all seeds of a series and of the published points."""
    return [*(value for point in series.points for value in point.seeds), *(y for _, y in series.published)]


def _below(log: bool, values: Sequence[float]) -> int:
    """The number of values that a logarithmic axis cannot show."""
    return sum(not value > 0 for value in values) if log else 0


def _note(ax: Any, hidden: int) -> None:
    """Says below the upper edge how many values a logarithmic axis hides."""
    if hidden:
        text = f"{hidden} at or below 0 not shown"
        ax.text(0.98, 0.98, text, transform=ax.transAxes, ha="right", va="top", fontsize=7)


def _seeds(ax: Any, x: Sequence[float], series: Series, color: str, edge: str) -> None:
    """A dot for every seed, where a mean stands for several."""
    dots = [(at, value) for at, point in zip(x, series.points, strict=True) for value in point.seeds]
    if len(dots) > len(series.points):
        # seeds on the limit of an axis are shown whole
        style = {
            "s": 9,
            "color": color,
            "edgecolors": edge,
            "linewidths": 0.5,
            "alpha": 0.7,
            "zorder": 3,
            "clip_on": False,
        }
        ax.scatter(*zip(*dots, strict=True), **style)


def _log_y(ax: Any) -> None:
    """A logarithmic axis with plain numbers; an axis of less than two decades has ticks at 2 and 5, too."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def short(number: float) -> str:
    """A tick of an axis of powers of two: 8, 512, 16K, 1M, with K of 1024 and M of 1024 K."""
    for size, name in ((2**20, "M"), (2**10, "K")):
        if number >= 8192 and number >= size and number % size == 0:
            return f"{number / size:g}{name}"
    return f"{number:g}"


def _ticks(panel: tuple[Series, ...]) -> list[Any]:
    """The x of every group of bars, in order of appearance."""
    return list(dict.fromkeys(x for s in panel for x in (*(p.x for p in s.points), *(x for x, _ in s.published))))


def _bars(ax: Any, figure: Figure, panel: tuple[Series, ...]) -> None:
    ticks = _ticks(panel)
    looks, width = _looks(figure), 0.8 / max(len(panel), 1)
    for i, series in enumerate(panel):
        color, offset = looks[series.label][0], (i - (len(panel) - 1) / 2) * width
        if series.points:
            ax.bar(
                [ticks.index(point.x) + offset for point in series.points],
                [point.y for point in series.points],
                width,
                color=color,
                label=named(series.label),
            )
            _seeds(ax, [ticks.index(point.x) + offset for point in series.points], series, "white", "black")
        if series.published:
            ax.plot(
                [ticks.index(x) + offset for x, _ in series.published],
                [y for _, y in series.published],
                ls="none",
                marker="o",
                ms=5,
                mfc="none",
                # a row without bars has circles of its own colour, which the legend names
                color="black" if series.points else color,
                label=named(figure.reference if series.points else series.label),
            )
    # words side by side share the width; upright ones stay in one line
    room = AXIS_LETTERS // max(len(ticks), 1) - 1 if len(ticks) <= MANY_TICKS else AXIS_LETTERS
    ax.set_xticks(
        range(len(ticks)), [textwrap.fill(verbatim(str(tick)), room, break_long_words=False) for tick in ticks]
    )
    if len(ticks) > MANY_TICKS:
        ax.tick_params(axis="x", labelrotation=90)
    if figure.spec.y_log10:
        _log_y(ax)
    _note(ax, _below(figure.spec.y_log10, [y for s in panel for y in _heights(s)]))


def _legend(figure: Figure, axes: Any) -> dict[str, Any]:
    """The labels of the legend, each with its line or marker."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label.removeprefix(ROW), handle)
    if figure.spec.kind == "lines" and any(series.published for _, panel in figure.panels for series in panel):
        found[figure.reference] = Line2D([], [], ls="--", lw=1, marker="o", ms=5, mfc="none", color="black")
    if any(len(point.seeds) > 1 for _, panel in figure.panels for series in panel for point in series.points):
        found["one seed"] = Line2D([], [], ls="none", marker="o", ms=3, mfc="white", mec="black", mew=0.5)
    return found


def svg(document: Document) -> str:
    """The figure as SVG text; empty where there is nothing to draw."""
    canvas = document.draw()
    if canvas is None:
        return ""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(document: Document, path: Path) -> Path:
    """Writes the figure as PNG to `path` and as SVG beside it; ValueError where there is nothing to draw."""
    canvas = document.draw()
    if canvas is None:
        raise ValueError(f"{document.name}: nothing to draw; give its grid a figure, or run it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        canvas.savefig(path, dpi=160, metadata={"Software": None})
        canvas.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path


GREEN, BLUE, AMBER, RED = "#3d8f6a", "#4a7fd0", "#c79a2e", "#c9574e"
PALE = 0.5
"""Cells of few seeds have the colour of their verdict, moved so far towards white."""
VERDICT_COLORS = dict(zip(JUDGED, (GREEN, BLUE, AMBER, RED), strict=True))
FEW_COLORS = dict(zip(FEW, (shade(color, PALE) for color in VERDICT_COLORS.values()), strict=True))
CELL_COLORS = VERDICT_COLORS | FEW_COLORS
CELL_COLORS |= {"at chance": "#8a8a8a", "other device": "#9fb3c8", "other data": "#c8b79f", "not run": "#e4e4e4"}
"""Colour of each part of the bar of cells."""
CLAIM_COLORS = {"hold": GREEN, "fail": RED, "unclear": AMBER, "not run": "#e4e4e4"}
SMALLEST = 0.04
"""Share of a bar from which on a part has its number written into it."""


def draw_board(title: str, lines: Sequence[tuple[str, Mapping[str, int]]]) -> Canvas | None:
    """For each paper or experiment a bar of its published cells, and bars of its claims, with a number in each part.

    All bars have the same length. None where nothing is counted.

    lines: name, and what is counted (`count.count`).
    """
    thirds = [("numbers of the paper that a grid has", "", CELL_COLORS), ("claims", "claims: ", CLAIM_COLORS)]
    thirds.append(("claims at reduced scales", "reduced claims: ", CLAIM_COLORS))
    lines = [line for line in lines if any(line[1][start + name] for _, start, names in thirds for name in names)]
    if not lines:
        return None
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        canvas = Canvas(figsize=(11, 1.3 + 0.32 * len(lines)), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(1, 3, sharey=True, width_ratios=[2, 1, 1])
        for ax, (heading, start, colors) in zip(axes, thirds, strict=True):
            for y, (_, counts) in enumerate(lines):
                _bar(ax, y, [(counts[start + name], color) for name, color in colors.items()])
            handles = [ax.barh(0, 0, color=color, label=name) for name, color in colors.items()]
            ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8,
                      ncols=4 if colors is CELL_COLORS else 2,
                      columnspacing=0.8, handlelength=0.9, handletextpad=0.4)  # fmt: skip
            ax.set_title(heading, fontsize=9)
            ax.tick_params(length=0)
            ax.set_xlim(0, 1)
            ax.set_xticks([])
            ax.spines[:].set_visible(False)
        axes[0].set_yticks(range(len(lines)), [verbatim(name) for name, _ in lines])
        axes[0].set_ylim(len(lines) - 0.5, -0.5)
        canvas.suptitle(verbatim(title), fontsize=10)
    return canvas


def _bar(ax: Any, y: int, parts: Sequence[tuple[int, str]]) -> None:
    """Draws one bar of numbers, each with its colour."""
    total = sum(number for number, _ in parts)
    left = 0.0
    for number, color in parts:
        share = number / total if total else 0.0
        ax.barh(y, share, 0.72, left, color=color)
        if share >= SMALLEST:
            ax.text(left + share / 2, y, str(number), ha="center", va="center", fontsize=8)
        left += share
    if not total:
        ax.text(0.01, y, "none", va="center", fontsize=8, color="#777777")
