"""The claims of a paper (claims.csv), each checked on our means, their noise, and the seeds behind them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reports.render.document import MARKS
from reports.render.judge import Cell
from reports.render.plan import read_table
from suite.registry import nearest
from suite.settings.report_spec import TableSpec

COMPARISONS: dict[str, Callable[[float, float, float], bool]] = {
    ">": lambda left, right, _: left > right,
    ">=": lambda left, right, _: left >= right,
    "<": lambda left, right, _: left < right,
    "~": lambda left, right, tolerance: abs(left - right) <= tolerance,
}
"""Sign of a claim to its test of (left, right, tolerance)."""

MOST_REASONS = 3
"""Columns of which a claim says why it fails or is unclear there."""
CONDITION = re.compile(r"^(?P<left>.+\|.+?) (?P<comparison>>=|>|<) (?P<right>\S+)$")

Term = tuple[str, ...]
"""A number as its one text, or a cell as (row, column)."""
Side = tuple[Term, ...]
"""One term, or the two terms of a ratio."""
Verdict = Literal["holds", "fails", "unclear", "void", "not run"]


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, checked on our means."""

    text: str
    formula: str
    source: str
    verdict: Verdict
    detail: str
    """Number of columns in which the claim holds, the ratios, the values that refute it, or why it cannot hold; then
    the fewest seeds of a cell that it was checked on."""
    marks: tuple[str, ...] = ()
    """Every mark of a cell that the claim was checked on."""
    follows: str = ""
    """The claim of which this one is a consequence; then it is not counted."""
    note: str = ""
    """A remark for the reader, such as an operator that is not the paper's."""


@dataclass(frozen=True)
class Number:
    """The value of a side of a claim, with its standard error over seeds, and the cells behind it."""

    value: float
    error: float = 0.0
    cells: tuple[Cell, ...] = ()


def read_claims(path: Path) -> list[dict[str, str]]:
    """Lines of claims.csv: `claim,left,comparison,right,source` and the optional `if,follows,note`.

    Empty where there is no file. ValueError names a line that is too short or too long.
    """
    return [line for _, line in read_table(path, ("claim", "left", "comparison", "right", "source"))]


def tally(claims: Iterable[Claim]) -> tuple[int, int]:
    """Number of claims that hold, and of all; claims that another one implies are not counted."""
    counted = [claim for claim in claims if not claim.follows]
    return sum(claim.verdict == "holds" for claim in counted), len(counted)


def check_claims(lines: Sequence[Mapping[str, str]], cells: Sequence[Cell], spec: TableSpec) -> list[Claim]:
    """Every claim with its verdict.

    - `holds`: true of our means in every column, by at least two standard errors, and no seed is lost.
    - `unclear`: true of our means, but by less than two standard errors, or a run behind them gave no value.
    - `fails`: our means refute it in a column.
    - `void`: it would be true for no reason, because its condition (`if`) is not met: a model that has not solved the
      training length shows nothing about longer ones.
    - `not run`: a cell it needs is empty and none refutes it.

    A side is a number, a cell `row | column`, or a ratio `row | column / row | column`. A `*` as the column stands
    for every column of the table, the same one everywhere in the claim. `if` is a comparison of a cell with a number,
    `row | column >= 99`; `follows` is the text of another claim. ValueError for what the table does not have.
    """
    found = {(cell.row, cell.column): cell for cell in cells}
    texts = [line["claim"] for line in lines]
    for line in lines:
        if line.get("follows") and (line["follows"] not in texts or line["follows"] == line["claim"]):
            raise ValueError(
                f"claims.csv: {line['claim']!r}: follows names no other claim, {line['follows']!r}"
                f"{nearest(line['follows'], texts)}"
            )
    return [_check(line, found, spec) for line in lines]


