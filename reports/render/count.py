"""Counts which of the papers' numbers and claims have been measured, once for terminal, page and documents.

A published number is a number of `expected.csv` that a run could give; settings and sizes are not. It is counted in one
experiment, however many tables have it (`follows`), and there as one of `CELLS`, or as `not in a grid`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from subquad.reports.render.claims import OURS, Claim
from subquad.reports.render.document import FEW_SEEDS, REDUCED, STAND_IN
from subquad.reports.render.judge import Cell
from subquad.reports.render.plan import Published
from subquad.reports.render.report import Report
from subquad.suite.settings.config import ExperimentConfig

PAPERS = {"h3": "H3", "dss": "DSS", "mamba": "Mamba", "gsa": "GSA"}
"""Folder and name of each paper that the suite reproduces, in the order in which they appeared; others follow them."""
JUDGED = ("agree", "better", "unclear", "differ")
"""Cells with a verdict; `unstable` and `worse` cells differ."""
FEW = tuple(f"{name}, few seeds" for name in JUDGED)
"""The same for cells with fewer than three seeds."""
CELLS = (*JUDGED, *FEW, "at chance", "other device", "other data", "not run")
"""A published number that the grid has is one of these. `other device`: a time, speed or memory of another device or
protocol. `other data`: ours is of stand-in data. `not run`: not at the paper's scale, or not by every seed started."""
CLAIMS = ("hold", "fail", "unclear", "not run")
"""Verdicts of claims that a paper makes and that no other claim implies."""
FEW_CLAIMS = ", few seeds"
"""End of the names under which claims that rest on a cell of fewer than three seeds are counted once more."""
CHECKED = ", reduced"
"""End of the name under which claims not run at the paper's scale are counted once more where another scale has run."""
SIZES = ("K", "M", "B", "tokens", "M tokens", "steps", "sequences", "days", "multiple of L*d", "x L*d")
"""Units of published settings and sizes, which no run measures."""
NO_RESULTS = re.compile(r"settings|figures of others")
"""A grid whose scale `paper` cannot run for this reason lists no results of the paper."""
REASONS = {
    "data": re.compile(r"no longer distributed|downloaded|gathered|given out|tokenizer"),
    "hours": re.compile(r"hours|\ba day\b|billion (?:tokens|bases)"),
}
"""Why the scale `paper` cannot run, and the words that its grid says it with."""
VERDICTS = {"agrees": "agree", "better": "better", "unclear": "unclear"}
SHARED = {"at chance": "at chance", "other device": "other device", "other protocol": "other device"}


def count(report: Report, others: Iterable[Report] = ()) -> Counter[str]:
    """The published numbers and claims of an experiment: `published`, `in a grid`, each of `CELLS`, and `claims: ...`.

    Claims that were checked at a reduced scale are counted apart, as `reduced claims: ...`. Those that rest
    on a cell of fewer than three seeds are counted once more, as `claims: hold, few seeds`, and so are those that are
    not run, but have a verdict in one of `others`, reports at reduced scales: as `claims: not run, reduced`.
    """
    found: Counter[str] = Counter()
    cells = {(cell.row, cell.column): cell for cell in report.cells}
    for place, number in report.published.items() if report.spec.reference == "paper" else ():
        if is_result(report.config, number) and not number.follows:
            cell = cells.get(place)
            in_grid = cell is not None and place[0] in report.spec.rows and bool(report.config.baseline)
            found["published"] += 1
            found["in a grid"] += in_grid
            if cell is not None and in_grid:
                found[kind(report, cell)] += 1
    smaller = [other for other in others if other.reduced and other.experiment == report.experiment]
    checked = {claim.text for other in smaller for claim in other.claims if claim.verdict != "not run"}
    for claim in counted_claims(report):
        name = f"{prefix(report)}{_kind_of_claim(claim)}"
        found.update([name, f"{name}{FEW_CLAIMS}"] if FEW_SEEDS in claim.marks else [name])
        if claim.verdict == "not run" and not report.reduced:
            found[f"{name}{CHECKED}"] += claim.text in checked
    return found


def prefix(report: Report) -> str:
    """Beginning of the names under which the claims of a report are counted."""
    return "reduced claims: " if report.reduced else "claims: "


def is_result(config: ExperimentConfig, number: Published) -> bool:
    """Whether a published value is a number that a run could give."""
    listed = NO_RESULTS.search(config.cannot_run.get("paper", ""))
    return number.value is not None and number.unit not in SIZES and not listed


