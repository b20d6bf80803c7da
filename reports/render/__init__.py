"""From stored rows to a report, and from a report to text, a figure or a page.

    report = build(load_experiment(folder / "grid.yaml"), folder, rows_of(storage.files(roots, name)))
    print(render(report, "terminal"))
    render(report, "png", Path("figure.png"))        # and figure.svg beside it

A row goes one way. `rows` reads it into a run, `selection` puts the run into the cells of the table that `plan` has
made of the grid and of the paper's numbers, and `judge` gives each cell its value and verdict. `claims` checks the
paper's sentences on the cells, `figure` collects the data of the figure, and `report` has all of it. `count` counts
a paper's numbers and claims by their verdicts, for terminal, page and documents alike. `layout` turns a report into a
`document` of strings, of which `brief` keeps what fits a screen, as `against` does with a comparison of its rows, and
`printing` and `latex` print it. `draw` draws its figure on a `sheet`, with the words of `finding`: every seed
(`seeds`), `lines`, what it costs (`costs`, `frontier`, `curves`) or fields (`tiles`). A `board` has the reports of all
experiments or of a paper, and `page` makes of it an HTML page whose views `home.js` (three questions), `subjects.js`
(a mixer, pair, task or experiment) and `lists.js` (all cells, claims, kernels) draw. `operators` is the document of the
operators' speed, whose timings `speed` reads with their `floors` and `changes` compares, and `arena` that of their
comparison with other projects' kernels. `quotes` holds the numbers in documents to the committed rows.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Literal, get_args

from subquad.reports.render import logbook
from subquad.reports.render.against import against
from subquad.reports.render.arena import arena
from subquad.reports.render.board import About, Board, index, overview, read_papers
from subquad.reports.render.brief import brief
from subquad.reports.render.count import PAPERS, scale_to_count
from subquad.reports.render.document import Document
from subquad.reports.render.latex import latex
from subquad.reports.render.layout import document, grouped
from subquad.reports.render.operators import history
from subquad.reports.render.plan import pick_scale
from subquad.reports.render.printing import markdown, terminal
from subquad.reports.render.quotes import update_documents
from subquad.reports.render.report import Report, build, report_of
from subquad.reports.render.rows import load_runs, rows_of
from subquad.suite.registry import nearest
from subquad.suite.store.target import replacing

Format = Literal["terminal", "md", "latex", "png", "pdf", "html"]

__all__ = [
    "PAPERS",
    "About",
    "Board",
    "Document",
    "Format",
    "Report",
    "against",
    "arena",
    "brief",
    "build",
    "grouped",
    "history",
    "index",
    "load_runs",
    "logbook",
    "overview",
    "pick_scale",
    "read_papers",
    "render",
    "report_of",
    "rows_of",
    "scale_to_count",
    "update_documents",
]


def render(
    report: Report | Document | Board,
    format: Format,
    out: Path | None = None,
    *,
    details: bool = False,
    width: Literal["column", "page"] = "page",
    source: str = "",
) -> str | Path:
    """The report in one format: its text, or, where `out` names a file, the path of the file that was written.

    details: in `latex`, all tables, and not the first alone; the other formats always have them.
    width: of a figure, that of a column of a paper (3.3 inches) or of its page (7 inches).
    source: the command that draws a figure, for its metadata.

    `png` needs `out`, a PNG or an SVG, and writes the other one beside it; `pdf` needs it, too. Raises ValueError for
    an unknown format, and for a figure where there is nothing to draw.
    """
    if format not in get_args(Format):
        names = get_args(Format)
        raise ValueError(f"unknown format {format!r}{nearest(format, names)}; there are: {', '.join(names)}")
    shown = _document(report)
    if format in ("png", "pdf"):
        from subquad.reports.render.draw import save

        if out is None:
            raise ValueError(f"{format}: a figure is written to a file; give --out FILE.{format}")
        save(shown, out.with_suffix(f".{format}"), width, source)
        return out
    if format == "html":
        from subquad.reports.render.page import page
        from subquad.reports.render.printing import html

        text = page(report) if isinstance(report, Board) else html(shown)
    elif format == "terminal":
        # nothing is wrapped or coloured in a pipe or a file, which other programs read
        on_screen = out is None and sys.stdout.isatty()
        color = on_screen and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        text = terminal(shown, shutil.get_terminal_size().columns if on_screen else None, color=color)
    else:
        text = latex(shown, details) if format == "latex" else markdown(shown)
    if out is None:
        return text
    with replacing(out) as temporary:
        temporary.write_text(text)
    return out


def _document(report: Report | Document | Board) -> Document:
    if isinstance(report, Report):
        return document(report)
    return overview(report) if isinstance(report, Board) else report
