"""Draws every seed of every cell: a line for each row of the table, a panel for each of its columns.

A dot is a seed, filled where it succeeds, and a line connects the seeds of a cell. The rows with most seeds that
succeed stand first. Rows with equally many are sorted by the mean of their medians over the columns that all rows have.
A grid may ask for the order of its table instead. A dotted line is chance, a black bar the number of the paper. Where
nothing judges the seeds, a grey band shows those of the best row of a panel: what reaches into it is a tie with the
best. Beside the panels are the costs of a row as numbers.

A seed succeeds from `select.success` of the grid on, or, where the paper has a number, within the tolerance of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from subquad.reports.render.costs import CostColumn, band_of
from subquad.reports.render.finding import DECIDED, Words
from subquad.reports.render.judge import ROUNDING, Cell, shortfall
from subquad.reports.render.report import Report
from subquad.reports.render.sheet import (
    GREY,
    SMALL,
    WIDTHS,
    Canvas,
    Heading,
    Width,
    filled,
    label_rows,
    labelled,
    log_ticks,
    measure,
    sheet,
    verbatim,
    wrapped,
)
from subquad.suite.metrics import smaller_is_better

ALL, SOME, NONE = "#0b62a8", "#e08a00", "#8a8a8a"
"""Colours of a cell of which all, some or none of the seeds succeed; those that do not are hollow besides."""
PLAIN = "#333333"
"""Colour of a cell that nothing judges, with diamonds in place of circles."""
BAND = "#d9e4ee"
"""Colour behind the seeds of the best row."""
TIES = (Patch(color=BAND), "seeds of the best row: a row that reaches there is a tie")
"""The entry of a legend for it."""
PITCH = 0.13
"""Height of a row of three seeds, in inches; more seeds need more room."""
COST_GAP = 0.08


@dataclass(frozen=True)
class Line:
    """The seeds that one row shows in one panel."""

    values: tuple[float, ...]
    succeeded: tuple[bool | None, ...]
    paper: float | None
    lost: int = 0
    """Runs without a value, which have not succeeded."""

    @property
    def all_succeed(self) -> bool:
        return all(self.succeeded) and not self.lost

    @property
    def color(self) -> str:
        if None in self.succeeded:
            return PLAIN
        return ALL if self.all_succeed else SOME if any(self.succeeded) else NONE


def lines_of(report: Report) -> dict[tuple[str, str], Line]:
    """Row and column of every cell that has a value or a number of the paper, in the order of the figure's rows.

    These are the rows of the paper in its order, or, where no paper has numbers, the best first (`figure.order`).
    """
    found = {}
    drawn = report.figure.spec.columns or tuple(report.spec.columns)
    for cell in report.cells:
        paper = None if cell.published is None else cell.published.value
        if cell.column in drawn and (cell.values or (paper is not None and cell.planned)):
            succeeded = tuple(succeeds(report, cell, value) for value in cell.values)
            found[cell.row, cell.column] = Line(cell.values, succeeded, paper, cell.lost)
    if report.figure.spec.order == "table" or any(line.paper is not None for line in found.values()):
        return found
    # percentages are never averaged with other numbers
    alike = {place: line for place, line in found.items() if is_percent(report, place[1]) == (report.unit == "%")}
    rows = dict.fromkeys([*ranked(alike, lower_is_better(report)), *(row for row, _ in found)])
    order = {row: i for i, row in enumerate(rows)}
    return dict(sorted(found.items(), key=lambda item: order[item[0][0]]))


def has_main_metric(report: Report, column: str) -> bool:
    """Whether a column shows the metric of the table and none of its own, so that its threshold applies."""
    return bool(report.spec.of(column, "metric") == report.spec.metric)


def is_percent(report: Report, column: str) -> bool:
    """Whether the numbers of a column are percentages."""
    return any(cell.unit == "%" for cell in report.cells if cell.column == column and cell.values)


def lower_is_better(report: Report) -> bool:
    """Whether the smallest number is the best in the columns of a report."""
    return bool(smaller_is_better(report.spec.metric))


def succeeds(report: Report, cell: Cell, value: float) -> bool | None:
    """Whether a seed reaches `select.success`, or else the paper's number; None where neither is there to judge it."""
    select = report.config.select
    if select is not None and select.success is not None and has_main_metric(report, cell.column):
        sign = -1 if smaller_is_better(report.spec.of(cell.column, "metric")) else 1
        return sign * value >= sign * select.success
    if cell.published is not None and cell.verdict in DECIDED:
        return shortfall(value, cell.published) <= report.spec.of(cell.column, "tolerance") + ROUNDING
    return None


