"""Pages over many experiments: the scoreboard, the crossover with attention, and every table of the four papers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from subquad.reports.render.count import CELLS, FEW, JUDGED, PAPERS, claims_text, count, prefix, reasons, total
from subquad.reports.render.document import DASH, Document, Grid
from subquad.reports.render.figure import Series
from subquad.reports.render.layout import claim_texts
from subquad.reports.render.report import Report
from subquad.suite.bench.cases import SETS
from subquad.suite.environment import CALL
from subquad.suite.options import Config, parse, read_yaml_file
from subquad.suite.registry import nearest
from subquad.suite.settings.config import ExperimentConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from subquad.reports.render.sheet import Width


@dataclass(frozen=True)
class About:
    """The description of a model, a task or an operator, as its source file gives it."""

    kind: str
    """`model`, `task` or `operator`."""
    name: str
    """Its name in the registry."""
    summary: str
    path: str = ""
    """Its file from the root of the repository; empty for one of a plugin."""
    text: str = ""
    """Its docstring: an equation, or an instance of a task."""


@dataclass(frozen=True)
class Board:
    """The data of a scoreboard: reports of experiments, and the rows of the operators' benchmarks."""

    name: str
    """Name of a paper, or `overview` for all of them."""
    reports: tuple[Report, ...]
    """One for each experiment, at its scale `paper` or else at the first that has rows or can run here."""
    others: tuple[Report, ...]
    """The other scales that have rows. Their cells are shown, but they are not counted."""
    kernels: pd.DataFrame
    """Stored rows of `bench`."""
    operators: tuple[str, ...] = ()
    """Every operator that the suite has."""
    about: tuple[About, ...] = ()
    """Every model, task and operator, for the pages about them."""
    costs: Mapping[str, str] = field(default_factory=dict)
    """Experiment to what its README says of the time that it takes."""
    estimates: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Experiment and scale to the time that one seed of its grid takes, from the durations of stored runs."""

    @property
    def title(self) -> str:
        """The title of the page."""
        return "All experiments" if self.name == "overview" else f"Experiments of {self.name}"

    @property
    def folders(self) -> list[str]:
        """The papers and other folders that have a report, the papers first."""
        found = dict.fromkeys(folder_of(report.experiment) for report in self.reports)
        return [name for name in PAPERS if name in found] + sorted(found.keys() - PAPERS.keys())


def folder_of(experiment: str) -> str:
    """`h3` for `h3/table2`; an experiment without a folder stands for itself."""
    return experiment.partition("/")[0]


def health(board: Board) -> list[tuple[str, Sequence[str]]]:
    """Missing data: for each kind that there is a sentence with its number, and the names that it means."""
    reports = [report for report in board.reports if report.config.runnable]
    elsewhere = {report.experiment for report in board.others}
    empty = [report.experiment for report in reports if not report.runs and report.experiment not in elsewhere]
    reduced = [report.experiment for report in reports if not report.runs and report.experiment in elsewhere]
    asked = [cell for report in reports for cell in report.cells if cell.planned]
    missing = sum(cell.missing for cell in asked)
    short = sum(0 < cell.num_seeds < cell.planned for cell in asked)
    runs = {run.run_id: run for report in reports for run in report.runs}.values()
    ended = [run.run_id for run in runs if run.status not in ("ok", "n/a")]
    dirty = [run.run_id for run in runs if run.commit.endswith("-dirty")]
    rows = board.kernels[board.kernels["scale"].isin(SETS)]
    times = rows[rows["metric"] == "time"]
    measured = times[times["status"] == "ok"]
    unmeasured = [name for name in board.operators if name not in set(measured["task"])]
    cases = measured.groupby(["device", "task", "model", "slice"])["commit"].nunique()
    once = int((cases == 1).sum())
    found: list[tuple[int, str, Sequence[str]]] = [
        (len(empty), f"of {len(reports)} experiments have no rows", empty),
        (len(reduced), "experiments have rows of a smaller scale only", reduced),
        (missing, f"of {len(asked)} cells have not been run", ()),
        (short, ("cell has" if short == 1 else "cells have") + " fewer seeds than their grid asks for", ()),
        (len(ended), f"of {len(runs)} runs ended with an error, diverged or ran out of memory", ended),
        (len(dirty), f"of {len(runs)} runs were made with uncommitted changes", dirty),
        (len(unmeasured), f"of {len(board.operators)} operators have no benchmark", unmeasured),
        (once, f"of {len(cases)} benchmark cases were measured at one commit only, so they show no trend", ()),
    ]
    return [(f"{count} {text}", names) for count, text, names in found if count]


MOST_NAMES = 6
"""Names that a note lists."""
FOUR = "four papers"
"""The line with the sum over the papers that the suite reproduces."""
HEADER = ("published", "in a grid", *JUDGED, *JUDGED, "at chance", "other device", "other data", "not run")
GROUPS = ("", "", *["three seeds or more"] * len(JUDGED), *["fewer seeds"] * len(JUDGED), "", "", "", "")
NUMBERS = ("published", "in a grid", *CELLS)
"""The counts in the columns of HEADER."""
NOTES = (
    "published: numbers of the papers that a run could give, each counted once. Every number in a grid is also in one "
    "of the columns behind it.",
    "agree: within the tolerance. differ: worse than the paper, or unstable. at chance: the paper's number is a guess.",
    "other device: times, speeds and memory of another device or protocol, which are not compared.",
    "other data: ours is of stand-in data. not run: not at the paper's scale, or a run was lost.",
    "claims: of the papers, each counted once; reduced: checked at a smaller scale. (2‡): so many of them rest on a "
    "cell of fewer than three seeds. not run (3†): so many of them have a verdict at a smaller scale.",
)


def counts_of(board: Board) -> list[tuple[str, Counter[str]]]:
    """Each folder that has counts, the sum over the four papers if there are several, and the sum over all."""
    found = [(report.experiment, count(report, board.others)) for report in board.reports]
    folders = [(folder, total(each for name, each in found if folder_of(name) == folder)) for folder in board.folders]
    papers = [each for folder, each in folders if folder in PAPERS]
    sums = [(FOUR, total(papers))] if len(papers) > 1 else []
    return [*(line for line in folders if line[1]), *sums, ("all", total(each for _, each in found))]


def overview(board: Board) -> Document:
    """The scoreboard: a line for each folder where there are several, and one for each experiment that has a count,
    those with most numbers that are not run first. The scoreboard of one paper lists its claims, too. The picture of
    several folders has a bar for each of the four papers, and that of one a bar for each experiment."""
    lines = [(report, count(report, board.others)) for report in board.reports]
    lines = sorted(((r, each) for r, each in lines if each), key=lambda line: (-line[1]["not run"], line[0].experiment))
    table = [((r.experiment, r.scale), each, (claims_text(each, prefix(r)),)) for r, each in lines]
    names = ("experiment", "scale")
    folders = counts_of(board)
    title, drawn = board.title, [(report.experiment, each) for report, each in lines]
    if len(board.folders) > 1:
        title, drawn = _verdicts(dict(folders)), [(PAPERS[name], each) for name, each in folders if name in PAPERS]
        sums = [((name,), each, _both(each)) for name, each in folders]
        grids = [
            _grid("", ("folder",), ("claims", "claims, reduced"), sums),
            _grid("Experiments, most numbers not run first", names, ("claims",), table),
        ]
    else:
        every = folders[-1][1]
        texts = [text for start in ("claims: ", "reduced claims: ") if (text := claims_text(every, start))]
        grids = [_grid("", names, ("claims",), [*table, (("all", ""), every, ("; reduced: ".join(texts),))])]
        if claims := [(r.experiment, *claim_texts(claim)[:2]) for r in board.reports for claim in r.claims]:
            grids.append(Grid("Claims", ("experiment", "verdict", "claim"), tuple(claims), 3, ((),) * len(claims)))

    def figure(width: Width = "page") -> Canvas | None:
        # drawing needs matplotlib, which takes a second to import
        from subquad.reports.render.draw import draw_board

        return draw_board(title, drawn, width)

    return Document(
        board.name,
        board.title.lower(),
        "each at its scale paper, or else at the first that has rows or can run here",
        tuple(grids),
        (*NOTES, *(f"missing: {text}{_listed(names)}" for text, names in health(board))),
        (),
        figure,
    )


def _verdicts(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The title of a picture of several papers: how many of their numbers agree, differ and are not run."""
    every = counts.get(FOUR, counts["all"])
    few, better = sum(every[name] for name in FEW), every["better"]
    more = f" {better} {'is' if better == 1 else 'are'} better," if better else ""
    return (
        f"Of {every['in a grid']} numbers {every['agree']} agree,{more} {every['differ']} differ, {few} have one "
        f"or two seeds and {every['not run']} are not run"
    )


