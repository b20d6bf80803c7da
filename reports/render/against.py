"""Rows of a table against one of them, each at the setting that its cells show: is a mixer better than another one?

The difference of two means over seeds is tested by permutation (`suite.store.comparison`), and p is corrected for the
number of comparisons by Holm's method. Seeds are not paired, because n pairs allow only 2^n outcomes: six seeds would
be needed where four suffice. The interval has the differences that the test, without correction, does not exclude.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from subquad.reports.render.document import DASH, Document, Grid, fixed
from subquad.reports.render.judge import Cell
from subquad.reports.render.layout import ours_text
from subquad.reports.render.report import Report
from subquad.suite.metrics import smaller_is_better
from subquad.suite.registry import nearest
from subquad.suite.store.comparison import ALPHA, holm, permutation_p, smallest_p

HEADER = ("row", "column", "ours", "against", "difference", "95 % interval", "seeds", "p", "p (Holm)", "verdict")
HALVINGS = 30
"""Steps in which an end of an interval is found."""


def against(report: Report, base: str, rows: Sequence[str] = ()) -> Document:
    """The document of some rows, or of all others, against the row `base`, column by column.

    ValueError for a row that the table has not, and for a timing.
    """
    for row in (base, *rows):
        if row not in report.spec.rows:
            names = list(report.spec.rows)
            raise ValueError(f"--against: no row {row!r}{nearest(row, names)}; there are: {', '.join(names)}")
    if report.timed:
        raise ValueError("--against: times have no seeds to compare over; their spread stands in the report itself")
    pairs = [pair for pair in _pairs(report, base) if not rows or pair[0].row in rows]
    tested = [pair for pair in pairs if not _lost(pair) and smallest_p(*map(len, _values(pair))) <= ALPHA]
    corrected = dict(zip(map(id, tested), holm([permutation_p(*_values(pair)) for pair in tested]), strict=True))
    lines = tuple(_line(report, pair, corrected.get(id(pair))) for pair in pairs)
    ids = tuple((*ours.run_ids, *theirs.run_ids) for ours, theirs in pairs)
    return Document(
        report.experiment,
        f"{report.experiment}: {', '.join(rows) or 'all rows'} against {base}",
        f"scale: {report.scale}; each cell at the setting that the report shows",
        (Grid("", HEADER, lines, 2, ids),),
        tuple(_notes(report, pairs, tested)),
        report.provenance,
    )


def _pairs(report: Report, base: str) -> list[tuple[Cell, Cell]]:
    """The cells of every other row, each with that of the base in the same column, where both have values."""
    theirs = {cell.column: cell for cell in report.cells if cell.row == base and cell.values}
    return [(c, theirs[c.column]) for c in report.cells if c.row != base and c.values and c.column in theirs]


def _values(pair: tuple[Cell, Cell]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return pair[0].values, pair[1].values


def _lost(pair: tuple[Cell, Cell]) -> int:
    return sum(cell.lost for cell in pair)


def _line(report: Report, pair: tuple[Cell, Cell], corrected: float | None) -> tuple[str, ...]:
    ours, theirs = pair
    difference = statistics.fmean(ours.values) - statistics.fmean(theirs.values)
    n, m = len(ours.values), len(theirs.values)
    verdict, p, span = "seeds lost" if _lost(pair) else "too few seeds", DASH, DASH
    if corrected is not None:
        lower = smaller_is_better(report.spec.of(ours.column, "metric"))
        verdict = "differs" if lower is None else "better" if (difference < 0) == lower else "worse"
        verdict = verdict if corrected <= ALPHA else "tie"
        p = f"{permutation_p(*_values(pair)):.3f}"
        low, high = interval(*_values(pair))
        span = f"[{fixed(low, report.decimals, sign=True)}, {fixed(high, report.decimals, sign=True)}]"
    return (
        *(ours.row, ours.column, ours_text(ours, report.decimals), ours_text(theirs, report.decimals)),
        *(fixed(difference, report.decimals, sign=True), span, f"{n}" if n == m else f"{n}, {m}", p),
        *(DASH if corrected is None else f"{corrected:.3f}", verdict),
    )


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest difference of the means that the permutation test does not exclude."""
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    values = [*ours, *theirs]
    reach = 2 * (max(values) - min(values))

    def end(sign: float) -> float:
        inside, outside = 0.0, reach
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            shifted = [value - difference - sign * middle for value in ours]
            if permutation_p(shifted, theirs) > ALPHA:
                inside = middle
            else:
                outside = middle
        return difference + sign * inside

    return end(-1.0), end(1.0)


def _notes(report: Report, pairs: Sequence[tuple[Cell, Cell]], tested: Sequence[tuple[Cell, Cell]]) -> list[str]:
    marks = {mark for pair in pairs for cell in pair for mark in cell.marks}
    notes = [note for note in report.notes if note.partition(" ")[0] in marks]
    notes.append("p: permutation test on the difference of the means over seeds; interval: differences that it allows")
    notes.append(
        f"p (Holm): corrected for {len(tested)} comparisons; better and worse: not above {ALPHA}; "
        "tie: the seeds do not tell the rows apart, which does not make them equal"
    )
    if not pairs:
        notes.append("no row has values in a column where the other one has; `run` makes them")
    if any(map(_lost, pairs)):
        notes.append("seeds lost: runs diverged or failed, so those that are left are no fair choice of seeds")
    enough = next(n for n in itertools.count(2) if smallest_p(n, n) * len(pairs) <= ALPHA)
    if any(pair not in tested and not _lost(pair) for pair in pairs):
        notes.append(
            f"too few seeds: no outcome could have p below {ALPHA}, which takes 4 seeds on both sides"
            + f", and {enough} for all {len(pairs)} comparisons" * (enough > 4)
        )
    least = min((smallest_p(*map(len, _values(pair))) for pair in tested), default=math.inf)
    if tested and least * len(tested) > ALPHA:
        notes.append(
            f"so many comparisons of so few seeds can tell no rows apart: name fewer rows, or run {enough} seeds"
        )
    return notes