def ranked(lines: Mapping[tuple[str, str], Line], lower: bool) -> list[str]:
    """The rows by the number of their seeds that succeed, then by the mean of their medians."""
    rows = list(dict.fromkeys(row for row, _ in lines))
    columns = list(dict.fromkeys(column for _, column in lines))
    measured = [row for row in rows if any(lines[row, c].values for c in columns if (row, c) in lines)]
    shared = [c for c in columns if all((row, c) in lines and lines[row, c].values for row in measured)]

    def key(row: str) -> tuple[float, float]:
        there = [lines[row, column] for column in columns if (row, column) in lines]
        medians = [statistics.median(lines[row, column].values) for column in shared] if row in measured else []
        middle = statistics.fmean(medians) if medians else float("inf") if lower else float("-inf")
        return -sum(sum(map(bool, line.succeeded)) for line in there), middle if lower else -middle

    # sorting is stable: of equal rows the first of the table comes first
    return sorted(rows, key=key)


def ties(report: Report, column: str, lines: Sequence[Line | None]) -> tuple[float, float] | None:
    """The smallest and the largest seed of the best row of a panel; None where seeds are judged, or it has just one."""
    there = [line for line in lines if line is not None and line.values]
    if any(line.color != PLAIN or line.paper is not None for line in there):
        return None
    return band_of([line.values for line in there], bool(smaller_is_better(report.spec.of(column, "metric"))))


NARROWEST: Mapping[Width, float] = {"page": 0.7, "column": 0.4}
"""Width of a panel from which on it is readable, in inches; more panels than fit are below each other."""


def draw_seeds(report: Report, words: Words, costs: Sequence[CostColumn], width: Width) -> Canvas:
    """The figure of a report whose cells have values.

    words: title and captions (`finding.words_of`).
    costs: numbers beside the panels (`costs.columns_of`).
    """
    lines = lines_of(report)
    rows = list(dict.fromkeys(row for row, _ in lines))
    columns = [column for column in report.spec.columns if any((row, column) in lines for row in rows)]
    labels, wide, high = labelled(rows, width)
    beside = [max(_cost_width(cost, rows, 2 if width == "page" else 3), 0.3) for cost in costs]
    free = WIDTHS[width] - 0.32 - wide - sum(beside) - COST_GAP * len(costs)
    bands = math.ceil(len(columns) / max(int(free / NARROWEST[width]), 1))
    across = math.ceil(len(columns) / bands)
    room = free / across
    titles = {column: _title(report, column, [lines.get((row, column)) for row in rows], room) for column in columns}
    names = [filled(cost.label, space, SMALL) for cost, space in zip(costs, beside, strict=True)]
    head = max(text.count("\n") + 1 for text in [*titles.values(), *names])
    most = max(len(line.values) for line in lines.values())
    pitch = max(PITCH + 0.006 * min(max(most - 3, 0), 5), high)
    body = bands * (pitch * (len(rows) + 0.6) + 0.125 * head + 0.28)
    heading = Heading(words.title, words.details, words.x_label, note=words.note)
    canvas = sheet(width, body, heading, _legend(report, lines))
    ratios = [*[room] * across, *beside]
    grid = canvas.subplots(bands, across + len(costs), squeeze=False, sharey=True, width_ratios=ratios)
    for i, ax in enumerate([ax for band in grid for ax in band[:across]]):
        if i >= len(columns):
            ax.set_visible(False)
            continue
        _panel(ax, report, [lines.get((row, columns[i])) for row in rows], columns[i], room)
        ax.set_title(titles[columns[i]], fontsize=SMALL, loc="left")
    for band in grid:
        for ax, cost, name in zip(band[across:], costs, names, strict=True):
            _numbers(ax, cost, rows, name)
        label_rows(band[0], labels)
    grid[0][0].set_ylim(len(rows) - 0.4, -0.6)
    return canvas


def _title(report: Report, column: str, lines: Sequence[Line | None], room: float) -> str:
    """The column, and below it how many rows succeed with every seed, if a threshold says what that is."""
    select = report.config.select
    measured = [line for line in lines if line is not None and line.values]
    count = ""
    judged = select is not None and select.success is not None and has_main_metric(report, column)
    if judged and len(measured) > 1:
        count = f"{sum(line.all_succeed for line in measured)} of {len(measured)}"
        whole = f"{count} with every seed"
        count = whole if measure(whole, SMALL) < room else count
    return verbatim("\n".join([*wrapped(column, room - 0.01, SMALL), *wrapped(count, room, SMALL)]))


