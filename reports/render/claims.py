"""The claims of a paper (claims.csv), each checked on our means."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reports.render.cells import Cell
from suite.registry import nearest
from suite.report_spec import TableSpec

COMPARISONS: dict[str, Callable[[float, float, float], bool]] = {
    ">": lambda left, right, _: left > right,
    ">=": lambda left, right, _: left >= right,
    "<": lambda left, right, _: left < right,
    "~": lambda left, right, tolerance: abs(left - right) <= tolerance,
}
"""Sign of a claim to its test of (left, right, tolerance)."""

Term = tuple[str, ...]
"""A number as its one text, or a cell as (row, column)."""
Side = tuple[Term, ...]
"""One term, or the two terms of a ratio."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, checked on our means."""

    text: str
    formula: str
    source: str
    verdict: Literal["holds", "fails", "not run"]
    detail: str
    """Number of columns in which the claim holds, the ratios, or the values that refute it."""
    marks: tuple[str, ...] = ()


def read_claims(path: Path) -> list[dict[str, str]]:
    """Lines of claims.csv (`claim,left,comparison,right,source`); empty where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_claims(
    lines: Sequence[Mapping[str, str]], cells: Sequence[Cell], spec: TableSpec, marks: tuple[str, ...] = ()
) -> list[Claim]:
    """Every claim with its verdict: `holds`, `fails`, or `not run` while a cell it needs is empty and none refutes it.

    A side is a number, a cell `row | column`, or a ratio `row | column / row | column`. A `*` as the column stands
    for every column of the table, the same one everywhere in the claim. ValueError for a comparison or a side that
    the table does not have.
    """
    means = {(cell.row, cell.column): cell.mean for cell in cells}
    return [_check(line, means, spec, marks) for line in lines]


def _check(
    line: Mapping[str, str], means: Mapping[tuple[str, str], float | None], spec: TableSpec, marks: tuple[str, ...]
) -> Claim:
    sides = [_side(line[side], spec, line["claim"]) for side in ("left", "right")]
    if line["comparison"] not in COMPARISONS:
        allowed = ", ".join(COMPARISONS)
        raise ValueError(f"claims.csv: {line['claim']!r}: comparison {line['comparison']!r} is not one of {allowed}")
    compare = COMPARISONS[line["comparison"]]
    starred = any("*" in term for side in sides for term in side)
    columns: Sequence[str] = list(spec.columns) if starred else [""]
    held, refuted, ratios = 0, [], []
    for column in columns:
        left, right = (_value(side, column, means) for side in sides)
        if left is None or right is None:
            continue
        ratios += [value for side, value in zip(sides, (left, right), strict=True) if len(side) == 2]
        if compare(left, right, spec.tolerance):
            held += 1
        else:
            where = f" at {column}" if column else ""
            refuted.append(f"{left:.2f} against {right:.2f}{where}")
    verdict: Literal["holds", "fails", "not run"] = "holds"
    detail = f"{held} of {len(columns)}" if len(columns) > 1 else ""
    if ratios:
        # the value of a cell stands in the table, a ratio stands nowhere else
        span = f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else f"{ratios[0]:.3g}"
        detail = f"{detail}, {span}".lstrip(", ")
    if refuted:
        verdict, detail = "fails", "; ".join(refuted)
    elif held < len(columns):
        verdict = "not run"
    formula = f"{line['left']} {line['comparison']} {line['right']}"
    return Claim(line["claim"], formula, line["source"], verdict, detail, marks if held or refuted else ())


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


def _value(side: Side, column: str, means: Mapping[tuple[str, str], float | None]) -> float | None:
    """The number that a side stands for at one column; None while a cell is empty or the divisor is zero."""
    found = []
    for term in side:
        value = float(term[0]) if len(term) == 1 else means.get((term[0], column if term[1] == "*" else term[1]))
        if value is None:
            return None
        found.append(value)
    if len(found) == 1:
        return found[0]
    return found[0] / found[1] if found[1] else None