def _listed(names: Sequence[str]) -> str:
    """Names behind a sentence, of many the first few."""
    more = len(names) - MOST_NAMES
    return f": {', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''}" if names else ""


def _grid(
    heading: str,
    names: tuple[str, ...],
    claims: tuple[str, ...],
    lines: Sequence[tuple[tuple[str, ...], Mapping[str, int], tuple[str, ...]]],
) -> Grid:
    """A table of counts: words, the numbers of a count, and texts about claims on each line."""
    texts = tuple((*words, *(str(each[name]) for name in NUMBERS), *said) for words, each, said in lines)
    groups = (*("" for _ in names), *GROUPS, *("" for _ in claims))
    return Grid(heading, (*names, *HEADER, *claims), texts, len(names), ((),) * len(texts), groups)


ATTENTION = re.compile(r"(?<!linear )(attention|transformer|mha)", re.IGNORECASE)
FASTER_IF_SMALLER = ("time", "decode_time", "prefill_time")
SPEEDS = ("train_throughput", "decode_throughput", "generate_throughput", *FASTER_IF_SMALLER)


@dataclass(frozen=True)
class Crossover:
    """One row of an experiment against the fastest attention of the same experiment, device and length."""

    experiment: str
    row: str
    attention: str
    """Labels of the rows that were compared with, joined by commas."""
    device: str
    unit: str
    points: tuple[tuple[float, float, float | None], ...]
    """(length, value of the row, value of attention or None where attention has none), in ascending order of length."""
    smaller_is_faster: bool

    @property
    def start(self) -> float | None:
        """The smallest length from which on the row is faster at every length measured, or None.

        Where attention has no value, e.g. because it ran out of memory, the row counts as faster.
        """
        found = None
        for length, ours, theirs in reversed(self.points):
            if theirs is not None and (ours >= theirs if self.smaller_is_faster else ours <= theirs):
                break
            found = length
        return found

    @property
    def text(self) -> str:
        """`from 2048 on`, `at all lengths, from 256 on`, or `not up to 16384`."""
        first, last = self.points[0][0], self.points[-1][0]
        if self.start is None:
            return f"not up to {last:g}"
        return f"at all lengths, from {first:g} on" if self.start == first else f"from {self.start:g} on"