def kind(report: Report, cell: Cell) -> str:
    """The one of `CELLS` that a cell with a published number is."""
    if STAND_IN in cell.marks and not report.reduced:
        return "other data"
    if not cell.verdict or REDUCED in cell.marks:
        return "not run"
    if cell.verdict in SHARED:
        return SHARED[cell.verdict]
    return VERDICTS.get(cell.verdict, "differ") + (", few seeds" if cell.few_seeds else "")


def counted_claims(report: Report) -> list[Claim]:
    """The claims that are counted: those that a paper makes and that no other claim implies."""
    return [claim for claim in report.claims if not claim.follows and not claim.source.startswith(OURS)]


def _kind_of_claim(claim: Claim) -> str:
    return {"holds": "hold", "fails": "fail"}.get(claim.verdict, claim.verdict)


def claims_text(counts: Mapping[str, int], start: str = "claims: ") -> str:
    """`8 hold (2‡) · 1 fail · 1 unclear · 4 not run (3†)`; empty where no claim is counted.

    In brackets, how many of those that hold or fail rest on a cell of fewer than three seeds, and how many of those
    that are not run have a verdict at a reduced scale.
    """
    numbers = {name: counts.get(start + name, 0) for name in CLAIMS}
    marks = {"hold": (FEW_CLAIMS, FEW_SEEDS), "fail": (FEW_CLAIMS, FEW_SEEDS), "not run": (CHECKED, REDUCED)}

    def words(name: str) -> str:
        end, mark = marks.get(name, ("", ""))
        of_these = counts.get(f"{start}{name}{end}", 0) if end else 0
        return f"{numbers[name]} {name}" + f" ({of_these}{mark})" * bool(of_these)

    return " · ".join(map(words, CLAIMS)) if any(numbers.values()) else ""


def total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of several counts."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return found


def scale_to_count(config: ExperimentConfig) -> str | None:
    """The scale at which an experiment is counted: `paper` if it can run, else None, for the first that has rows."""
    return "paper" if "paper" in config.runnable else None


def reasons(config: ExperimentConfig, counts: Mapping[str, int]) -> list[str]:
    """The reasons why numbers and claims of an experiment are not run: `data`, `hours`; empty where all are run."""
    lack = sum(counts.get(name, 0) for name in ("not run", "claims: not run", "reduced claims: not run"))
    # a number without a place in a grid is no matter of hours where all others are run
    if not lack and (config.baseline or not counts.get("published", 0)):
        return []
    text = config.cannot_run.get("paper", "")
    # a scale that can run and has not been run is a matter of hours
    return [word for word, pattern in REASONS.items() if pattern.search(text)] if text else ["hours"]


def headline(report: Report) -> Cell | None:
    """The one cell that stands for an experiment in a document; None where no cell has a value.

    Of the rows of the model that the paper proposes, or of all where it has none, it is the cell with a verdict that is
    farthest behind the paper's number, in tolerances. Without verdicts it is the first of these cells that a claim
    names, or else one of the first of these rows; where a claim names no column, it is the last one with a value.
    """
    there = [cell for cell in report.cells if cell.mean is not None]
    there = [cell for cell in there if _is_proposed(report, cell.row)] or there
    judged = [cell for cell in there if cell.difference is not None and cell.verdict != "at chance"]
    if judged:
        return max(judged, key=lambda cell: _behind(report, cell))
    named = [claim.subject for claim in counted_claims(report)] + [(cell.row, "*") for cell in there]
    fitting = (c for row, column in named for c in reversed(there) if c.row == row and column in ("*", c.column))
    return next(fitting, None)


def _is_proposed(report: Report, row: str) -> bool:
    """Whether a row is of the model after which the paper's folder is named."""
    paper = report.experiment.partition("/")[0]
    return paper in PAPERS and re.search(rf"(?<![a-z]){paper}(?![a-z0-9])", row.lower()) is not None


def _behind(report: Report, cell: Cell) -> float:
    assert cell.difference is not None
    sign = {"higher": -1.0, "lower": 1.0}.get(cell.published.better if cell.published else "", 0.0)
    distance = sign * cell.difference if sign else abs(cell.difference)
    return distance / (report.spec.of(cell.column, "tolerance") or 1.0)
