"""Draws lines: our median over the seeds at every x, a dot for every seed, and the paper's numbers dashed.

Up to eight rows share their axes. More rows, or rows of trained models beside numbers of the paper, have a panel each,
with how many of the row's numbers agree in its title.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from subquad.reports.render.figure import Figure, Series, looks_of
from subquad.reports.render.finding import DECIDED, Words
from subquad.reports.render.report import Report
from subquad.reports.render.sheet import (
    GREY,
    SMALL,
    TEXT,
    WIDTHS,
    Canvas,
    Heading,
    Width,
    filled,
    log_ticks,
    measure,
    sheet,
    verbatim,
)
from subquad.suite.settings.grid import lookup, order

MOST_LINES = 8
"""More rows than these have a panel each."""
NARROWEST: Mapping[Width, float] = {"page": 1.3, "column": 1.25}
"""Width of a panel of one row, in inches."""
OURS = "#0b62a8"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    series: tuple[Series, ...]
    behind: tuple[Series, ...] = ()
    """Rows that are drawn in grey, to be compared with."""
    note: str = ""
    """Why the line of a row ends before the others."""


def draw_lines(report: Report, words: Words, width: Width) -> Canvas:
    """The figure of a report over some x.

    words: title and captions (`finding.words_of`).
    """
    figure = report.figure
    rows = list(dict.fromkeys(series.label for _, panel in figure.panels for series in panel))
    published = any(series.published for _, panel in figure.panels for series in panel)
    apart = len(rows) > MOST_LINES or (published and not report.timed)
    panels = _multiples(report, published) if apart else [Panel(title, series) for title, series in figure.panels]
    across = min(len(panels), _across(width, len(panels), apart))
    down = math.ceil(len(panels) / across)
    room = (WIDTHS[width] - 0.5) / across - 0.12
    titles = [filled(panel.title, room, TEXT) for panel in panels]
    head = max(title.count("\n") + 1 for title in titles) * bool(any(titles))
    axis = _Axis(figure, [series for panel in panels for series in panel.series], room)
    height = 1.0 if apart else 2.1
    body = down * (height + 0.14 * head) + axis.height * (1 if apart else down) + 0.1
    looks = dict.fromkeys(rows, (OURS, "")) if apart else looks_of(rows)
    y_label = figure.spec.y_label or figure.spec.y.replace("_", " ")
    metrics = {report.spec.of(column, "metric") for column in report.spec.columns}
    shown = f"Of these: {y_label.partition(' (')[0]}" if len(metrics) > 1 else ""
    heading = Heading(words.title, words.details or shown, _x_label(report, axis), y_label, words.note)
    chance = _chance(report)
    legend = _legend(figure, looks, apart)
    legend += [(Line2D([], [], ls=":", lw=0.9, color="black"), "chance")] * (chance is not None)
    canvas = sheet(width, body, heading, legend)
    grid = canvas.subplots(down, across, sharex=apart, sharey=True, squeeze=False)
    axes = [ax for line in grid for ax in line]
    for ax, panel, title in zip(axes, panels, titles, strict=False):
        for series in panel.behind:
            ax.plot(*axis.line(series), color="#d0d0d0", lw=0.6, zorder=1)
        for series in panel.series:
            _draw_series(ax, axis, series, looks[series.label], apart)
        if panel.note:
            note = filled(panel.note, 0.55 * room)
            ax.text(0.97, 0.6, note, transform=ax.transAxes, ha="right", color=GREY, fontsize=SMALL)
        if chance is not None:
            ax.axhline(chance, color="black", lw=0.7, ls=":", zorder=1)
        axis.apply(ax)
        if figure.spec.y_log10:
            log_y(ax)
        ax.set_title(title, fontsize=TEXT)
        _note_hidden(ax, figure, axis, panel.series)
    _mark_training_length(report, axes[: len(panels)], axis)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    if apart and len(axes) > len(panels):
        # the panels above the free places have the ticks of the axis that they share
        for ax in grid[-2][len(panels) - (down - 1) * across :]:
            ax.tick_params(axis="x", labelbottom=True)
    return canvas


def _across(width: Width, count: int, apart: bool) -> int:
    """The number of panels in a line of panels."""
    most = int((WIDTHS[width] - 0.5) / NARROWEST[width]) if apart else 3 if width == "page" else 1
    # as few free places as possible, of equal ones the widest panels
    return min(range(max(most - 2, 1), most + 1), key=lambda n: (-count % n, math.ceil(count / n), n))


def _multiples(report: Report, published: bool) -> list[Panel]:
    """A panel for every row, and for every value of `figure.panels`."""
    found = []
    for name, series in report.figure.panels:
        for row in series:
            title = f"{row.label}, {name}" if name else row.label
            decided = [cell for cell in report.cells if cell.row == row.label and cell.verdict in DECIDED]
            counts = Counter(cell.verdict for cell in decided)
            if decided and not name:
                better = f", {counts['better']} better" if counts["better"] else ""
                title += f": {counts['agrees']} of {len(decided)} agree{better}"
            behind = () if published else tuple(other for other in series if other is not row)
            found.append(Panel(title, (row,), behind, _ended(report, row)))
    return found


def _ended(report: Report, row: Series) -> str:
    """Why a row has no point beyond its last one: `oom past 16K`, or why the paper has none."""
    if not row.points:
        return ""
    reason = row.ended
    if not reason and not any(x == row.points[-1].x for x, _ in row.published[-1:]):
        return ""
    lost = [report.published.get((row.label, column)) for column in report.spec.columns]
    if not reason and any(one is not None and one.value is None and one.note.startswith("oom") for one in lost):
        reason = f"{report.spec.reference}: oom"
    return f"{reason} past {short(row.points[-1].x)}" if reason else ""


class _Axis:
    """The horizontal axis that all panels have: where each x is, and which of them have a tick."""

    def __init__(self, figure: Figure, series: Sequence[Series], room: float) -> None:
        self.figure = figure
        # columns keep the order of the table
        columns = figure.spec.x == "column"
        self.found = ticks_of(series) if columns else sorted(ticks_of(series), key=order)
        self.numbers = all(isinstance(x, (int, float)) for x in self.found)
        # a zero has no place on a logarithmic axis
        self.log = figure.spec.x_log2 and self.numbers and min(self.found, default=0) > 0
        # words stand side by side
        self.place = {x: x if self.numbers else i for i, x in enumerate(self.found)}
        self.words = [] if self.numbers else [str(x) for x in self.found]
        slot = room / max(len(self.found), 1)
        longest = max((measure(part, SMALL) for word in self.words for part in word.split()), default=0.0)
        self.upright = longest > slot
        if self.words and not self.upright:
            self.words = [filled(word, slot, SMALL) for word in self.words]
        lines = max((word.count("\n") + 1 for word in self.words), default=1)
        self.room = room
        self.height = max(measure(word, SMALL) for word in self.words) + 0.1 if self.upright else 0.12 * lines + 0.1

    def line(self, series: Series) -> tuple[list[float], list[float]]:
        return [self.place[point.x] for point in series.points], [point.y for point in series.points]

    def tick(self, x: float) -> str:
        return short(x) if self.log else rounded(x)

    def apply(self, ax: Any) -> None:
        if self.log:
            ax.set_xscale("log", base=2)
        stated = not self.figure.spec.x.startswith("metric.")
        if not self.numbers:
            ax.set_xticks(range(len(self.found)), [verbatim(w) if self.upright else w for w in self.words])
            if self.upright:
                ax.tick_params(axis="x", labelrotation=90)
        elif stated and (self.log or self.figure.spec.x != "step"):
            kept = self._fitting()
            ax.set_xticks(kept, [self.tick(x) for x in kept])
            ax.xaxis.set_minor_locator(NullLocator())
        elif self.log:
            kept = log_ticks(min(self.found), max(self.found), self.room)
            ax.set_xticks(kept, [rounded(x) for x in kept])
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.xaxis.set_major_locator(MaxNLocator(max(int(self.room / 0.45), 1)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rounded(value)))
            ax.xaxis.set_minor_formatter(NullFormatter())

    def _fitting(self) -> list[float]:
        """The x whose ticks fit beside each other: every n-th one, the last in any case."""
        at = [math.log2(x) if self.log else x for x in self.found]
        span = (max(at) - min(at)) or 1.0
        inches = [(x - min(at)) / span * self.room * 0.9 for x in at]
        widths = [measure(self.tick(x), SMALL) for x in self.found]
        for step in range(1, len(self.found) + 1):
            kept = list(range(len(self.found)))[::-1][::step][::-1]
            if all(inches[b] - inches[a] > (widths[a] + widths[b]) / 2 + 0.05 for a, b in itertools.pairwise(kept)):
                break
        return [self.found[i] for i in kept]


def _draw_series(ax: Any, axis: _Axis, series: Series, look: tuple[str, str], apart: bool) -> None:
    color, marker = look
    x, y = axis.line(series)
    if x:
        ax.plot(x, y, color=color, marker=marker or "o", ms=2.5 if apart else 3.5, lw=1.1, zorder=3)
        dots = [(at, value) for at, point in zip(x, series.points, strict=True) for value in point.seeds]
        if len(dots) > len(x):
            # seeds on the limit of an axis are shown whole
            ax.scatter(*zip(*dots, strict=True), s=5, color=color, alpha=0.55, linewidths=0, zorder=2, clip_on=False)
        if series.ended and not apart:
            style: Any = {"textcoords": "offset points", "color": color, "va": "center", "fontsize": SMALL}
            ax.annotate(
                verbatim(series.ended + (f" past {axis.tick(series.points[-1].x)}" if axis.numbers else "")),
                (x[-1], y[-1]),
                (3, 3),
                **style,
            )
    if series.published:
        theirs = sorted((axis.place[x], y) for x, y in series.published)
        ax.plot(
            [x for x, _ in theirs],
            [y for _, y in theirs],
            color="black" if apart else color,
            marker=None if apart else marker,
            ms=4,
            mfc="none",
            ls="--",
            lw=0.9,
            zorder=4,
        )
        if len(theirs) == 1 and apart:
            ax.plot(*theirs[0], marker="_", ms=8, color="black", zorder=4)


def _legend(figure: Figure, looks: Mapping[str, tuple[str, str]], apart: bool) -> list[tuple[Any, str]]:
    series = [each for _, panel in figure.panels for each in panel]
    several = any(len(point.seeds) > 1 for each in series for point in each.points)
    found: list[tuple[Any, str]] = []
    if apart:
        found.append((Line2D([], [], color=OURS, marker="o", ms=2.5, lw=1.1), "ours, median" if several else "ours"))
        if not any(each.published for each in series):
            found.append((Line2D([], [], color="#d0d0d0", lw=0.8), "the other rows"))
    else:
        for label, (color, marker) in looks.items():
            found.append((Line2D([], [], color=color, marker=marker, ms=3.5, lw=1.1), label))
    if several:
        color = OURS if apart else "black"
        found.append((Line2D([], [], ls="none", marker="o", ms=2.5, color=color, alpha=0.6), "one seed"))
    if any(each.published for each in series):
        mark = "None" if apart else "o"
        line = Line2D([], [], ls="--", lw=0.9, marker=mark, ms=4, mfc="none", color="black")
        found.append((line, figure.reference))
    return found


def _chance(report: Report) -> float | None:
    """The level of chance of a figure of percentages, if all columns have the same."""
    levels = {report.spec.of(column, "chance") for column in report.spec.columns}
    return levels.pop() if report.unit == "%" and len(levels) == 1 else None


def _x_label(report: Report, axis: _Axis) -> str:
    figure = report.figure
    length = _training_length(report)
    line = "grey line: " if _in_range(length, axis) else ""
    trained = f" ({line}trained at {short(length)})" if length else ""
    name, _, device = figure.x_label.partition("\n")
    return f"{name}{trained}\n{device}" if device else f"{name}{trained}"


def _training_length(report: Report) -> float | None:
    """The length of training of a figure over test lengths, if all runs share it."""
    if report.timed or report.figure.spec.x != "slice.length":
        return None
    lengths = {lookup(run.config, report.figure.spec.trained) for run in report.runs}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if isinstance(length, (int, float)) else None


def _in_range(length: float | None, axis: _Axis) -> bool:
    return length is not None and axis.numbers and bool(axis.found) and axis.found[0] <= length <= axis.found[-1]


def _mark_training_length(report: Report, axes: Sequence[Any], axis: _Axis) -> None:
    length = _training_length(report)
    if _in_range(length, axis):
        for ax in axes:
            ax.axvline(length, color="#aaaaaa", lw=0.8, zorder=0)


def _note_hidden(ax: Any, figure: Figure, axis: _Axis, panel: Sequence[Series]) -> None:
    """Says below the upper edge how many values a logarithmic axis cannot show."""
    heights = [y for series in panel for y in heights_of(series)]
    hidden = below(figure.spec.y_log10, heights) + below(axis.log, axis.found if axis.log else [])
    if hidden:
        text = f"{hidden} at or below 0 not shown"
        ax.text(0.98, 0.98, text, transform=ax.transAxes, ha="right", va="top", fontsize=SMALL)


def heights_of(series: Series) -> list[float]:
    """The y of all seeds of a series and of the published points."""
    return [*(value for point in series.points for value in point.seeds), *(y for _, y in series.published)]


def below(log: bool, values: Sequence[float]) -> int:
    """The number of values that a logarithmic axis cannot show."""
    return sum(not value > 0 for value in values) if log else 0


def log_y(ax: Any) -> None:
    """A logarithmic axis with plain numbers; an axis of less than two decades has ticks at 2 and 5, too.

    An axis with a zero stays linear, because its row would be drawn nowhere.
    """
    if ax.dataLim.y0 <= 0:
        return
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


def rounded(number: float) -> str:
    """A tick in thousands or millions, from ten of them on: 500, 1500, 20K, 15M."""
    for size, name in ((1e6, "M"), (1e3, "K")):
        if abs(number) >= 10 * size:
            return f"{number / size:g}{name}"
    return f"{number:g}"


def ticks_of(panel: Sequence[Series]) -> list[Any]:
    """The x of all points, in order of appearance."""
    return list(dict.fromkeys(x for s in panel for x in (*(p.x for p in s.points), *(x for x, _ in s.published))))
