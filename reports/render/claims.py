"""The claims of a paper (claims.csv), each checked on our means, their noise, and the seeds behind them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from subquad.reports.render.document import MARKS, REDUCED, STAND_IN
from subquad.reports.render.judge import Cell
from subquad.reports.render.plan import read_table
from subquad.suite.registry import nearest
from subquad.suite.settings.report_spec import TableSpec

COMPARISONS: dict[str, Callable[[float, float, float], float]] = {
    ">": lambda left, right, _: left - right,
    ">=": lambda left, right, _: left - right,
    "<": lambda left, right, _: right - left,
    "~": lambda left, right, tolerance: tolerance - abs(left - right),
    ">~": lambda left, right, tolerance: tolerance + left - right,
    "<~": lambda left, right, tolerance: tolerance + right - left,
}
"""Sign of a claim to the distance, of (left, right, tolerance), by which it is true; negative where it is false. `~` is
about equal; `>~` and `<~` are about equal or better, where larger and where smaller numbers are better."""

MOST_REASONS = 3
"""Columns of which a claim says why it fails or is unclear there."""
CONDITION = re.compile(r"^(?P<left>.+\|.+?) (?P<comparison>>=|>|<) (?P<right>\S+)$")

Term = tuple[str, ...]
"""A number as its one text, or a cell as (row, column)."""
Side = tuple[Term, ...]
"""One term, or the two terms of a ratio."""
Verdict = Literal["holds", "fails", "unclear", "not run"]
OURS = "ours"
"""The source of a claim that no paper makes begins with this word."""


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
    """The claim of which this one is a consequence, or `experiment | claim` that says the same; it is not counted."""
    note: str = ""
    """A remark for the reader, such as an operator that is not the paper's."""
    subject: Term = ()
    """(row, column) of the first cell that the claim names; the column may be `*`."""


@dataclass(frozen=True)
class Number:
    """The value of a side of a claim, with its standard error over seeds, and the cells behind it."""

    value: float
    last: float
    """The value at the last epoch, where the best one was chosen on test; else `value`."""
    error: float = 0.0
    cells: tuple[Cell, ...] = ()
    cited: bool = False
    """Whether it is the paper's number of a row that only the paper has."""


def read_claims(path: Path) -> list[dict[str, str]]:
    """Lines of claims.csv: `claim,left,comparison,right,source` and the optional `if,follows,note`.

    Empty where there is no file. ValueError names a line that is too short or too long.
    """
    return [line for _, line in read_table(path, ("claim", "left", "comparison", "right", "source"))]


def check_claims(
    lines: Sequence[Mapping[str, str]], cells: Sequence[Cell], spec: TableSpec, outside: Collection[str] = ()
) -> list[Claim]:
    """Every claim with its verdict.

    outside: columns of which the scale has no cell, so that `*` does not stand for them.

    - `holds`: true of our means in every column, by at least two standard errors.
    - `fails`: false of our means in a column, by at least two standard errors. A cell of one seed has none, so any
      distance decides; the mark of few seeds says so.
    - `unclear`: true or false by less, or a run behind a mean gave no value, or the last epochs say otherwise where the
      best one was chosen on test. So is a claim whose condition (`if`) is not met: a model that has not solved the
      training length shows nothing about longer ones.
    - `not run`: a cell it needs is empty and none refutes it. So is a claim that compares stand-in data or a reduced
      scale with the paper's number of a row that only the paper has.

    A side is a number, a cell `row | column`, or a ratio `row | column / row | column`. A `*` as the column stands
    for every column of the table that the scale has, the same one everywhere in the claim. `if` is a comparison of a
    cell with a number, `row | column >= 99`; `follows` is the text of another claim of the file, or
    `experiment | text` of one that says the same elsewhere. ValueError for what the table does not have.
    """
    found = {(cell.row, cell.column): cell for cell in cells}
    texts = [line["claim"] for line in lines]
    for line in lines:
        if texts.count(line["claim"]) > 1:
            raise ValueError(f"claims.csv: {line['claim']!r} stands twice, and would be counted twice; leave one out")
        follows = line.get("follows") or ""
        if follows and " | " not in follows and (follows not in texts or follows == line["claim"]):
            raise ValueError(
                f"claims.csv: {line['claim']!r}: follows names no other claim, {follows!r}{nearest(follows, texts)}"
            )
    return [_check(line, found, spec, outside) for line in lines]


def _check(
    line: Mapping[str, str], cells: Mapping[tuple[str, str], Cell], spec: TableSpec, outside: Collection[str]
) -> Claim:
    names = [*spec.rows, *dict.fromkeys(row for row, _ in cells if row not in spec.rows)]
    sides = [_side(line[side], names, spec, line["claim"]) for side in ("left", "right")]
    if line["comparison"] not in COMPARISONS:
        allowed = ", ".join(COMPARISONS)
        raise ValueError(f"claims.csv: {line['claim']!r}: comparison {line['comparison']!r} is not one of {allowed}")
    if not any(len(term) == 2 for side in sides for term in side):
        raise ValueError(f"claims.csv: {line['claim']!r}: names no cell, `row | column`, that could hold or fail")
    if "~" in line["comparison"] and any(len(side) == 2 for side in sides):
        raise ValueError(
            f"claims.csv: {line['claim']!r}: the table's tolerance is that of a cell, not of a ratio; write the "
            "bounds of the ratio as two claims, with > and <"
        )
    starred = any("*" in term for side in sides for term in side)
    own = [column for column in spec.columns if "speedup_over" not in spec.columns[column]]
    columns = [column for column in own if column not in outside] if starred else [""]
    behind: list[Cell] = []
    held, refuted, doubtful, ratios, apart = 0, [], [], [], ""
    for column in columns:
        left, right = (_number(side, column, cells, spec) for side in sides)
        if left is None or right is None:
            continue
        ours = (*left.cells, *right.cells)
        if (left.cited or right.cited) and any({REDUCED, STAND_IN}.intersection(cell.marks) for cell in ours):
            apart = "the paper's number is of other data or another scale"
            continue
        behind += ours
        known = [number.value for side, number in zip(sides, (left, right), strict=True) if len(side) == 2]
        ratios += [value for value in known if math.isfinite(value)]
        where = f" at {column}" if column else ""
        # the columns that the claim names may have tolerances of their own
        tolerance = min(spec.of(cell.column, "tolerance") for cell in ours)
        if reason := _doubt(line["comparison"], left, right, tolerance):
            doubtful.append(f"{reason}{where}")
        elif _is_true(line["comparison"], left.value, right.value, tolerance):
            held += 1
        else:
            refuted.append(f"{_against(left.value, right.value)}{where}")
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
        verdict, detail = "unclear", unmet
    elif unmet is None or held + len(doubtful) < len(columns):
        verdict, detail = "not run", apart or detail
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
        subject=next(term for side in sides for term in side if len(term) == 2),
    )


