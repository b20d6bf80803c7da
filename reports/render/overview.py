"""All experiments on one page: how many cells of the papers are filled and agree, and what is still to be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reports.render.board import Board, folder_of, health
from reports.render.board_figure import draw_board
from reports.render.document import Document, Grid
from reports.render.layout import claim_texts
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
MOST_NAMES = 6
"""Names that a note lists."""
COUNTED = HEADER[2:]
"""What the numbers of a line count."""


def overview(board: Board) -> Document:
    """The scoreboard: a line for each folder where there are several, and one for each report, largest gap first.

    Published cells are those for which the paper prints a number and the grid has a run. Rows that only the paper has
    are not counted, nor cells that are compared with a goal or a measured peer. `unstable` counts cells in which a seed
    meets the paper and another fails outright, `differ` those that are worse than the paper's or on the wrong side of
    its tolerance. A claim that follows from another is not counted; `unsure` claims are true within the noise only, or
    their condition is not met. The scoreboard of one paper lists its claims, too.
    """
    lines = [(counts_of(report), report) for report in board.reports]
    lines.sort(key=lambda line: (-line[0][6], -line[0][7], line[1].experiment))
    table = [((report.experiment, report.scale), counts) for counts, report in lines]
    total = _sum([counts for counts, _ in lines])
    grids = [_grid("", HEADER, [*table, (("all", ""), total)])]
    drawn = [(name, counts) for (name, _), counts in table]
    if len(board.folders) > 1:
        folders = [
            ((folder,), _sum([counts for counts, report in lines if folder_of(report.experiment) == folder]))
            for folder in board.folders
        ]
        drawn = [(name, counts) for (name,), counts in folders]
        grids = [
            _grid("", ("folder", *COUNTED), [*folders, (("all",), total)]),
            _grid("Experiments, largest gap first", HEADER, table),
        ]
    elif claims := [
        (report.experiment, *claim_texts(claim)[:2]) for report in board.reports for claim in report.claims
    ]:
        grids.append(Grid("Claims", ("experiment", "verdict", "claim"), tuple(claims), 3, ((),) * len(claims)))
    notes = (
        "published: cells with a number of the paper and a run in the grid; the next six columns add up to them.",
        "other empty: cells of the grid that no run has filled and for which the paper prints no number.",
        *(f"missing: {text}{_listed(names)}" for text, names in health(board)),
    )
    return Document(
        board.name,
        board.title.lower(),
        "each at its scale paper, or else at the first that has rows or can run here",
        tuple(grids),
        notes,
        (),
        lambda: draw_board(board.title, [(name, dict(zip(COUNTED, counts, strict=True))) for name, counts in drawn]),
    )


def _listed(names: Sequence[str]) -> str:
    """Names behind a sentence, of many the first few."""
    more = len(names) - MOST_NAMES
    return f": {', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''}" if names else ""


def _grid(heading: str, header: tuple[str, ...], lines: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> Grid:
    texts = tuple((*words, *map(str, counts)) for words, counts in lines)
    return Grid(heading, header, texts, len(header) - len(COUNTED), ((),) * len(texts))


def _sum(lines: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*lines, strict=True)) if lines else (0,) * len(COUNTED)


def counts_of(report: Report) -> tuple[int, ...]:
    """The numbers of one line, in the order of COUNTED."""
    numbers = [cell for cell in report.cells if cell.published and cell.published.value is not None and cell.planned]
    ours = numbers if report.spec.reference == "paper" else []
    verdicts = Counter(cell.verdict if cell.mean is not None else "empty" for cell in ours)
    differ = verdicts["worse"] + verdicts["differs"]
    others = sum(cell.missing for cell in report.cells if cell not in ours)
    claims = Counter(claim.verdict for claim in report.claims if not claim.follows)
    judged = [verdicts[name] for name in ("agrees", "better", "unclear", "unstable")]
    # a published cell with a value of ours that has no verdict, e.g. a speed on another device, is unclear
    judged[2] += len(ours) - sum(judged) - differ - verdicts["empty"]
    checked = (claims["holds"], claims["fails"], claims["unclear"] + claims["void"], claims["not run"])
    return (len(ours), *judged, differ, verdicts["empty"], others, *checked)
