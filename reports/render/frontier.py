"""Draws what accuracy costs: a panel for each column of the table and each cost, with the frontier.

A mark is the median of a row's seeds, the line through it their range. The mark is filled if every seed succeeds, where
the grid says what that is. The frontier is that of the worst seeds, so that each height is one which all seeds of a row
reach; it has the rows that no cheaper row equals. Each is named, where the name covers no mark and no other name.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from subquad.reports.render.costs import CostColumn
from subquad.reports.render.finding import Words
from subquad.reports.render.judge import Cell
from subquad.reports.render.report import Report
from subquad.reports.render.seeds import succeeds
from subquad.reports.render.sheet import (
    SMALL,
    TEXT,
    WIDTHS,
    Canvas,
    Heading,
    Width,
    filled,
    measure,
    sheet,
    verbatim,
    wrapped,
)
from subquad.suite.metrics import smaller_is_better

KINDS = (
    ("delta rule", r"delta|kda|rwkv-?7", "#b07cd8", "D"),
    ("linear attention", r"linear|lightning|based|retnet|gla|hgrn|gsa|abc|rwkv-?6|mlstm", "#1b9e77", "o"),
    ("state space model", r"s4|s5|s6|ssm|dss|gss|h3|mamba", "#2f62c4", "^"),
    ("softmax attention", r"attention|transformer|mha|gpt|pythia|llama", "#111111", "s"),
    ("another kind", "", "#d98200", "v"),
)
"""Kinds of mixers, each with the names that belong to it, its colour and its mark; the first that fits counts."""


@dataclass(frozen=True)
class Dot:
    """One row in one panel."""

    row: str
    cost: float
    median: float
    low: float
    high: float
    solid: bool = True
    """Whether every seed succeeds."""

    def worst(self, lower: bool) -> float:
        """The worst seed; lower: whether a smaller number is the better one."""
        return self.high if lower else self.low


def kind_of(row: str) -> tuple[str, str, str]:
    """Kind, colour and mark of a row, by its name."""
    for kind, pattern, color, mark in KINDS:
        if re.search(rf"(?<![a-z0-9])(?:gated )?(?:{pattern})", row.lower()):
            return kind, color, mark
    raise AssertionError("the last pattern fits every name")


def frontier(dots: Sequence[Dot], lower: bool, tolerance: float) -> list[Dot]:
    """The dots whose worst seed is better than that of every cheaper one by more than the tolerance, cheapest first.

    lower: whether a smaller number is the better one.
    """
    sign = -1 if lower else 1
    found: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.cost, -sign * dot.worst(lower))):
        if not found or sign * (dot.worst(lower) - found[-1].worst(lower)) > tolerance:
            found.append(dot)
    return found


def draw_costs(report: Report, words: Words, costs: Sequence[CostColumn], width: Width) -> Canvas:
    """The figure of a report whose cells have values. Raises ValueError where no cost is known.

    words: title and captions (`finding.words_of`); costs: see `costs.columns_of`.
    """
    if not costs:
        raise ValueError(f"{report.experiment}: no cost of its rows is known, so there is nothing to draw them against")
    measured = [cell for cell in report.cells if cell.values]
    columns = list(dict.fromkeys(cell.column for cell in measured))
    rows = list(dict.fromkeys(cell.row for cell in measured))
    lower, tolerance = bool(smaller_is_better(report.spec.metric)), report.spec.tolerance
    kinds = [(kind, color, mark) for kind, _, color, mark in KINDS if any(kind_of(row)[0] == kind for row in rows)]
    legend: list[tuple[Any, str]] = [
        (Line2D([], [], ls="none", marker=mark, ms=4, color=color), kind) for kind, color, mark in kinds
    ]
    legend.append((Line2D([], [], ls="--", lw=0.9, color="black"), "frontier: the cheapest at each height"))
    several = any(len(cell.values) > 1 for cell in measured)
    if several:
        legend.append((Line2D([], [], color="#999999", lw=1), "range of the seeds"))
    solid = {id(cell): _is_solid(report, cell) for cell in measured}
    if not all(solid.values()):
        hollow = Line2D([], [], ls="none", marker="o", ms=4, color="#555555", mfc="white", mew=0.8)
        select = report.config.select
        reached = f"{select.success:g}" if select is not None and select.success is not None else "the paper"
        legend.append((hollow, f"hollow: not every seed reaches {reached}{' %' * (report.unit == '%')}"))
    room = (WIDTHS[width] - 0.5) / len(costs)
    height = 1.5 if width == "page" else 1.3
    titles = {column: verbatim("\n".join(wrapped(column, room - 0.1, TEXT, "bold"))) for column in columns}
    body = sum(height + 0.07 + 0.13 * (title.count("\n") + 1) for title in titles.values()) + 0.3
    title = f"What it costs: {report.title}"
    what = "the worst seed" if several else "a value"
    note = f"Marks: medians. The frontier rises where {what} is better by more than {tolerance:g}. {words.note}"
    canvas = sheet(width, body, Heading(title, "", "", words.x_label, note), legend)
    axes = canvas.subplots(len(columns), len(costs), sharex="col", sharey=True, squeeze=False)
    panels = []
    for line, column in zip(axes, columns, strict=True):
        for ax, cost in zip(line, costs, strict=True):
            dots = [
                Dot(
                    cell.row,
                    cost.values[cell.row],
                    statistics.median(cell.values),
                    min(cell.values),
                    max(cell.values),
                    solid[id(cell)],
                )
                for cell in measured
                if cell.column == column and cost.values.get(cell.row, 0) > 0
            ]
            best = frontier(dots, lower, tolerance)
            _panel(ax, dots, best, lower, report.unit == "%")
            panels.append((ax, dots, best))
        line[0].set_title(titles[column], loc="left", fontsize=TEXT, fontweight="bold")
    for ax, cost in zip(axes[-1], costs, strict=True):
        ax.set_xlabel(filled(cost.label, room, TEXT))
    # names are placed by the positions that the layout gives
    canvas.draw_without_rendering()
    for ax, dots, best in panels:
        _name(ax, dots, best, lower)
    return canvas


def _is_solid(report: Report, cell: Cell) -> bool:
    """Whether every run of a cell succeeds, or nothing says what that is."""
    found = [succeeds(report, cell, value) for value in cell.values]
    return None in found or (all(found) and not cell.lost)


def _panel(ax: Any, dots: Sequence[Dot], best: Sequence[Dot], lower: bool, percent: bool) -> None:
    ax.set_xscale("log", base=2)
    for dot in dots:
        _, color, mark = kind_of(dot.row)
        ax.plot([dot.cost] * 2, [dot.low, dot.high], color=color, lw=0.9, alpha=0.45, zorder=2)
        looks: dict[str, Any] = {"mec": "white", "mew": 0.3} if dot.solid else {"mfc": "white", "mew": 0.8}
        size = 3.6 if dot.solid else 3.0
        ax.plot(dot.cost, dot.median, mark, ms=size, color=color, zorder=3, clip_on=False, **looks)
    if best:
        last = max(dot.cost for dot in dots)
        ax.step(
            [dot.cost for dot in best] + [last],
            [dot.worst(lower) for dot in best] + [best[-1].worst(lower)],
            where="post",
            color="black",
            ls="--",
            lw=0.8,
            zorder=1,
        )
        low, high = min(dot.cost for dot in dots), last
        ax.set_xlim(low / 1.5, high * 1.5)
        ticks = _powers(low / 1.5, high * 1.5)
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if percent:
        # room for names above 100 %
        ax.set_ylim(-4, 128)
        ax.set_yticks([0, 50, 100])


def _powers(low: float, high: float) -> list[float]:
    """At most five powers of two, or of four, between two numbers."""
    powers = list(range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))
    step = max(1, -(-len(powers) // 5))
    return [2.0**power for power in powers[::step]]


STEP, REACH = 2.0, 70.0
"""Distance of the places that are tried for a name, and the farthest of them from its mark, in points."""


def _offsets() -> Iterator[tuple[float, float]]:
    steps = [STEP * i for i in range(-int(REACH / STEP), int(REACH / STEP) + 1)]
    yield from sorted(((dx, dy) for dx in steps for dy in steps), key=lambda at: math.hypot(at[0], 1.5 * at[1]))


def _name(ax: Any, dots: Sequence[Dot], named: Sequence[Dot], lower: bool) -> None:
    """Writes the names beside their marks, at the nearest place where they cover nothing."""
    scale = ax.figure.dpi / 72
    inside = ax.get_window_extent()

    def around(x: float, y: float, half: float) -> Bbox:
        px, py = ax.transData.transform((x, y))
        return Bbox.from_extents(px - half * scale, py - half * scale, px + half * scale, py + half * scale)

    taken = [around(dot.cost, dot.median, 2.2) for dot in dots]
    best = [(dot.cost, dot.worst(lower)) for dot in named]
    best += [(max(dot.cost for dot in dots), best[-1][1])] if best else []
    for (x0, y0), (x1, y1) in itertools.pairwise(best):
        # the frontier goes to the right first, and then up
        for i in range(40):
            share = i / 39
            taken.append(around(x0 * (x1 / x0) ** share, y0, 0.4))
            taken.append(around(x1, y0 + (y1 - y0) * share, 0.4))
    # attention is what the others are compared with
    others = [dot for dot in dots if kind_of(dot.row)[0] == "softmax attention" and dot not in named]
    for dot in (*named, *others):
        wide, high = measure(dot.row, SMALL) * 72 * scale, SMALL * scale
        px, py = ax.transData.transform((dot.cost, dot.median))
        for dx, dy in _offsets():
            x, y = px + dx * scale, py + dy * scale
            box = Bbox.from_extents(x - wide / 2 - 1, y - high / 2, x + wide / 2 + 1, y + high / 2)
            if box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1:
                continue
            if any(box.overlaps(other) for other in taken):
                continue
            taken.append(box)
            far = math.hypot(max(abs(dx) - wide / 2 / scale, 0), max(abs(dy) - high / 2 / scale, 0)) > 7
            ax.annotate(
                verbatim(dot.row),
                (dot.cost, dot.median),
                (dx, dy),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=SMALL,
                annotation_clip=False,
                in_layout=False,
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#777777", "shrinkA": 0, "shrinkB": 1}
                if far
                else None,
            )
            break