def crossovers(report: Report) -> list[Crossover]:
    """One entry for every row of a timed report that is not attention; empty without rows of attention."""
    figure = report.figure
    if not report.timed or figure is None or figure.spec.x != "slice.length" or figure.spec.y not in SPEEDS:
        return []
    return [
        found
        for title, panel in figure.panels
        for found in _panel(report, title, panel, figure.spec.y in FASTER_IF_SMALLER, figure.spec.y_label)
    ]


def _panel(report: Report, title: str, panel: Sequence[Series], smaller_is_faster: bool, unit: str) -> list[Crossover]:
    theirs = [series for series in panel if ATTENTION.search(series.label) and series.points]
    best: dict[float, float] = {}
    for series in theirs:
        for point in series.points:
            values = [point.y, *([best[point.x]] if point.x in best else [])]
            best[point.x] = min(values) if smaller_is_faster else max(values)
    if not best:
        return []
    return [
        Crossover(
            experiment=report.experiment,
            row=f"{series.label}, {title}" if title else series.label,
            attention=", ".join(other.label for other in theirs),
            device=report.device,
            unit=unit,
            points=tuple((point.x, point.y, best.get(point.x)) for point in series.points),
            smaller_is_faster=smaller_is_faster,
        )
        for series in panel
        if series not in theirs and series.points
    ]


ITEM_HEADER = ("paper", "item", "what it shows", "experiment", "runs here at", "rows stored", "not run for want of")


class Item(Config):
    """One table or figure of a paper, or several that belong together."""

    item: str
    """Its name in the paper: `Table 3`, `Figures 6 and Table 13`."""
    shows: str
    experiments: tuple[str, ...] = ()
    """The experiments that measure it or list its numbers."""
    documents: tuple[str, ...] = ()
    """Documents and tests that stand for a diagram, as paths from the repository's root."""

    def check_options(self) -> None:
        if not (self.experiments or self.documents):
            raise ValueError(f"{self.item}: name its experiments or its documents")