def _check(line: Mapping[str, str], cells: Mapping[tuple[str, str], Cell], spec: TableSpec) -> Claim:
    sides = [_side(line[side], spec, line["claim"]) for side in ("left", "right")]
    if line["comparison"] not in COMPARISONS:
        allowed = ", ".join(COMPARISONS)
        raise ValueError(f"claims.csv: {line['claim']!r}: comparison {line['comparison']!r} is not one of {allowed}")
    starred = any("*" in term for side in sides for term in side)
    columns: Sequence[str] = list(spec.columns) if starred else [""]
    behind: list[Cell] = []
    held, refuted, doubtful, ratios = 0, [], [], []
    for column in columns:
        left, right = (_number(side, column, cells) for side in sides)
        if left is None or right is None:
            continue
        behind += [*left.cells, *right.cells]
        ratios += [number.value for side, number in zip(sides, (left, right), strict=True) if len(side) == 2]
        where = f" at {column}" if column else ""
        if not COMPARISONS[line["comparison"]](left.value, right.value, spec.tolerance):
            refuted.append(f"{left.value:.2f} against {right.value:.2f}{where}")
        elif reason := _doubt(line["comparison"], left, right, spec.tolerance):
            doubtful.append(f"{reason}{where}")
        else:
            held += 1
    unmet, condition = _condition(line, cells, spec)
    behind += condition
    verdict: Verdict = "holds"
    detail = f"{held} of {len(columns)}" if len(columns) > 1 else ""
    if ratios:
        # the value of a cell stands in the table, a ratio stands nowhere else
        span = f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else f"{ratios[0]:.3g}"
        detail = f"{detail}, {span}".lstrip(", ")
    if refuted:
        verdict, detail = "fails", _first(refuted)
    elif unmet:
        verdict, detail = "void", unmet
    elif unmet is None or held + len(doubtful) < len(columns):
        verdict = "not run"
    elif doubtful:
        verdict, detail = "unclear", _first(doubtful)
    seeds = min((cell.num_seeds for cell in behind), default=0)
    if seeds > 1:
        detail = f"{detail}, {seeds} seeds".lstrip(", ")
    used = {mark for cell in behind for mark in cell.marks}
    return Claim(
        text=line["claim"],
        formula=f"{line['left']} {line['comparison']} {line['right']}",
        source=line["source"],
        verdict=verdict,
        detail=detail,
        marks=tuple(mark for mark in MARKS if mark in used),
        follows=line.get("follows") or "",
        note=line.get("note") or "",
    )


def _first(reasons: Sequence[str]) -> str:
    """The first of many reasons; the table of the report shows the values of all columns."""
    more = len(reasons) - MOST_REASONS
    return "; ".join(reasons[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _doubt(comparison: str, left: Number, right: Number, tolerance: float) -> str:
    """The reason why a comparison that is true of the means is not sure; empty where it is."""
    lost = sum(count for cell in (*left.cells, *right.cells) for _, count in cell.failures)
    if lost:
        return f"{lost} run{'s' * (lost != 1)} without a value"
    # distance by which the means may move before the claim is false
    room = tolerance - abs(left.value - right.value) if comparison == "~" else abs(left.value - right.value)
    noise = 2 * math.hypot(left.error, right.error)
    return f"by {room:.2f}, two standard errors are {noise:.2f}" if room < noise else ""


def _condition(
    line: Mapping[str, str], cells: Mapping[tuple[str, str], Cell], spec: TableSpec
) -> tuple[str | None, list[Cell]]:
    """Checks the condition of a claim: the unmet part (empty if it is met, None if it has not run), and its cells."""
    text = line.get("if") or ""
    if not text:
        return "", []
    match = CONDITION.match(text)
    if match is None:
        raise ValueError(f"claims.csv: {line['claim']!r}: if is not `row | column >= number`, got {text!r}")
    sides = [_side(match[side], spec, line["claim"]) for side in ("left", "right")]
    left, right = (_number(side, "", cells) for side in sides)
    if left is None or right is None:
        return None, []
    if COMPARISONS[match["comparison"]](left.value, right.value, spec.tolerance):
        return "", list(left.cells)
    return f"needs {text}, got {left.value:.2f}", list(left.cells)


def _side(text: str, spec: TableSpec, claim: str) -> Side:
    # a label may contain a slash, as `steps / s` does
    terms = text.split(" / ", 1) if text.count("|") == 2 else [text]
    return tuple(_term(term, spec, claim) for term in terms)


def _term(text: str, spec: TableSpec, claim: str) -> Term:
    row, bar, column = (part.strip() for part in text.partition("|"))
    if not bar:
        try:
            float(row)
        except ValueError:
            raise ValueError(
                f"claims.csv: {claim!r}: {text!r} is neither a number nor `row | column` nor a ratio of two of them"
            ) from None
        return (row,)
    for name, names in ((row, [*spec.rows]), (column, [*spec.columns, "*"])):
        if name not in names:
            raise ValueError(f"claims.csv: {claim!r}: no {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
    return row, column


def _number(side: Side, column: str, cells: Mapping[tuple[str, str], Cell]) -> Number | None:
    """The number of a side at one column; None while a cell is empty or the divisor is zero."""
    found = []
    for term in side:
        if len(term) == 1:
            found.append(Number(float(term[0])))
            continue
        cell = cells.get((term[0], column if term[1] == "*" else term[1]))
        if cell is None or cell.mean is None:
            return None
        error = 0.0 if cell.sd is None else cell.sd / math.sqrt(cell.num_seeds)
        found.append(Number(cell.mean, error, (cell,)))
    if len(found) == 1:
        return found[0]
    above, below = found
    if not below.value:
        return None
    ratio = above.value / below.value
    error = math.hypot(above.error, ratio * below.error) / abs(below.value)
    return Number(ratio, error, above.cells + below.cells)
