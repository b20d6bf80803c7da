"""Turns a report into the document that the formats print: comparison, claims and costs as tables of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from reports.render.cells import Cell
from reports.render.claims import Claim
from reports.render.costs import COST_METRICS, Cost
from reports.render.document import DASH, Document, Grid
from reports.render.matrix import matrix
from reports.render.notes import choices_are_listed
from reports.render.report import Report
from reports.render.sensitivity import rank, text
from reports.render.units import amount, fixed

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

UNPUBLISHED = {"oom": "oom", "fails": "fails", "not_reported": "not reported", "not_found": "not found"}
"""First word of a note in expected.csv where the paper has no number, to what the cell shows."""


def document(report: Report) -> Document:
    """The report of an experiment, ready to print."""

    def figure() -> Canvas | None:
        # drawing needs matplotlib, which takes a second to import
        from reports.render.plots import draw

        return draw(report)

    named = f"source: {report.source}; " if report.source else ""
    return Document(
        name=report.experiment,
        title=f"{report.experiment}: {report.title}",
        where=f"{named}scale: {report.scale}",
        grids=tuple(grids(report)),
        notes=report.notes,
        provenance=report.provenance,
        draw=figure,
    )


def grids(report: Report) -> Iterator[Grid]:
    """The comparison, the claims and the costs of a report, each where it has lines."""
    measured = [cell for cell in report.cells if cell.mean is not None or cell.failures]
    there = {cell.column for cell in report.cells}
    if len(there) > 1:
        columns = [column for column in report.spec.columns if column in there]
        texts = [(paper_text(cell), ours_text(cell, report.decimals), cell.verdict) for cell in report.cells]
        yield matrix(
            report.cells,
            texts,
            columns,
            report.unit,
            transpose=report.spec.transpose,
            reference=report.spec.reference,
        )
        listed = [_cells(report, measured, "Every cell that has runs")] if measured else []
    else:
        yield _cells(report, report.cells, "")
        listed = []
    if report.claims:
        claims = tuple(claim_texts(claim) for claim in report.claims)
        yield Grid("Claims", ("verdict", "claim", "checked as", "source"), claims, 4, ((),) * len(claims))
    yield from listed
    if report.sensitivity:
        yield _sensitivity(report)
    if report.costs:
        names = [name for name in COST_METRICS if any(name in cost.values for cost in report.costs)]
        titles = ("model", *(COST_METRICS[name] for name in names), "device")
        costs = tuple((c.label, *(_cost(c, name) for name in names), c.device) for c in report.costs)
        yield Grid("Cost: median [smallest, largest]", titles, costs, 1, tuple(cost.run_ids for cost in report.costs))


def _cells(report: Report, cells: Sequence[Cell], heading: str) -> Grid:
    """A line for each cell, with what the matrix has no room for."""
    unit = f" ({report.unit})" if report.unit else ""
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("row", lambda cell: cell.row),
        ("column", lambda cell: cell.column),
        (f"{report.spec.reference}{unit}", paper_text),
        (f"ours{unit}", lambda cell: ours_text(cell, report.decimals)),
        ("median", lambda cell: _median(cell, report.decimals)),
        ("seeds", seeds_text),
        ("spread", _spread),
        ("success", _success),
        ("difference", lambda cell: _difference(cell, report.decimals)),
        ("verdict", lambda cell: cell.verdict),
        ("best at", lambda cell: cell.chosen),
    ]
    unused = {"median", "seeds", "success"} if report.timed else {"spread"}
    if not any(cell.planned for cell in report.cells):
        unused |= {f"ours{unit}", "median", "seeds", "success", "difference", "verdict"}
    if not report.has_published:
        unused |= {f"{report.spec.reference}{unit}", "success", "difference", "verdict"}
    if not choices_are_listed(report.cells):
        unused.add("best at")
    columns = [(title, text) for title, text in columns if title not in unused]
    lines = tuple(tuple(text(cell) for _, text in columns) for cell in cells)
    header = tuple(title for title, _ in columns)
    return Grid(heading, header, lines, 2, tuple(cell.run_ids for cell in cells))


def _sensitivity(report: Report) -> Grid:
    values = sorted({value for found in report.sensitivity for value, _, _ in found.tried}, key=rank)
    lines = []
    for found in report.sensitivity:
        counts = {value: f"{successes} of {runs}" for value, successes, runs in found.tried}
        total = "{} of {}".format(*found.rate)
        lines.append((found.row, found.column, *(counts.get(value, DASH) for value in values), total, found.window))
    header = ("row", "column", *map(text, values), "all", "window")
    return Grid("Runs that succeed, by setting", header, tuple(lines), 2, ((),) * len(lines))


def paper_text(cell: Cell) -> str:
    """The paper's value of a cell, or the word that stands for it; empty where there is neither."""
    if cell.published is None:
        return ""
    if cell.published.value is not None:
        return fixed(cell.published.value, cell.published.decimals)
    word = cell.published.note.split(";")[0].split(" ")[0]
    # a table of settings has words too: the norm of a model, the place of that norm
    return word.removeprefix("value=") if word.startswith("value=") else UNPUBLISHED.get(word, "")


def ours_text(cell: Cell, decimals: int) -> str:
    """Our value of a cell with its standard deviation and marks; empty where the grid has no run."""
    if not cell.planned:
        return ""
    if cell.mean is None:
        text = ", ".join(kind for kind, _ in cell.failures) or DASH
    else:
        text = fixed(cell.mean, decimals) + ("" if cell.sd is None else f" ± {fixed(cell.sd, decimals)}")
    return text + "".join(cell.marks)


def _median(cell: Cell, decimals: int) -> str:
    # of one seed, the median is the mean
    return "" if cell.median is None or cell.num_seeds < 2 else fixed(cell.median, decimals)


def _success(cell: Cell) -> str:
    if cell.successes is None:
        return ""
    return f"{cell.successes} of {cell.num_seeds + sum(count for _, count in cell.failures)}"


def _difference(cell: Cell, decimals: int) -> str:
    return "" if cell.difference is None else fixed(cell.difference, decimals, sign=True)


def seeds_text(cell: Cell) -> str:
    """How many seeds gave a value, of how many planned ones, and what became of the others."""
    if not cell.planned:
        return ""
    text = f"{cell.num_seeds}" if cell.num_seeds == cell.planned else f"{cell.num_seeds} of {cell.planned}"
    return "; ".join([text, *(f"{count} {kind}" for kind, count in cell.failures)])


def _spread(cell: Cell) -> str:
    return "" if cell.spread is None else f"{cell.spread:.1%}"


def claim_texts(claim: Claim) -> tuple[str, str, str, str]:
    """Verdict, sentence, formula and source of a claim."""
    return _verdict(claim), _sentence(claim), claim.formula, claim.source


def _verdict(claim: Claim) -> str:
    detail = f" ({claim.detail})" if claim.detail else ""
    return f"{claim.verdict}{''.join(claim.marks)}{detail}"


def _sentence(claim: Claim) -> str:
    note = f" [{claim.note}]" if claim.note else ""
    return claim.text + note + (f" (not counted: follows from {claim.follows!r})" if claim.follows else "")


def _cost(cost: Cost, name: str) -> str:
    if name not in cost.values:
        return DASH
    middle, low, high = cost.values[name]
    if name in ("num_parameters", "state_size"):
        where = f" ({cost.length})" if name == "state_size" and cost.length else ""
        return f"{middle:,.0f}{where}"
    binary = name.startswith("peak")
    text = amount(middle, binary)
    return text if low == high else f"{text} [{amount(low, binary)}, {amount(high, binary)}]"