def _first(reasons: Sequence[str]) -> str:
    """The first of many reasons; the table of the report shows the values of all columns."""
    more = len(reasons) - MOST_REASONS
    return "; ".join(reasons[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _is_true(comparison: str, left: float, right: float, tolerance: float) -> bool:
    distance = COMPARISONS[comparison](left, right, tolerance)
    return distance > 0 or (distance == 0 and comparison not in (">", "<"))


def _doubt(comparison: str, left: Number, right: Number, tolerance: float) -> str:
    """The reason why our means neither confirm nor refute a comparison; empty where they do."""
    lost = sum(cell.lost for cell in (*left.cells, *right.cells))
    if lost:
        return f"{lost} run{'s' * (lost != 1)} without a value"
    if math.isnan(left.value + right.value):
        return "the divisor of the ratio is 0"
    # distance by which the means may move before the claim is no longer true, or no longer false
    room = abs(COMPARISONS[comparison](left.value, right.value, tolerance))
    noise = 2 * math.hypot(left.error, right.error)
    is_true = _is_true(comparison, left.value, right.value, tolerance)
    if room < noise:
        decimals = _decimals(room)
        return f"{'true' if is_true else 'false'} by {room:.{decimals}f}, two standard errors are {noise:.{decimals}f}"
    if _is_true(comparison, left.last, right.last, tolerance) != is_true:
        return f"at the last epoch {_against(left.last, right.last)}"
    return ""


def _against(left: float, right: float) -> str:
    decimals = _decimals(abs(left - right))
    return f"{left:.{decimals}f} against {right:.{decimals}f}"


def _decimals(distance: float) -> int:
    """Two decimals, or as many as show the first digit of a distance that is smaller."""
    return max(2, -math.floor(math.log10(distance))) if 1e-9 < distance < 1 else 2


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
    sides = [_side(match[side], [*spec.rows], spec, line["claim"]) for side in ("left", "right")]
    left, right = (_number(side, "", cells, spec) for side in sides)
    if left is None or right is None:
        return None, []
    if _is_true(match["comparison"], left.value, right.value, spec.tolerance):
        return "", list(left.cells)
    return f"needs {text}, got {left.value:.2f}", list(left.cells)


def _side(text: str, rows: Sequence[str], spec: TableSpec, claim: str) -> Side:
    # a label may contain a slash, as `steps / s` does
    terms = text.split(" / ", 1) if text.count("|") == 2 else [text]
    return tuple(_term(term, rows, spec, claim) for term in terms)


def _term(text: str, rows: Sequence[str], spec: TableSpec, claim: str) -> Term:
    row, bar, column = (part.strip() for part in text.partition("|"))
    if not bar:
        try:
            known = math.isfinite(float(row))
        except ValueError:
            known = False
        if not known:
            raise ValueError(
                f"claims.csv: {claim!r}: {text!r} is neither a number nor `row | column` nor a ratio of two of them"
            )
        return (row,)
    for name, names in ((row, rows), (column, [*spec.columns, "*"])):
        if name not in names:
            raise ValueError(f"claims.csv: {claim!r}: no {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
    return row, column


def _number(side: Side, column: str, cells: Mapping[tuple[str, str], Cell], spec: TableSpec) -> Number | None:
    """The number of a side at one column; None while a cell is empty. It is NaN where the runs of a cell diverged, and
    where the divisor is zero. In a row that only the paper has, it is the paper's."""
    found = []
    for term in side:
        if len(term) == 1:
            found.append(Number(float(term[0]), float(term[0])))
            continue
        cell = cells.get((term[0], column if term[1] == "*" else term[1]))
        if cell is not None and cell.row not in spec.rows and cell.published and cell.published.value is not None:
            found.append(Number(cell.published.value, cell.published.value, cited=True))
            continue
        if cell is None or (cell.mean is None and "diverged" not in dict(cell.failures)):
            return None
        if cell.mean is None:
            found.append(Number(math.nan, math.nan, cells=(cell,)))
            continue
        error = 0.0 if cell.sd is None else cell.sd / math.sqrt(cell.num_seeds)
        found.append(Number(cell.mean, cell.mean if cell.last is None else cell.last, error, (cell,)))
    if len(found) == 1:
        return found[0]
    above, below = found
    if not below.value:
        return Number(math.nan, math.nan, cells=above.cells + below.cells)
    ratio = above.value / below.value
    last = above.last / below.last if below.last else ratio
    error = math.hypot(above.error, ratio * below.error) / abs(below.value)
    return Number(ratio, last, error, above.cells + below.cells, above.cited or below.cited)
