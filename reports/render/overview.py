"""All experiments on one page: how many cells of the papers are filled and agree, and what is still to be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reports.render.document import Document, Grid
from reports.render.report import Report

HEADER = (
    "experiment",
    "scale",
    "published",
    "agree",
    "better",
    "unclear",
    "unstable",
    "differ",
    "empty",
    "other empty",
    "claims hold",
    "fail",
    "unsure",
    "not run",
)


def overview(reports: Sequence[Report]) -> Document:
    """One line for each report, the one with the most empty published cells first.

    Published cells are those for which the paper prints a number and the grid has a run; rows that only the paper has
    are not counted. `unstable` counts cells in which a seed meets the paper and another fails outright, `differ` those
    that are worse than the paper's or on the wrong side of its tolerance. A claim that follows from another is not
    counted; `unsure` claims are true within the noise only, or their condition is not met.
    """
    lines = [(_counts(report), report) for report in reports]
    lines.sort(key=lambda line: (-line[0][6], -line[0][7], line[1].experiment))
    total = tuple(sum(column) for column in zip(*(counts for counts, _ in lines), strict=True)) if lines else ()
    grid = Grid(
        "",
        HEADER,
        tuple((report.experiment, report.scale, *map(str, counts)) for counts, report in lines)
        + ((("all", "", *map(str, total)),) if total else ()),
        2,
        tuple(() for _ in range(len(lines) + bool(total))),
    )
    notes = (
        "published: cells with a number of the paper and a run in the grid; the next six columns add up to them.",
        "other empty: cells of the grid that no run has filled and for which the paper prints no number.",
    )
    return Document(
        "overview", "all experiments, largest gap first", "committed or local rows", (grid,), notes, (), lambda: None
    )


def _counts(report: Report) -> tuple[int, ...]:
    """The numbers of one line, in the order of HEADER after the scale."""
    ours = [cell for cell in report.cells if cell.published and cell.published.value is not None and cell.planned]
    verdicts = Counter(cell.verdict if cell.mean is not None else "empty" for cell in ours)
    differ = verdicts["worse"] + verdicts["differs"]
    others = sum(cell.missing for cell in report.cells if cell not in ours)
    claims = Counter(claim.verdict for claim in report.claims if not claim.follows)
    judged = [verdicts[name] for name in ("agrees", "better", "unclear", "unstable")]
    # a published cell with a value of ours that has no verdict, e.g. a speed on another device, is unclear
    judged[2] += len(ours) - sum(judged) - differ - verdicts["empty"]
    checked = (claims["holds"], claims["fails"], claims["unclear"] + claims["void"], claims["not run"])
    return (len(ours), *judged, differ, verdicts["empty"], others, *checked)
