"""The table in the paper's own layout: a line for each row of the paper, a column for each of its columns.

A row of the paper has up to three lines: the paper's values, ours, and the verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.render.cells import Cell
from reports.render.document import Grid

LINES = ("paper", "ours", "verdict")


def matrix(
    cells: Sequence[Cell],
    texts: Sequence[tuple[str, str, str]],
    columns: Sequence[str],
    unit: str,
    *,
    transpose: bool = False,
    reference: str = "paper",
) -> Grid:
    """The matrix of a report's cells.

    columns: in the order of the paper.

    texts: the paper's value, ours and the verdict of each cell; empty where there is none.
    reference: name of the lines with the numbers beside ours (`TableSpec.reference`).
    transpose: put the rows of the paper side by side, and its columns below each other.
    """
    places = [(cell.column, cell.row) if transpose else (cell.row, cell.column) for cell in cells]
    found = dict(zip(places, zip(cells, texts, strict=True), strict=True))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    if transpose:
        rows, columns = list(columns), rows
    lines: list[tuple[str, ...]] = []
    run_ids: list[tuple[str, ...]] = []
    for row in rows:
        there = {column: found[row, column] for column in columns if (row, column) in found}
        for kind in _kinds([text for _, text in there.values()]):
            name = reference if kind == "paper" else kind
            lines.append((row, name, *(there[c][1][LINES.index(kind)] if c in there else "" for c in columns)))
            ids = (run_id for cell, _ in there.values() for run_id in cell.run_ids if kind == "ours")
            run_ids.append(tuple(dict.fromkeys(ids)))
    groups, leaves = _grouped(columns)
    header = ("column" if transpose else "row", unit, *leaves)
    return Grid("", header, tuple(lines), 2, tuple(run_ids), ("", "", *groups) if any(groups) else ())


def _kinds(texts: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """The lines of a row that say something. A dash, for a cell that has not been run, says it once in a row."""
    for i, kind in enumerate(LINES):
        written = {text[i] for text in texts} - {""}
        says_nothing = kind == "ours" and not any(text.strip("—†‡§¶*") for text in written)
        # where the paper has no value either, the dashes are the row
        if written and not (says_nothing and any(text[0] for text in texts)):
            yield kind


def _grouped(columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Titles of columns as what neighbours share and what is left: `acc at length 20`, `acc at length 40`.

    Two titles share all words but the last. A title that shares nothing with a neighbour has no group.
    """
    heads = [column.rpartition(" ")[0] for column in columns]
    groups = [
        head if head and head in (heads[i - 1] if i else "", *heads[i + 1 : i + 2]) else ""
        for i, head in enumerate(heads)
    ]
    leaves = [column[len(group) :].lstrip() for column, group in zip(columns, groups, strict=True)]
    return groups, leaves
