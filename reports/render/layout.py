"""Turns a report into the document that the formats print: comparison, claims and costs as tables of strings.

`matrix` is the table in the paper's own layout: a column for each column of the paper, and for each row up to three
lines, which are the paper's values, ours, and the verdicts. `grouped` shows every stored run of a scale, points of the
grid or not: a line for each combination of values of the settings asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from subquad.reports.render.claims import OURS, Claim
from subquad.reports.render.document import DASH, MARKS, Document, Grid, amount, fixed
from subquad.reports.render.judge import Cell, rank, setting_text
from subquad.reports.render.report import COST_METRICS, Cost, Report, choices_are_listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from subquad.reports.render.sheet import Width
import statistics
from pathlib import Path

import pandas as pd
import pyarrow as pa

from subquad.reports.render.document import shown
from subquad.reports.render.judge import measurement
from subquad.reports.render.plan import make_plan, matches, pick_scale
from subquad.reports.render.rows import StoredRun, load_runs
from subquad.suite.registry import nearest
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import iter_keys, lookup, order, refuse_section

UNPUBLISHED = {"oom": "oom", "fails": "fails", "not_reported": "not reported", "not_found": "not found"}
"""First word of a note in expected.csv where the paper has no number, to what the cell shows."""


def document(report: Report) -> Document:
    """The report of an experiment, ready to print."""

    def figure(width: Width = "page") -> Canvas | None:
        # drawing needs matplotlib, which takes a second to import
        from subquad.reports.render.draw import draw

        return draw(report, width)

    named = f"source: {report.source}; " if report.source else ""
    return Document(
        name=report.experiment,
        title=f"{report.experiment}: {report.title}",
        where=f"{named}scale: {report.scale}" + (f"; device: {report.device}" if report.device else ""),
        grids=tuple(grids(report)),
        notes=report.notes,
        provenance=report.provenance,
        draw=figure,
        caption=_caption(report),
        label=f"{report.experiment}-{report.scale}",
    )


def _caption(report: Report) -> str:
    """The title, whose numbers stand beside ours, and what ours are: over how many seeds, and the best of what."""
    measured = [cell for cell in report.cells if cell.mean is not None]
    parts = [f"{report.spec.reference}: {report.source}"] * bool(report.source and report.has_published)
    if measured:
        seeds = sorted({cell.num_seeds for cell in measured})
        over = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        mean = f"mean ± standard deviation over {over} seeds" if seeds[-1] > 1 else "one run in each cell"
        ours = [f"median on one {report.device}" if report.timed else mean]
        if report.config.select is not None and any(cell.chosen for cell in measured):
            ours.append(f"with the best of several values of {', '.join(report.config.select.best_of)}")
        parts.append("ours: " + ", ".join(ours))
    parts += [f"numbers in {report.unit}"] * bool(report.unit)
    title = report.title[:1].upper() + report.title[1:]
    return ". ".join([title, *("; ".join(parts)[:1].upper() + "; ".join(parts)[1:],)] if parts else [title]) + "."


def grids(report: Report) -> Iterator[Grid]:
    """The comparison, the claims and the costs of a report, each where it has lines."""
    measured = [cell for cell in report.cells if cell.mean is not None or cell.failures]
    there = {cell.column for cell in report.cells}
    if len(there) > 1:
        columns = [column for column in report.spec.columns if column in there]
        texts = [
            (paper_text(cell), ours_text(cell, report.decimals), last_text(cell, report.decimals), cell.verdict)
            for cell in report.cells
        ]
        yield matrix(
            report.cells,
            texts,
            columns,
            report.unit,
            transpose=report.spec.transpose,
            reference=report.spec.reference,
        )
        listed = [_cells(report, measured, "Every cell that has runs")] if measured else []
    else:
        yield _cells(report, report.cells, "")
        listed = []
    if report.claims:
        claims = tuple(claim_texts(claim) for claim in report.claims)
        yield Grid("Claims", ("verdict", "claim", "checked as", "source"), claims, 4, ((),) * len(claims))
    yield from listed
    if report.sensitivity:
        yield _sensitivity(report)
    if report.costs:
        names = [name for name in COST_METRICS if any(name in cost.values for cost in report.costs)]
        titles = ("model", *(COST_METRICS[name] for name in names), "device")
        costs = tuple((c.label, *(_cost(c, name) for name in names), c.device) for c in report.costs)
        yield Grid("Cost: median [smallest, largest]", titles, costs, 1, tuple(cost.run_ids for cost in report.costs))


def _cells(report: Report, cells: Sequence[Cell], heading: str) -> Grid:
    """A line for each cell, with what the matrix has no room for."""
    unit = f" ({report.unit})" if report.unit else ""
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("row", lambda cell: cell.row),
        ("column", lambda cell: cell.column),
        (f"{report.spec.reference}{unit}", paper_text),
        (f"ours{unit}", lambda cell: ours_text(cell, report.decimals)),
        ("last epoch", lambda cell: last_text(cell, report.decimals)),
        ("median", lambda cell: _median(cell, report.decimals)),
        ("seeds", seeds_text),
        ("spread", _spread),
        ("success", _success),
        ("difference", lambda cell: _difference(cell, report.decimals)),
        ("verdict", lambda cell: cell.verdict),
        ("best at", lambda cell: cell.chosen),
    ]
    unused = {"median", "seeds", "success"} if report.timed else {"spread"}
    if not any(cell.planned for cell in report.cells):
        unused |= {f"ours{unit}", "median", "seeds", "success", "difference", "verdict"}
    if not report.has_published:
        unused |= {f"{report.spec.reference}{unit}", "success", "difference", "verdict"}
    if not choices_are_listed(report.cells):
        unused.add("best at")
    if all(cell.last is None for cell in cells):
        unused.add("last epoch")
    columns = [(title, text) for title, text in columns if title not in unused]
    lines = tuple(tuple(text(cell) for _, text in columns) for cell in cells)
    header = tuple(title for title, _ in columns)
    return Grid(heading, header, lines, 2, tuple(cell.run_ids for cell in cells))


def _sensitivity(report: Report) -> Grid:
    values = sorted({value for found in report.sensitivity for value, _, _ in found.tried}, key=rank)
    lines = []
    for found in report.sensitivity:
        counts = {value: f"{successes} of {runs}" for value, successes, runs in found.tried}
        total = "{} of {}".format(*found.rate)
        lines.append((found.row, found.column, *(counts.get(value, DASH) for value in values), total, found.window))
    header = ("row", "column", *map(setting_text, values), "all", "window")
    return Grid("Runs that succeed, by setting", header, tuple(lines), 2, ((),) * len(lines))


def paper_text(cell: Cell) -> str:
    """The paper's value of a cell, or the word that stands for it; empty where there is neither."""
    if cell.published is None:
        return ""
    if cell.published.value is not None:
        return fixed(cell.published.value, cell.published.decimals)
    word = cell.published.note.split(";")[0].split(" ")[0]
    # a table of settings has words too: the norm of a model, the place of that norm
    return word.removeprefix("value=") if word.startswith("value=") else UNPUBLISHED.get(word, "")


