"""Verdicts in the words of public logbooks of reproductions: verified, falsified, toy, inconclusive.

`WORDS` maps ours to theirs, and docs/reading.md shows the same table. A line is one number of the paper beside ours, or
one claim of it. What was shown at a smaller scale or on stand-in data is `toy`, whatever it says. What rests on fewer
than three seeds is `inconclusive`. What has not been run has no line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from subquad.reports.render.claims import Claim
from subquad.reports.render.count import counted_claims
from subquad.reports.render.document import FEW_SEEDS, REDUCED, STAND_IN
from subquad.reports.render.judge import Cell
from subquad.reports.render.plan import Published
from subquad.reports.render.report import Report

Word = Literal["verified", "falsified", "toy", "inconclusive"]

WORDS: dict[str, Word] = {
    "agrees": "verified",
    "better": "verified",
    "holds": "verified",
    "worse": "falsified",
    "differs": "falsified",
    "unstable": "falsified",
    "fails": "falsified",
    "unclear": "inconclusive",
    "at chance": "inconclusive",
    "other device": "inconclusive",
    "other protocol": "inconclusive",
}
"""Verdict of a cell or a claim to the word of a logbook, where neither the scale nor the data are smaller."""


def lines(report: Report) -> Iterator[dict[str, Any]]:
    """A line for every number of the paper beside which we have one, and for every claim of it that was checked."""
    shared = {"experiment": report.experiment, "scale": report.scale}
    for cell in report.cells:
        # a cell of stand-in data is not compared with the number that the paper has there
        number = report.published.get((cell.row, cell.column))
        if number is not None and number.value is not None and cell.mean is not None:
            yield {**shared, **_of_cell(cell, number)}
    for claim in counted_claims(report):
        if claim.verdict != "not run":
            yield {**shared, **_of_claim(claim, report.reduced)}


def _of_cell(cell: Cell, number: Published) -> dict[str, Any]:
    return {
        "source": number.source,
        "kind": "number",
        "what": f"{cell.row} | {cell.column}",
        "paper": number.value,
        "ours": cell.mean,
        "unit": number.unit,
        "seeds": cell.num_seeds,
        "verdict": cell.verdict,
        "logbook": _word(cell.verdict, cell.marks),
        "detail": "".join(cell.marks),
        "run_ids": " ".join(cell.run_ids),
    }


def _of_claim(claim: Claim, reduced: bool) -> dict[str, Any]:
    marks = (*claim.marks, REDUCED) if reduced else claim.marks
    return {
        "source": claim.source,
        "kind": "claim",
        "what": claim.text,
        "paper": None,
        "ours": None,
        "unit": "",
        "seeds": None,
        "verdict": claim.verdict,
        "logbook": _word(claim.verdict, marks),
        "detail": claim.detail,
        "run_ids": "",
    }


def _word(verdict: str, marks: tuple[str, ...]) -> str:
    if REDUCED in marks or STAND_IN in marks:
        return "toy"
    if FEW_SEEDS in marks:
        return "inconclusive"
    return WORDS.get(verdict, "")