def _cost_width(cost: CostColumn, rows: Sequence[str], lines: int) -> float:
    """Width of a column of numbers whose title has at most so many lines, where its words allow that."""
    words = cost.label.split()
    titles = [" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    found = sorted(measure(title, SMALL) for title in titles)
    title = next(room for room in found if len(wrapped(cost.label, room, SMALL)) <= max(lines, 1))
    return max(title, *(measure(cost.text(row), SMALL) for row in rows)) + 0.03


def _panel(ax: Any, report: Report, lines: Sequence[Line | None], column: str, room: float) -> None:
    percent = is_percent(report, column)
    chance = report.spec.of(column, "chance")
    several = max((len(line.values) for line in lines if line is not None), default=1) > 1
    band = ties(report, column, lines)
    if band is not None:
        ax.axvspan(*band, color=BAND, lw=0.8, zorder=0)
    for y, line in enumerate(lines):
        ax.axhline(y, color="#e8e8e8", lw=0.4, zorder=0)
        if line is None:
            continue
        if len(line.values) > 1:
            ax.plot([min(line.values), max(line.values)], [y, y], color=line.color, lw=1.0, alpha=0.6, zorder=2)
        # seeds of one value are beside each other, so that each of them is seen
        step = 0.26 if several else 0.0
        for i, (value, succeeded) in enumerate(zip(line.values, line.succeeded, strict=True)):
            at = y + step * (i - (len(line.values) - 1) / 2) * min(1.0, 2 / max(len(line.values) - 1, 1))
            face = "white" if succeeded is False else line.color
            ax.plot(
                value,
                at,
                "D" if succeeded is None else "o",
                ms=2.9,
                mfc=face,
                mec=line.color,
                mew=0.6,
                zorder=3,
                clip_on=False,
            )
        if line.paper is not None:
            ax.plot(line.paper, y, "|", ms=7, mew=1.3, color="black", zorder=4, clip_on=False)
    if chance is not None:
        ax.axvline(chance, color="black", lw=0.7, ls=":", zorder=1)
    if percent:
        ax.set_xlim(-3, 103)
        ax.set_xticks([0, 50, 100] if room > 0.6 else [0, 100])
    elif report.figure.spec.y_log10:
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        ticks = log_ticks(low, high, room)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(3 if room > 0.8 else 2))
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _numbers(ax: Any, cost: CostColumn, rows: Sequence[str], name: str) -> None:
    """A column of numbers, aligned to the right."""
    for y, row in enumerate(rows):
        ax.text(1.0, y, cost.text(row), ha="right", va="center_baseline", fontsize=SMALL, color="#333333")
    ax.set_xlim(0, 1)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(name, fontsize=SMALL, loc="right", color=GREY)


def _legend(report: Report, lines: Mapping[tuple[str, str], Line]) -> list[tuple[Any, str]]:
    def dot(color: str, face: str, mark: str = "o") -> Line2D:
        return Line2D([], [], ls="none", marker=mark, ms=4, color=color, mfc=face, mew=0.8)

    shown = {line.color for line in lines.values() if line.values}
    judged = _threshold(report)
    found: list[tuple[Any, str]] = []
    one = "run" if report.timed else "seed"
    names = ((ALL, ALL, f"every {one} {judged}"), (SOME, SOME, f"some {one}s do"), (NONE, "white", f"no {one} does"))
    found += [(dot(color, face), label) for color, face, label in names if color in shown]
    if SOME in shown:
        found.append((dot(SOME, "white"), f"{one} that does not"))
    if PLAIN in shown:
        found.append((dot(PLAIN, PLAIN, "D"), "ours, not judged" if len(shown) > 1 else "ours"))
    if any(line.paper is not None for line in lines.values()):
        found.append((Line2D([], [], ls="none", marker="|", ms=7, mew=1.3, color="black"), report.spec.reference))
    columns = dict.fromkeys(column for _, column in lines)
    if any(ties(report, c, [line for place, line in lines.items() if place[1] == c]) for c in columns):
        found.append(TIES)
    if any(report.spec.of(column, "chance") is not None for _, column in lines):
        found.append((Line2D([], [], ls=":", lw=0.9, color="black"), "chance"))
    return found


def _threshold(report: Report) -> str:
    """The condition under which a seed counts as a success, in words."""
    select = report.config.select
    if select is not None and select.success is not None:
        unit = " %" if report.unit == "%" else f" {report.unit}".rstrip()
        return f"has {select.success:g}{unit} or {'less' if lower_is_better(report) else 'more'}"
    return f"is as good as the {report.spec.reference}"
