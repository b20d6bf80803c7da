"""The report that fits a screen: one table of the paper's numbers beside ours, and what else there is in a line each.

`layout.document` has everything: every claim, every note, the costs and where the rows come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from subquad.reports.render.count import claims_text, count, prefix
from subquad.reports.render.document import (
    EDGE,
    EPOCH_ON_TEST,
    FEW_SEEDS,
    MARKS,
    MIXED,
    NOISY,
    REDUCED,
    SELECTED,
    SELECTED_ON_TEST,
    STAND_IN,
    Document,
    Grid,
    fixed,
)
from subquad.reports.render.judge import Cell
from subquad.reports.render.layout import document, ours_text, paper_text, seeds_text
from subquad.reports.render.report import Report
from subquad.reports.render.rows import days_of
from subquad.suite.registry import counted

MOST_LINES = 40
"""A table with more cells is shown in the paper's own layout, which has up to three lines for each row."""
MEANINGS = {
    REDUCED: "reduced scale",
    FEW_SEEDS: "fewer than three seeds",
    STAND_IN: "stand-in data",
    MIXED: "runs of several operators or devices",
    SELECTED: "best of several settings",
    SELECTED_ON_TEST: "best of several settings, chosen on test rows",
    EPOCH_ON_TEST: "best epoch, chosen on test rows",
    EDGE: "the best setting is at the edge of those tried",
    NOISY: "samples spread by more than 5 %",
}
"""The meaning of each mark in a few words; a note of the whole report says more."""

EXPLAINED = (
    *MARKS,
    "—",
    "verdicts: ",
    "at chance: ",
    "other device: ",
    "a value is the median",
    "paper's numbers from: ",
)
"""Beginnings of notes that explain what stands in the table; a screen has room for the others alone."""


def brief(report: Report) -> Document:
    """The report of an experiment in one table and a few lines."""
    whole = document(report)
    measured = [cell for cell in report.cells if cell.planned and (cell.mean is not None or cell.failures)]
    table = replace(whole.grids[0], heading="") if whole.grids else None
    if 0 < len(measured) <= MOST_LINES:
        table = _table(report, measured)
    notes = tuple(_notes(report, measured))
    return replace(whole, grids=() if table is None else (table,), notes=notes, provenance=())


def _table(report: Report, cells: Sequence[Cell]) -> Grid:
    """A line for each cell that has runs."""
    unit = f" ({report.unit})" if report.unit else ""
    columns = [
        ("row", lambda cell: cell.row),
        ("column", lambda cell: cell.column),
        (f"{report.spec.reference}{unit}", paper_text),
        (f"ours{unit}", lambda cell: ours_text(cell, report.decimals)),
        ("difference", lambda cell: _difference(cell, report.decimals)),
        ("spread", _spread) if report.timed else ("seeds", seeds_text),
        ("verdict", lambda cell: cell.verdict),
    ]
    # a column that says nothing here takes no room; two columns of words name a row where it changes
    shown = [(title, text) for title, text in columns[:2]]
    shown += [(title, text) for title, text in columns[2:] if any(text(cell) for cell in cells)]
    lines = tuple(tuple(text(cell) for _, text in shown) for cell in cells)
    return Grid("", tuple(title for title, _ in shown), lines, 2, tuple(cell.run_ids for cell in cells))


def _difference(cell: Cell, decimals: int) -> str:
    return "" if cell.difference is None else fixed(cell.difference, cell.decimals(decimals), sign=True)


def _spread(cell: Cell) -> str:
    return "" if cell.spread is None else f"{cell.spread:.1%}"


def _notes(report: Report, measured: Sequence[Cell]) -> Iterator[str]:
    """One line each for the marks, for what is missing, for the claims and for the rest of the report."""
    used = [mark for mark in MARKS if any(mark in cell.marks for cell in measured)]
    if used:
        yield "; ".join(f"{mark} {MEANINGS[mark]}" for mark in used)
    asked = [cell for cell in report.cells if cell.planned]
    missing = sum(cell.missing for cell in asked)
    if missing:
        yield f"— not run: {missing} of {len(asked)} cells"
    # these notes name what was left out, what cannot run, and what else limits these numbers
    yield from (note for note in report.notes if not note.startswith(EXPLAINED))
    if claims := claims_text(count(report), prefix(report)):
        yield f"claims of the paper: {claims}"
    if report.runs:
        devices = sorted({run.device.partition(",")[0] for run in report.runs if run.device})
        days = days_of(report.runs)
        yield f"{counted(len(report.runs))} on {', '.join(devices) or 'an unknown device'}{days and f', {days}'}"
    yield "--full: every claim, what each mark and verdict means, the costs, and where the rows come from"
