"""Draws what rows measured on the way: a panel for each column of the table and each cost, both axes logarithmic.

A thin line is a seed, a thick one with marks the median over the seeds. Beside the panels stand the rows with the
median at the end of their line. The band has at every cost the seeds of the row that is best there: a row of which a
seed reaches into it is a tie at this cost. A name on the colour of the band is that of a row which is one at the end of
the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from subquad.reports.render.costs import Curve, bands_of, curves_of, tied
from subquad.reports.render.document import fixed
from subquad.reports.render.figure import looks_of
from subquad.reports.render.finding import on_the_way_label, unknown, words_of
from subquad.reports.render.lines import log_y
from subquad.reports.render.report import Report
from subquad.reports.render.seeds import BAND, TIES
from subquad.reports.render.selection import commonest_device
from subquad.reports.render.sheet import (
    ROW_LINE,
    SMALL,
    TEXT,
    WIDTHS,
    Canvas,
    Heading,
    Width,
    filled,
    labelled,
    log_ticks,
    sheet,
)
from subquad.suite.metrics import smaller_is_better

LOWEST = 1.9
"""Height of a panel, in inches; one with many rows is higher."""
LEADER = 0.22
"""Length of the lines from the ends of the curves to the names of their rows, in inches."""


def has_curves(report: Report) -> bool:
    """Whether some run was evaluated more than once."""
    found = [curve for cost in report.figure.spec.costs for curve in curves_of(report, cost)]
    return any(len(seed) > 1 for curve in found for seed in curve.seeds)


def draw_curves(report: Report, width: Width) -> Canvas:
    """The figure of a report whose runs were evaluated on the way."""
    spec, lower = report.figure.spec, bool(smaller_is_better(report.figure.spec.y))
    found = {cost.label: curves_of(report, cost) for cost in spec.costs}
    rows = list(dict.fromkeys(curve.row for curves in found.values() for curve in curves))
    columns = [name for name in report.spec.columns if any(c.column == name for cs in found.values() for c in cs)]
    across = len(found) if width == "page" else 1
    places = [(column, label) for column in columns for label in found]
    # a name stands behind a number of its length
    labels, wide, _ = labelled([f"{0:.{report.decimals}f} {row}" for row in rows], width)
    high = sum(_height(label) for label in labels)
    height = max(LOWEST, high + 0.1)
    room = (WIDTHS[width] - 0.6 - wide - LEADER) / across
    x_labels = [filled(label, room, TEXT) for label in found]
    under = 0.16 + 0.12 * max(text.count("\n") + 1 for text in x_labels)
    down = len(places) // across
    body = down * (height + 0.17 + under)
    several = any(len(curve.seeds) > 1 for curves in found.values() for curve in curves)
    legend: list[tuple[Any, str]] = [
        (Line2D([], [], color="#333333", lw=1.4), "median of the seeds"),
        (Line2D([], [], color="#333333", lw=0.5), "one seed"),
    ]
    panels = {place: [curve for curve in found[place[1]] if curve.column == place[0]] for place in places}
    bands = {place: bands_of(curves, lower) for place, curves in panels.items()}
    legend = legend * several + [TIES] * any(bands.values())
    notes = unknown(report, {label: {c.row for c in curves} for label, curves in found.items()})
    kept, elsewhere = commonest_device(report.runs)
    if elsewhere and (times := [cost.label for cost in spec.costs if cost.metric == "train_seconds"]):
        notes.append(f"Against {times[0]}: runs on {kept[0].device} alone.")
    words = words_of(report, notes)
    canvas = sheet(width, body, Heading(words.title, words.details, "", on_the_way_label(report), words.note), legend)
    ratios = [*[room] * across, wide + LEADER]
    grid = canvas.subplots(down, across + 1, squeeze=False, width_ratios=ratios, sharey="row" if across > 1 else False)
    looks = looks_of(cell.row for cell in report.cells)
    ends = []
    for i, ((column, label), curves) in enumerate(panels.items()):
        ax = grid[i // across][i % across]
        if band := bands[column, label]:
            ax.fill_between(*zip(*band, strict=True), color=BAND, lw=0.8, zorder=0)
        for curve in curves:
            _curve(ax, curve, *looks[curve.row])
        _axes(ax, curves, room, spec.y_log10)
        ax.set_xlabel(x_labels[i % len(found)])
        if i % len(found) == 0:
            ax.set_title(filled(column, room, TEXT), loc="left", fontsize=TEXT, fontweight="bold")
        if i % across == across - 1:
            ends.append((ax, curves))
    for line in grid:
        line[-1].set_visible(False)
    # names are placed by the positions that the layout gives
    canvas.draw_without_rendering()
    for ax, curves in ends:
        _name(ax, curves, tied(curves, lower), looks, report.decimals, width)
    return canvas


def _curve(ax: Any, curve: Curve, color: str, mark: str) -> None:
    for line in curve.seeds if len(curve.seeds) > 1 else ():
        # one evaluation makes no line and is drawn as a dot
        ax.plot(*zip(*line, strict=True), color=color, marker="." * (len(line) == 1), lw=0.5, alpha=0.7, zorder=2)
    if line := curve.middle:
        # few marks, of which the last is at the end of the line
        apart = max(len(line) // 4, 1)
        every = ((len(line) - 1) % apart, apart)
        ax.plot(*zip(*line, strict=True), color=color, marker=mark, ms=3, markevery=every, lw=1.4, zorder=3)


def _axes(ax: Any, curves: Sequence[Curve], room: float, y_log10: bool) -> None:
    costs = [cost for curve in curves for seed in curve.seeds for cost, _ in seed]
    if costs:
        ax.set_xscale("log")
        low, high = min(costs), max(costs)
        ticks = log_ticks(low, high, room)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    if y_log10:
        log_y(ax)


def _height(label: str) -> float:
    return (label.count("\n") + 1) * ROW_LINE + 0.03


def _name(
    ax: Any, curves: Sequence[Curve], best: set[str], looks: Mapping[str, tuple[str, str]], decimals: int, width: Width
) -> None:
    """Writes beside a panel the last value and the name of each row, near to the end of its curve."""
    inside = ax.get_window_extent()
    inches = inside.height / ax.figure.dpi
    beside = 1 + LEADER * ax.figure.dpi / inside.width
    ends = []
    for curve in curves:
        # seeds without a common cost have no median
        end = (curve.middle or max(curve.seeds, key=lambda seed: seed[-1]))[-1]
        x, y = ax.transAxes.inverted().transform(ax.transData.transform(end))
        ends.append((y, x, curve.row, f"{fixed(end[1], decimals)} {curve.row}"))
    ends.sort()
    labels, _, _ = labelled([text for _, _, _, text in ends], width)
    heights = [_height(label) / inches for label in labels]
    centres = spread([y for y, _, _, _ in ends], heights)
    for (y, x, row, _), label, centre in zip(ends, labels, centres, strict=True):
        look: Any = {"transform": ax.transAxes, "clip_on": False, "in_layout": False}
        line: Any = {"color": looks[row][0], "marker": looks[row][1], "markevery": [1], "ms": 3, "lw": 0.5, **look}
        ax.plot([x, beside - 0.03], [y, centre], scalex=False, scaley=False, **line)
        box = {"facecolor": BAND if row in best else "none", "edgecolor": "none", "pad": 0.6}
        ax.text(beside, centre, label, va="center", fontsize=SMALL, linespacing=1.0, bbox=box, **look)


def spread(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The centres of boxes that do not cover each other, near their places, which rise, and below 1."""
    upper: list[float] = []
    for place, height in zip(places, heights, strict=True):
        upper.append(max(place + height / 2, (upper[-1] if upper else -math.inf) + height))
    edge = 1.0
    for i in reversed(range(len(upper))):
        upper[i] = min(upper[i], edge)
        edge = upper[i] - heights[i]
    return [edge - height / 2 for edge, height in zip(upper, heights, strict=True)]