def ours_text(cell: Cell, decimals: int) -> str:
    """Our value of a cell with its standard deviation and marks; empty where the grid has no run."""
    if not cell.planned:
        return ""
    if cell.mean is None:
        text = ", ".join(kind for kind, _ in cell.failures) or DASH
    else:
        decimals = cell.decimals(decimals)
        text = fixed(cell.mean, decimals) + ("" if cell.sd is None else f" ± {fixed(cell.sd, decimals)}")
    return text + "".join(cell.marks)


def last_text(cell: Cell, decimals: int) -> str:
    """The mean at the last epoch, where the best one was chosen on the test rows and this one is known."""
    return "" if cell.last is None else fixed(cell.last, decimals)


def _median(cell: Cell, decimals: int) -> str:
    # the median of one seed is its mean
    return "" if cell.median is None or cell.num_seeds < 2 else fixed(cell.median, decimals)


def _success(cell: Cell) -> str:
    if cell.successes is None:
        return ""
    return f"{cell.successes} of {cell.num_seeds + sum(count for _, count in cell.failures)}"


def _difference(cell: Cell, decimals: int) -> str:
    return "" if cell.difference is None else fixed(cell.difference, cell.decimals(decimals), sign=True)


def seeds_text(cell: Cell) -> str:
    """Number of seeds that gave a value, of how many planned ones, and the statuses of the others."""
    if not cell.planned:
        return ""
    text = f"{cell.num_seeds}" if cell.num_seeds == cell.planned else f"{cell.num_seeds} of {cell.planned}"
    return "; ".join([text, *(f"{count} {kind}" for kind, count in cell.failures)])


def _spread(cell: Cell) -> str:
    return "" if cell.spread is None else f"{cell.spread:.1%}"


def claim_texts(claim: Claim) -> tuple[str, str, str, str]:
    """Verdict, sentence, formula and source of a claim."""
    return _verdict(claim), _sentence(claim), claim.formula, claim.source


def _verdict(claim: Claim) -> str:
    detail = f" ({claim.detail})" if claim.detail else ""
    return f"{claim.verdict}{''.join(claim.marks)}{detail}"


def _sentence(claim: Claim) -> str:
    note = f" [{claim.note}]" if claim.note else ""
    if claim.follows:
        return f"{claim.text}{note} (not counted: follows from {claim.follows!r})"
    return claim.text + note + (" (not counted: no paper makes it)" if claim.source.startswith(OURS) else "")