class Papers(Config):
    """The file `reports/papers.yaml`: every paper to its tables and figures, in the order of the paper."""

    papers: dict[str, tuple[Item, ...]]


def read_papers(path: Path, experiments: Iterable[str]) -> dict[str, tuple[Item, ...]]:
    """The tables and figures of every paper. ValueError for an experiment that `experiments` does not have."""
    papers = parse(Papers, {"papers": read_yaml_file(path)}, str(path)).papers
    known = tuple(experiments)
    for items in papers.values():
        for name in (name for item in items for name in item.experiments):
            if name not in known:
                raise ValueError(f"{path}: unknown experiment {name!r}{nearest(name, known)}")
    return papers


def index(
    papers: Mapping[str, tuple[Item, ...]],
    reports: Mapping[str, Report],
    stored: Mapping[str, Iterable[str]],
    *,
    home: str | None = None,
) -> Document:
    """One line for each table or figure, with what is counted of it.

    reports: that of every experiment, at the scale at which it is counted. stored: experiment to the scales that have
    rows. home: path from the page to the repository's root, for links in Markdown; None: no links.
    """
    lines = []
    sums: Counter[str] = Counter()
    for paper, items in papers.items():
        for item in items:
            own = [reports[name] for name in item.experiments if _home(items, reports[name].config, name) is item]
            counts = [(report, count(report)) for report in own]
            each = total(found for _, found in counts)
            sums += each
            why = dict.fromkeys(word for report, found in counts for word in reasons(report.config, found))
            words = _words(item, reports, stored, home)
            lines.append(((paper, *words, ", ".join(why) or DASH), each, _both(each)))
    stand = sum(not item.experiments for items in papers.values() for item in items)
    rows = sum(line[0][5] != DASH for line in lines)
    grid = _grid("", ITEM_HEADER, ("claims", "claims, reduced"), [*lines, (("all", *[""] * 6), sums, _both(sums))])
    return Document(
        "tables",
        "Every table and figure of the four papers",
        f"made by `{CALL} report tables`; an experiment is a folder below reports/",
        (grid,),
        (
            f"{len(lines)} tables and figures, of which {rows} have rows at some scale and {stand} are diagrams or "
            f"examples, which a document or a test stands for.",
            "An experiment that belongs to several items is counted at the one that it is named after.",
            *NOTES,
            "`report EXPERIMENT` shows the paper's numbers beside ours, and why a scale cannot run here.",
            "Scales other than `paper` are smaller protocols that the grid declares.",
        ),
        (),
    )


def _both(counts: Mapping[str, int]) -> tuple[str, str]:
    return claims_text(counts), claims_text(counts, "reduced claims: ")


def _home(items: Sequence[Item], config: ExperimentConfig, experiment: str) -> Item:
    """The item at which an experiment is counted: the one of its table or figure, or else the first that names it."""
    naming = [item for item in items if experiment in item.experiments]
    source = config.source
    pairs = (("Table", source.table), ("Figure", source.figure)) if source else ()
    named = [item for item in naming for kind, n in pairs if n and re.search(rf"{kind}s? (.* )?{n}\b", item.item)]
    return (named or naming)[0]


def _words(
    item: Item, reports: Mapping[str, Report], stored: Mapping[str, Iterable[str]], home: str | None
) -> tuple[str, str, str, str, str]:
    """The item, what it shows, its experiments or documents, the scales that can run, and those that have rows."""

    def scales(found: Mapping[str, Iterable[str]]) -> str:
        """The scales of each experiment; the name of an experiment stands only where there are several."""
        texts = [(name, ", ".join(found[name])) for name in item.experiments]
        alone = len(texts) == 1
        return (
            "; ".join(text if alone else f"{name.rpartition('/')[2]}: {text}" for name, text in texts if text) or DASH
        )

    def linked(path: str, name: str) -> str:
        return name if home is None else f"[{name}]({home}/{path})"

    places = [linked(f"reports/{name}/", name) for name in item.experiments]
    places += [linked(path, Path(path).name) for path in item.documents]
    runnable = scales({name: reports[name].config.runnable for name in item.experiments})
    return item.item, item.shows, ", ".join(places), runnable, scales({n: stored.get(n, ()) for n in item.experiments})
