"""An experiment at a glance, as HTML for a page of the documentation: a card of its verdicts, and a coloured table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from subquad.reports.render.count import CELLS, claims_text, count, prefix
from subquad.reports.render.document import DASH
from subquad.reports.render.judge import Cell
from subquad.reports.render.layout import ours_text, paper_text
from subquad.reports.render.report import Report

SIGNS = {"agrees": "✓", "better": "▲", "unclear": "?", "unstable": "±", "worse": "▼", "differs": "≠"}
"""A sign beside each verdict, so that a colour is never alone in what it says."""


def card(report: Report, scoreboard: str) -> str:
    """The counts of a report as a bar and a line, with a link to all its seeds.

    scoreboard: address of the scoreboard, as seen from the page.
    """
    counts = count(report)
    total = counts["in a grid"]
    parts = [(name, counts[name]) for name in CELLS if counts[name]]
    bar = "".join(
        f'<span class="{name.partition(",")[0].replace(" ", "-")}{" few" if "," in name else ""}" '
        f'style="width:{100 * number / total:.1f}%" title="{number} {name}"></span>'
        for name, number in parts
    )
    said = ", ".join(f"{number} {name}" for name, number in parts) if parts else "No number of a paper is judged here."
    claims = claims_text(counts, prefix(report))
    address = escape(f"{scoreboard}#experiment?name={report.experiment}&scale={report.scale}")
    return (
        f'<div class="verdict-card"><p><strong>{escape(said)}</strong></p>'
        + (f'<div class="verdict-bar">{bar}</div>' if bar else "")
        + (f"<p>claims: {claims}</p>" if claims else "")
        + f"<p>{len(report.runs)} runs at the scale {escape(report.scale)}; "
        + f'<a href="{address}">every seed, curve and command</a></p></div>'
    )


def verdict_table(report: Report) -> str:
    """The table of the paper: ours, its standard deviation, and the paper's number, coloured by the verdict."""
    columns = list(dict.fromkeys(cell.column for cell in report.cells))
    cells = {(cell.row, cell.column): cell for cell in report.cells}
    rows = list(dict.fromkeys(cell.row for cell in report.cells))
    unit = f", in {report.unit}" if report.unit else ""
    caption = f"Ours with its standard deviation, and in italics the {report.spec.reference}'s number{unit}. "
    signs = ", ".join(f"{sign} {verdict}" for verdict, sign in SIGNS.items())
    lines = "".join(
        f'<tr><th scope="row">{escape(row)}</th>{"".join(_cell(report, cells.get((row, c))) for c in columns)}</tr>'
        for row in rows
    )
    return (
        f"<p>{escape(caption)}{signs}, {DASH} not run.</p>"
        f'<div class="verdict-table"><table class="verdicts"><thead>{"".join(_heads(columns))}</thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _heads(columns: Sequence[str]) -> Iterator[str]:
    """The titles, with what neighbours share once above them: `acc at length` over 20 and 40."""
    heads = [column.rpartition(" ")[0] for column in columns]
    shared = [
        head if head and head in (*heads[max(i - 1, 0) : i], *heads[i + 1 : i + 2]) else ""
        for i, head in enumerate(heads)
    ]
    if any(shared):
        spans = [(name, len(list(same))) for name, same in groupby(shared)]
        above = "".join(f'<th colspan="{size}" scope="colgroup">{escape(name)}</th>' for name, size in spans)
        yield f"<tr><td></td>{above}</tr>"
    leaves = [column[len(head) :].lstrip() for column, head in zip(columns, shared, strict=True)]
    below = "".join(f'<th scope="col">{escape(leaf)}</th>' for leaf in leaves)
    yield f"<tr><td></td>{below}</tr>"


def _cell(report: Report, cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    ours, _, spread = ours_text(cell, report.decimals).partition(" ± ")
    sign = f"{SIGNS[cell.verdict]} " if cell.verdict in SIGNS else ""
    parts = [f"<span>{sign}{escape(ours)}</span>"] if ours else []
    parts += [f"<small>± {escape(spread)}</small>"] if spread else []
    parts += [f"<small><i>{escape(text)}</i></small>"] if (text := paper_text(cell)) else []
    kind = f' class="{cell.verdict}" title="{cell.verdict}"' if sign else ""
    return f"<td{kind}>{''.join(parts)}</td>"