def _cost(cost: Cost, name: str) -> str:
    if name not in cost.values:
        return DASH
    middle, low, high = cost.values[name]
    if name in ("num_parameters", "state_size"):
        where = f" ({cost.length})" if name == "state_size" and cost.length else ""
        return f"{middle:,.0f}{where}"
    binary = name.startswith("peak")
    text = amount(middle, binary)
    return text if low == high else f"{text} [{amount(low, binary)}, {amount(high, binary)}]"


LINES = ("paper", "ours", "last epoch", "verdict")


def matrix(
    cells: Sequence[Cell],
    texts: Sequence[tuple[str, ...]],
    columns: Sequence[str],
    unit: str,
    *,
    transpose: bool = False,
    reference: str = "paper",
) -> Grid:
    """The matrix of a report's cells.

    columns: in the order of the paper.

    texts: the paper's value, ours, that of the last epoch and the verdict of each cell; empty where there is none.
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


def _kinds(texts: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a row that say something. A dash, for a cell that has not been run, says it once in a row."""
    for i, kind in enumerate(LINES):
        written = {text[i] for text in texts} - {""}
        says_nothing = kind == "ours" and not any(text.strip("".join((DASH, *MARKS))) for text in written)
        # without a value of the paper, too, the dashes are the row
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


def grouped(
    config: ExperimentConfig,
    folder: Path,
    name: str,
    frame: pa.Table | pd.DataFrame,
    keys: Sequence[str],
    scale: str | None,
) -> Document:
    """The stored runs of one scale by the dotted keys. ValueError for a key that no run has.

    A number is the mean over the runs of a line, with their standard deviation; runs that failed are counted
    beside it. Where other settings than the seed differ within a line, a note names them.
    """
    runs = load_runs(frame)
    scale = pick_scale(config, {run.scale for run in runs}, scale)
    runs = [run for run in runs if run.scale == scale]
    known = {key for run in runs for key, _ in iter_keys(run.config)}
    keys = list(dict.fromkeys(keys))
    for key in keys:
        refuse_section(f"--by {key}", key, known)
        if runs and not any(lookup(run.config, key) is not None for run in runs):
            raise ValueError(f"--by {key}: no stored run of {name} has it{nearest(key, known)}")
    plan = make_plan(config, folder, scale)
    columns = list(plan.spec.columns)
    groups: dict[tuple[str, ...], list[StoredRun]] = {}
    for run in sorted(runs, key=lambda run: [order(lookup(run.config, key)) for key in keys]):
        groups.setdefault(tuple(setting_text(lookup(run.config, key)) for key in keys), []).append(run)

    def number(column: str, group: Sequence[StoredRun]) -> str:
        found = []
        for run in group:
            value = measurement(plan.spec, column, run) if matches(plan.spec.columns[column], run.config) else None
            if run.status == "ok" and value is not None and value.value is not None:
                found.append(shown(value.value, value.unit, plan.spec.percent))
        if not found:
            return DASH
        spread = f" ± {fixed(statistics.stdev(found), plan.decimals)}" if len(found) > 1 else ""
        return fixed(statistics.fmean(found), plan.decimals) + spread

    lines = []
    mixed: set[str] = set()
    for values, group in groups.items():
        bad = sum(run.status != "ok" for run in group)
        lines.append((*values, *(number(column, group) for column in columns), str(len(group)), str(bad)))
        mixed |= _differing(group) - set(keys)
    notes = [f"every stored run of scale {scale}, points of the grid or not; mean ± standard deviation over runs"]
    if mixed:
        differ = ", ".join(sorted(mixed, key=_names_first))
        notes.append(f"runs of one line also differ in: {differ}; name them with --by to separate them")
    grid = Grid(
        "",
        (*keys, *columns, "runs", "failed"),
        tuple(lines),
        len(keys),
        tuple(tuple(run.run_id for run in group) for group in groups.values()),
    )
    where = f"by {', '.join(keys)}; scale: {scale}"
    return Document(name, f"{name}: {config.title}", where, (grid,), tuple(notes), ())


def _names_first(key: str) -> tuple[bool, str]:
    """Sorts `model.name` before the options of models, which often follow from it."""
    return not key.endswith(".name"), key


def _differing(group: Sequence[StoredRun]) -> set[str]:
    """The settings, the seed aside, that are not the same in all runs."""
    values: dict[str, set[str]] = {}
    for run in group:
        for key, value in iter_keys(run.config):
            values.setdefault(key, set()).add(str(value))
    ignored = ("seed", "data", "task.data", "train.init_from.base")
    return {key for key, found in values.items() if len(found) > 1 and key not in ignored}
