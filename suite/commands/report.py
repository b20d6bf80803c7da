"""`report`: renders stored rows as the paper's table and figure."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.suite.commands.console import skipped
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.commands.repository import (
    ARENA,
    KERNELS,
    LOCAL,
    TABLES,
    OptionalExperimentName,
    Plugins,
    Repository,
    StoredResults,
    repository_of,
    shown,
)
from subquad.suite.options import parse
from subquad.suite.registry import counted, nearest
from subquad.suite.runs import Run
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.report_spec import FigureSpec

if TYPE_CHECKING:
    from subquad.suite.submissions.standing import Standing


class Format(StrEnum):
    terminal = "terminal"
    md = "md"
    latex = "latex"
    png = "png"
    pdf = "pdf"
    html = "html"


class FigureKind(StrEnum):
    lines = "lines"
    seeds = "seeds"
    costs = "costs"
    curves = "curves"
    cells = "cells"
    changes = "changes"
    shares = "shares"


class Width(StrEnum):
    column = "column"
    page = "page"


def report(
    context: typer.Context,
    experiment: OptionalExperimentName = None,
    plugins: Plugins = None,
    format: Annotated[
        Format | None,
        typer.Option(help="terminal, md and latex print; png, pdf, html write a file. Default: by --out, or terminal."),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Show this scale; default: paper if it has rows, else the first that has.")
    ] = None,
    results: StoredResults = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="One line for each value of this setting, over all stored runs: train.lr; repeatable."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="A scoreboard of all experiments: cells that agree, differ, are at chance or not run."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="Compare the rows with this one over seeds: difference, interval, p corrected by Holm."),
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="With --against: compare only this row; repeatable. Default: all rows.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", "--details", help="On a terminal and in latex: claims, notes and costs too, not one table alone."
        ),
    ] = False,
    figure: Annotated[
        FigureKind | None, typer.Option(help="Draw this kind of figure; default: the one that the grid asks for.")
    ] = None,
    width: Annotated[
        Width, typer.Option(help="Width of a figure: a column of a paper (3.3 inches) or its page (7 inches).")
    ] = Width.page,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; a figure is a PNG and an SVG of one name, or a PDF. Default: a file beside your rows."
        ),
    ] = None,
    update_docs: Annotated[
        bool, typer.Option("--update-docs", help="Write numbers and figures of documents again, from committed rows.")
    ] = False,
) -> None:
    """Render an experiment (paper's number, ours, difference, seeds, verdict, figure), or the times of `kernels`.

    `arena` shows whose kernel is the fastest at each operator, ours or another project's, and what was refused and why.

    A paper (`h3`) and `--all` show a scoreboard of its experiments or of all; `--format html` is a page to sort, filter
    and open runs. `tables` is a page of every table and figure of the papers, with what runs here and what has rows.
    """
    from subquad.suite.store import storage

    repository = repository_of(context, plugins)
    if update_docs:
        if any((experiment, format, scale, results, by, every, against, row, full, figure, out)):
            raise ValueError("report --update-docs writes all documents, from committed rows; give nothing beside it")
        if repository.pull is not None:
            raise ValueError("report --update-docs: the documents are those of a checkout; call it in one")
        changed = repository.rendering().update_documents(repository.reports)
        page = repository.reports.parent / "docs" / f"{ARENA}.md"
        text = repository.rendering().render(_arena(repository, repository.reference), "md")
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            changed.append(page)
        for path in [*changed, *_drawn_again(repository)]:
            print(f"updated {shown(path)}")
        return
    chosen = _format(format, out)
    if full and chosen not in (Format.latex, Format.terminal):
        raise ValueError(f"report --full: {chosen} has all tables; leave it out")
    paper = _paper(repository, experiment)
    if by and (every or paper or experiment in (None, TABLES, KERNELS, ARENA)):
        raise ValueError("report --by: name the experiment whose runs to show")
    if against is not None and (by or every or paper or experiment in (None, TABLES, KERNELS, ARENA)):
        raise ValueError("report --against: name the one experiment whose rows to compare, without --by")
    if against is not None and chosen in (Format.png, Format.pdf):
        # said before all pairs of rows are compared
        raise ValueError(f"report {experiment} --against: this table has no figure; give --format md, latex or html")
    if row and against is None:
        raise ValueError("report --row: give --against, the row that these rows are compared with")
    of_kernels = figure in (FigureKind.changes, FigureKind.shares)
    if figure and (every or by or against or paper or experiment in (None, TABLES, ARENA)):
        raise ValueError("report --figure: name the one experiment of which to draw another figure")
    if figure and of_kernels != (experiment == KERNELS):
        kinds = "changes or shares" if experiment == KERNELS else "lines, seeds, costs, curves or cells"
        raise ValueError(f"report {experiment} --figure {figure}: the figures of {experiment} are {kinds}")
    rendered: Any
    if every and experiment is not None:
        raise ValueError(f"report {experiment} --all: name an experiment or a paper, or give --all, not both")
    if every or paper:
        if scale is not None:
            raise ValueError("report --scale: a scoreboard shows experiments at their own scales; name one experiment")
        experiment = paper or "overview"
        rendered = _board(repository, experiment, results, times=chosen is Format.html)
    elif experiment is None:
        raise ValueError("report: name an experiment or a paper (h3), or give --all for a scoreboard of all of them")
    elif experiment == TABLES:
        if scale is not None:
            raise ValueError("report tables --scale: the page has all scales; leave it out, or name one experiment")
        if results is not None:
            raise ValueError("report tables --results: the page shows the committed rows; leave it out")
        if chosen is Format.png:
            # said before the rows of all tables are read
            raise ValueError("report tables: this table has no figure; give --format md, latex or html")
        rendered = _tables(repository, chosen, out)
    elif experiment == ARENA:
        if scale is not None:
            raise ValueError("report arena --scale: a comparison is shown with its shape; leave it out")
        rendered = _arena(repository, results)
    elif experiment == KERNELS:
        paths = repository.files(experiment, results)
        scales = sorted({path.parent.name for path in paths})
        if scale is not None and scales and scale not in scales:
            raise ValueError(f"--scale {scale}: no stored rows of kernels have it; there are: {', '.join(scales)}")
        rendered = repository.rendering().history(storage.read(_at_scale(paths, scale), skip=skipped), figure)
    else:
        experiment, rendered = _table(repository, experiment, results, by or (), scale, figure)
        if against is not None:
            rendered = repository.rendering().against(rendered, against, row or ())
        elif chosen is Format.terminal and not full and not by:
            rendered = repository.rendering().brief(rendered)
    if out is None and chosen in (Format.png, Format.pdf, Format.html):
        # a figure of committed rows is itself no committed file
        folder = LOCAL if results is None or _are_committed(repository, results) else results
        out = folder / experiment / f"{'report' if chosen is Format.html else 'figure'}.{chosen}"
    from subquad.suite.store.target import writable

    with contextlib.nullcontext() if out is None else writable("--out", out):
        source = _command("--all" if every else experiment, getattr(rendered, "scale", scale), figure, width)
        choice: dict[str, Any] = {"details": full, "width": width.value, "source": source}
        made = repository.rendering().render(rendered, chosen.value, out, **choice)
    print(f"wrote {shown(made)}" if isinstance(made, Path) else made)


def _command(name: str, scale: str | None, figure: FigureKind | None, width: Width) -> str:
    """The command that draws a figure from committed rows, which stands in the metadata of its SVG."""
    options = (("--scale", scale), ("--figure", figure), ("--width", width if width is Width.column else None))
    return " ".join(["report", name, *(f"{option} {value}" for option, value in options if value)])


def _drawn_again(repository: Repository) -> list[Path]:
    """Draws every figure in docs/ again that names the command which draws it; gives those that changed."""
    changed = []
    for path in sorted((repository.reports.resolve().parent / "docs").glob("*.svg")):
        before = path.read_bytes()
        found = re.search(rb"<dc:source>report ([^<]+)</dc:source>", before)
        if found is None:
            continue
        name, *rest = found[1].decode().split()
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        width = Width(options.get("--width", Width.page))
        rendered = _drawable(repository, name, options)
        source = f"report {found[1].decode()}"
        repository.rendering().render(rendered, "png", path, width=width.value, source=source)
        changed += [path] * (path.read_bytes() != before)
    return changed


def _drawable(repository: Repository, name: str, options: Mapping[str, str]) -> Any:
    """The content of a figure in docs/: the scoreboard, the operators' speed or one experiment, from committed rows."""
    if name == "--all":
        return _board(repository, "overview", repository.reference)
    if name == KERNELS:
        from subquad.suite.store import storage

        stored = storage.read(repository.files(KERNELS, repository.reference))
        return repository.rendering().history(stored, options.get("--figure"))
    kind = options.get("--figure")
    figure = FigureKind(kind) if kind else None
    return _table(repository, name, repository.reference, (), options.get("--scale"), figure)[1]


SUFFIXES = {
    ".png": Format.png,
    ".svg": Format.png,
    ".pdf": Format.pdf,
    ".html": Format.html,
    ".md": Format.md,
    ".tex": Format.latex,
}
"""Endings of `--out`, and the format that each asks for."""


def _format(format: Format | None, out: Path | None) -> Format:
    """The format that was asked for, by name or by the name of the file."""
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: this is a folder; name a file in it")
    of_file = None if out is None else SUFFIXES.get(out.suffix)
    if out is not None and Format.png in (format, of_file) and out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out {out}: a figure is a .png with a .svg beside it; name one of them")
    if format is not None and of_file not in (None, format):
        raise ValueError(f"--out {out} --format {format}: the two do not agree; leave one out")
    if out is not None and format is None and of_file is None and out.suffix != ".txt":
        raise ValueError(f"--out {out}: the ending must be one of {', '.join(SUFFIXES)} and .txt, or give --format")
    return format or of_file or Format.terminal


def _at_scale(paths: Sequence[Path], scale: str | None) -> list[Path]:
    """Returns the files of rows at a scale; None: at all scales. Reading all files would take most of the time."""
    return [path for path in paths if scale in (None, path.parent.name)]


_OWN = {FigureKind.lines: {"x"}, FigureKind.seeds: {"order", "columns"}}
"""Options of a figure that one kind alone has."""


def _table(
    repository: Repository,
    name: str,
    results: Path | None,
    by: Sequence[str],
    scale: str | None,
    figure: FigureKind | None = None,
) -> tuple[str, Any]:
    """Returns the name of an experiment, which may be given by its folder, and its table.

    figure: the kind of figure in place of that of the grid.
    """
    planned = _settings(_planned(repository, name))
    experiment, config, path = repository.experiment(name)
    if scale is not None and scale not in config.scales:
        raise ValueError(
            f"unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
        )
    rendering = repository.rendering()
    everything = repository.files(experiment, results)
    files = _at_scale(everything, scale)
    if everything and not files:
        there = ", ".join(sorted({path.parent.name for path in everything}))
        print(f"note: no run of scale {scale} is stored; there are runs of {there}", file=sys.stderr)
    if by:
        rows = rendering.rows_of(files, skipped)
        return experiment, rendering.grouped(config, path.parent, experiment, rows, by, scale)
    if figure is not None:
        # these options belong to other kinds of figure
        other = {"x", "order", "columns"} - _OWN.get(figure, set())
        spec = config.figure.model_dump(exclude=other) if config.figure else {}
        changed = parse(FigureSpec, {**spec, "kind": figure.value}, f"{experiment} --figure {figure}")
        config = config.model_copy(update={"figure": changed})
    beside = _beside(repository, results)
    is_own = results is not None and not _are_committed(repository, results)
    found = [] if is_own else _standings(repository, experiment, config, scale, files)
    rows = rendering.rows_of([*files, *(one.part for one in found)], skipped)
    if not found:
        return experiment, rendering.build(config, path.parent, rows, scale=scale, planned=planned, beside=beside)

    from subquad.suite.submissions.standing import with_notes, with_standings

    board, chosen = with_standings(config, found), found[0].entry.scale
    built = rendering.build(board, path.parent, rows, scale=chosen, planned=planned, beside=beside)
    return experiment, with_notes(built, found)


def _are_committed(repository: Repository, results: Path) -> bool:
    return results.resolve().is_relative_to(repository.reference.resolve())


def _standings(
    repository: Repository, experiment: str, config: ExperimentConfig, scale: str | None, files: Sequence[Path]
) -> list[Standing]:
    """The submissions that stand beside committed rows, where the experiment is a board. Rows of a user stand alone.

    A mixer that is loaded as a plugin has the row of the plugin.
    """
    is_ours = all(path.resolve().is_relative_to(repository.reference.resolve()) for path in files)
    if config.budget is None or not is_ours:
        return []

    from subquad.suite.submissions.standing import standings

    chosen = repository.rendering().pick_scale(config, {path.parent.name for path in files}, scale)
    found = standings(repository.submissions, experiment, config, chosen, skipped)
    return [one for one in found if one.manifest.name not in repository.models]


def _arena(repository: Repository, results: Path | None) -> Any:
    """The page of our operators beside other projects' kernels."""
    from subquad.suite.bench.arena import is_peer
    from subquad.suite.store import storage

    known = {
        name: [found.name for found in repository.operators.load(name).implementations if is_peer(found)]
        for name in repository.operators
    }
    return repository.rendering().arena(storage.read(repository.files(KERNELS, results), skip=skipped), known)


def _beside(repository: Repository, results: Path | None) -> Callable[[str], Any]:
    """Gives the reports of other experiments, whose columns the figure shows as costs."""

    def report(name: str) -> Any:
        experiment, config, path = repository.experiment(name)
        rows = repository.rendering().rows_of(repository.files(experiment, results), skipped)
        return repository.rendering().build(config, path.parent, rows)

    return report


def _tables(repository: Repository, format: Format, out: Path | None) -> Any:
    """The page of every table and figure, with what is committed of each."""
    from subquad.suite.store import storage

    repository.require_reference("report tables")
    rendering = repository.rendering()
    names = repository.experiments()
    papers = rendering.read_papers(repository.reports / "papers.yaml", names)
    board = _board(repository, "overview", repository.reference, reduced=False)
    stored = {
        name: dict.fromkeys(path.parent.name for path in storage.files([repository.reference], name)) for name in names
    }
    home = None
    if format is Format.md:
        above = Path.cwd() if out is None else out.resolve().parent
        home = os.path.relpath(repository.reports.parent, above)
    return rendering.index(papers, {report.experiment: report for report in board.reports}, stored, home=home)


def _paper(repository: Repository, name: str | None) -> str | None:
    """The name of a paper, if it is one: a folder of experiments and no experiment itself."""
    names = repository.experiments()
    word = (name or "").rstrip("/")
    return (
        word
        if word and word not in (*names, KERNELS) and any(known.startswith(f"{word}/") for known in names)
        else None
    )


def _planned(repository: Repository, experiment: str) -> Callable[[str], list[Run]]:
    """Gives one seed of an experiment's runs at a scale; none if the grid cannot be resolved here."""

    @cache
    def runs(scale: str) -> list[Run]:
        choice: dict[str, Any] = {"only": None, "overrides": None, "seeds": "1", "data": None, "without_data": True}
        try:
            return resolved_runs(repository, experiment, scale=scale, **choice)[1]
        except ValueError:
            return []

    return runs


def _settings(planned: Callable[[str], list[Run]]) -> Callable[[str], list[dict[str, Any]]]:
    """Gives the resolved settings of planned runs."""
    return lambda scale: [run.resolved for run in planned(scale)]


def _board(
    repository: Repository, name: str, results: Path | None, *, reduced: bool = True, times: bool = False
) -> Any:
    """The scoreboard of the experiments of a paper, or of all.

    reduced: with the other scales that have rows. times: with how long the grids of the papers take.
    """
    from subquad.suite.store import storage

    rendering = repository.rendering()
    mains, others, costs, estimates = [], [], {}, {}
    for experiment, config, path in repository.every_experiment("" if name == "overview" else name):
        costs[experiment] = _cost(path.parent / "README.md")
        paths = repository.files(experiment, results)
        runs = rendering.load_runs(rendering.rows_of(paths, skipped))
        planned = _planned(repository, experiment)
        report = partial(rendering.report_of, config, path.parent, experiment, runs, planned=_settings(planned))
        main = report(scale=rendering.scale_to_count(config))
        mains.append(main)
        scales = {path.parent.name for path in paths} & config.scales.keys() - {main.scale} if reduced else ()
        others += [report(scale=scale) for scale in sorted(scales)]
        # a grid of a thousand runs takes a second to resolve; people ask what a paper would take
        if times and experiment.partition("/")[0] in rendering.PAPERS:
            estimates[experiment, main.scale] = _time(planned(main.scale), paths)
    kernels = storage.read(repository.files(KERNELS, results), skip=skipped)
    return rendering.Board(
        name,
        tuple(mains),
        tuple(others),
        kernels,
        tuple(repository.operators),
        tuple(_about(repository, rendering.About)),
        costs,
        estimates,
    )


def _time(runs: Sequence[Run], paths: Sequence[Path]) -> str:
    """The time that one seed of a grid takes, from stored durations; empty for a grid that cannot be resolved here."""
    from subquad.suite.store.estimate import estimate

    if not runs:
        return ""
    # the first of several lines says how many there are
    lines = [line.replace(" to do", "") for line in estimate(runs, paths, skipped) if not line.endswith(":")]
    return (
        f"one seed is {counted(len(runs))}, {' or '.join(lines) or 'of which none like it is stored to estimate from'}"
    )


def _cost(readme: Path) -> str:
    """The section `Cost` of a README as plain text, without the keys of its numbers; empty where there is none."""
    found = re.search(r"^## Cost\n(.*?)(?=^## |\Z)", readme.read_text() if readme.is_file() else "", re.M | re.S)
    if found is None:
        return ""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", found[1])).strip()


def _about(repository: Repository, about: Callable[..., Any]) -> Iterator[Any]:
    """The descriptions of every model, task and operator, read from their source files without an import."""
    home = repository.reports.parent
    for registry in (repository.models, repository.tasks, repository.operators):
        for name, entry in registry.entries.items():
            module, _, attribute = entry.target.partition(":")
            path = home.joinpath(*module.split(".")[1:])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if entry.plugin or not path.is_file():
                yield about(registry.kind, name, entry.summary)
            else:
                shown_path = path.parent if path.name == "__init__.py" else path
                text = _docstrings(path, attribute.partition("[")[0])
                yield about(registry.kind, name, entry.summary, shown_path.relative_to(home).as_posix(), text)


def _docstrings(path: Path, name: str) -> str:
    """The docstring of a module and that of the class or function of this name in it."""
    module = ast.parse(path.read_text())
    found = [node for node in module.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name]
    return "\n\n".join(text for node in (module, *found) if (text := ast.get_docstring(node)))


def verdicts_of(repository: Repository, names: Sequence[str], results: Path | None) -> Iterator[dict[str, Any]]:
    """The lines of a logbook (`reports.render.logbook`) of experiments or papers, at every scale that has rows."""
    rendering = repository.rendering()
    known = repository.experiments()
    for name in names:
        of_paper = [one for one in known if one.startswith(f"{name.rstrip('/')}/")]
        for experiment, config, path in map(repository.experiment, of_paper if _paper(repository, name) else [name]):
            files = repository.files(experiment, results)
            runs = rendering.load_runs(rendering.rows_of(files, skipped))
            planned = _settings(_planned(repository, name if experiment not in known else experiment))
            for scale in (scale for scale in config.scales if scale in {run.scale for run in runs}):
                report = rendering.report_of(config, path.parent, experiment, runs, scale=scale, planned=planned)
                yield from rendering.logbook.lines(report)
