"""Draws the figure of a report, and the scoreboard as bars, with matplotlib's Agg, SVG and PDF backends.

There is no window and no global state. Every figure is drawn on a `sheet`; `figure.kind` of the grid says which one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.patches import Patch

from subquad.reports.render.costs import columns_of
from subquad.reports.render.count import FEW, JUDGED
from subquad.reports.render.curves import draw_curves, has_curves
from subquad.reports.render.document import Document
from subquad.reports.render.finding import unknown, words_of
from subquad.reports.render.frontier import draw_costs
from subquad.reports.render.lines import draw_lines, ticks_of
from subquad.reports.render.report import Report
from subquad.reports.render.seeds import draw_seeds
from subquad.reports.render.sheet import (
    SMALL,
    STYLE,
    TEXT,
    Canvas,
    Heading,
    Width,
    filled,
    measure,
    settled,
    sheet,
    verbatim,
)
from subquad.reports.render.tiles import draw_cells, draw_kernels, draw_successes
from subquad.suite.store.target import replacing


def draw(report: Report, width: Width = "page") -> Canvas | None:
    """The figure of a report, or None where there is nothing to show."""
    if report.figure.empty:
        return None
    with matplotlib.rc_context(STYLE):
        kind = _kind(report)
        if kind == "curves":
            return settled(draw_curves(report, width))
        if kind in ("seeds", "costs"):
            costs = columns_of(report)
            words = words_of(report, [cost.note for cost in costs if cost.note])
            drawing = draw_seeds if kind == "seeds" else draw_costs
            return settled(drawing(report, words, costs, width))
        others = {"lines": draw_lines, "cells": draw_cells, "kernels": draw_kernels, "successes": draw_successes}
        spec, drawn = report.figure.spec, {s.label for _, panel in report.figure.panels for s in panel if s.points}
        notes = unknown(report, {spec.x_label or spec.x: drawn} if spec.x.startswith("metric.") else {})
        return settled(others[kind](report, words_of(report, notes), width))


def _kind(report: Report) -> str:
    """The kind that the grid asks for; lines over a single x and curves of one evaluation are none, and their seeds are
    drawn."""
    figure = report.figure
    if figure.spec.kind == "curves" and not has_curves(report):
        return "seeds"
    if figure.spec.kind == "lines" and len({x for _, panel in figure.panels for x in ticks_of(panel)}) < 2:
        return "seeds" if any(cell.values for cell in report.cells) else "lines"
    return figure.spec.kind


def svg(document: Document) -> str:
    """The figure as SVG text; empty where there is nothing to draw."""
    canvas = document.draw and document.draw()
    if canvas is None:
        return ""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


DOTS = 200
"""Dots an inch of a PNG."""


def save(document: Document, path: Path, width: Width = "page", source: str = "") -> Path:
    """Writes the figure to `path`: a PDF alone, or a PNG and an SVG of one name.

    source: the command that draws it, which the SVG and the PDF have among their metadata.

    Raises ValueError where there is nothing to draw, and for a table that has no figure.
    """
    if document.draw is None:
        raise ValueError(f"{document.name}: this table has no figure; give --format md, latex or html")
    canvas = document.draw(width)
    if canvas is None:
        why = [note for note in document.notes if note.startswith("left out")] or [
            "no stored run has a value; run it first"
        ]
        raise ValueError(f"{document.name}: nothing to draw; {'; '.join(why)}")
    options: dict[str, dict[str, Any]] = {
        ".pdf": {"metadata": {"CreationDate": None, "Producer": None, "Subject": source or None}},
        ".png": {"metadata": {"Software": None}, "dpi": DOTS},
        ".svg": {"metadata": {"Date": None, **({"Source": source} if source else {})}},
    }
    for suffix in (".pdf",) if path.suffix == ".pdf" else (".png", ".svg"):
        with matplotlib.rc_context(STYLE), replacing(path.with_suffix(suffix)) as temporary:
            canvas.savefig(temporary, format=suffix[1:], **options[suffix])
    return path


GREEN, BLUE, AMBER, RED = "#12a06a", "#2f62c4", "#f2c230", "#a32a2a"
VERDICT_COLORS = dict(zip(JUDGED, (GREEN, BLUE, AMBER, RED), strict=True))
CLAIM_COLORS = {"hold": GREEN, "fail": RED, "unclear": AMBER, "not run": "#eeeeee"}
PLAIN_COLORS = {"at chance": "#5f5f5f", "other device": "#b6b6b6", "other data": "#b6b6b6", "not run": "#eeeeee"}
HATCHES = dict.fromkeys(FEW, "//////") | {"other data": "......"}
"""Cells of few seeds have the colour of their verdict and are hatched."""
CELL_COLORS = VERDICT_COLORS | dict(zip(FEW, VERDICT_COLORS.values(), strict=True)) | PLAIN_COLORS
"""Colour of each part of the bar of cells."""


def draw_board(title: str, lines: Sequence[tuple[str, Mapping[str, int]]], width: Width = "page") -> Canvas | None:
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
        page = width == "page"
        shown = {name for _, counts in lines for _, start, names in thirds for name in names if counts[start + name]}
        legend = [(_patch(name, color), name) for name, color in (CELL_COLORS | CLAIM_COLORS).items() if name in shown]
        names = [name for name, _ in lines]
        down = 0.19 * len(lines) + 0.28
        canvas = sheet(width, down * (1 if page else 3), Heading(title), legend)
        shape = (1, 3) if page else (3, 1)
        grid = canvas.subplots(
            *shape, sharey=True, sharex=True, squeeze=False, width_ratios=[2, 1, 1] if page else None
        )
        for ax, (heading, start, colors) in zip(grid.flat, thirds, strict=True):
            room = (canvas.get_figwidth() - max(measure(name, SMALL) for name in names) - 0.3) / (4 if page else 1)
            room *= 2 if page and colors is CELL_COLORS else 1
            for y, (_, counts) in enumerate(lines):
                _bar(ax, y, [(counts[start + name], name, color) for name, color in colors.items()], room)
            ax.set_title(filled(heading, room, TEXT), fontsize=TEXT)
            ax.tick_params(length=0)
            ax.set_xlim(0, 1)
            ax.set_xticks([])
            ax.spines[:].set_visible(False)
        grid[0][0].set_yticks(range(len(lines)), [verbatim(name) for name in names])
        grid[0][0].set_ylim(len(lines) - 0.5, -0.5)
        return settled(canvas)


def _patch(name: str, color: str) -> Patch:
    return Patch(facecolor=color, edgecolor="white", lw=0, hatch=HATCHES.get(name))


def _bar(ax: Any, y: int, parts: Sequence[tuple[int, str, str]], room: float) -> None:
    """Draws one bar of numbers, each with its name and colour, into `room` inches."""
    total = sum(number for number, _, _ in parts)
    left = 0.0
    for number, name, color in parts:
        share = number / total if total else 0.0
        hatch = HATCHES.get(name)
        ax.barh(y, share, 0.78, left, color=color, edgecolor="white", lw=0.4, hatch=hatch)
        if share * room > measure(str(number), SMALL) + 0.03:
            dark = color in (BLUE, RED, PLAIN_COLORS["at chance"])
            # on a plain box, because a number on hatches cannot be read
            box = {"facecolor": color, "edgecolor": "none", "pad": 0.6} if hatch else None
            style: Any = {"ha": "center", "va": "center_baseline", "fontsize": SMALL, "bbox": box}
            ax.text(left + share / 2, y, str(number), color="white" if dark else "black", **style)
        left += share
    if not total:
        ax.text(0.01, y, "none", va="center_baseline", fontsize=SMALL, color="#777777")
