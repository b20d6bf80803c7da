"""`report`: renders stored rows as the paper's table and figure."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.commands.repository import (
    KERNELS,
    LOCAL,
    TABLES,
    OptionalExperimentName,
    Repository,
    StoredResults,
    repository_of,
    shown,
)
from suite.registry import nearest


class Format(StrEnum):
    terminal = "terminal"
    md = "md"
    latex = "latex"
    png = "png"
    html = "html"


def report(
    context: typer.Context,
    experiment: OptionalExperimentName = None,
    format: Annotated[
        Format, typer.Option(help="terminal, md and latex print; png and html write a file.")
    ] = Format.terminal,
    scale: Annotated[str | None, typer.Option(help="Show this scale; default: paper if it has rows.")] = None,
    results: StoredResults = None,
    every: Annotated[
        bool, typer.Option("--all", help="All experiments on one page: cells that agree, differ, are empty.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; png also writes an SVG beside it.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--update-docs", help="Write the numbers that documents quote again, from committed rows.")
    ] = False,
) -> None:
    """Render an experiment (paper's number, ours, difference, seeds, verdict, figure), or the history of `kernels`.

    `tables` is a page of every table and figure of the papers, with what runs here and what has rows.
    """
    from suite import storage

    repository = repository_of(context)
    if update_docs:
        for path in repository.rendering().update_documents(repository.reports):
            print(f"updated {shown(path)}")
        return
    rendered: Any
    if every or experiment is None:
        if not every or experiment is not None:
            raise ValueError("report: name one experiment, or give --all for a page of all of them")
        experiment = "overview"
        rendering = repository.rendering()
        names = [name for name in repository.experiments() if repository.experiment(name)[0].runnable]
        rendered = rendering.overview([_paper_report(repository, name, results) for name in names])
    elif experiment == TABLES:
        rendering = repository.rendering()
        rendered = _tables(repository, rendering, format, out)
    elif experiment == KERNELS:
        rendering = repository.rendering()
        paths = _files(repository, experiment, results)
        rendered = rendering.history(storage.read([path for path in paths if scale in (None, path.parent.name)]))
    else:
        config, path = repository.experiment(experiment)
        if scale is not None and scale not in config.scales:
            raise ValueError(
                f"unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
            )
        rendering = repository.rendering()
        rendered = rendering.build(
            config, path.parent, storage.read(_files(repository, experiment, results)), scale=scale
        )
    if out is None and format in (Format.png, Format.html):
        out = (results or LOCAL) / experiment / f"{'figure' if format is Format.png else 'report'}.{format}"
    made = rendering.render(rendered, format.value, out)
    print(f"wrote {shown(made)}" if isinstance(made, Path) else made)


def _tables(repository: Repository, rendering: Any, format: Format, out: Path | None) -> Any:
    """The page of every table and figure. Rows are the committed ones, since the page itself is committed."""
    from suite import storage

    names = repository.experiments()
    papers = rendering.read_papers(repository.reports / "papers.yaml", names)
    configs = {name: repository.experiment(name)[0] for name in names}
    stored = {
        name: dict.fromkeys(path.parent.name for path in storage.files([repository.reference], name)) for name in names
    }
    home = None
    if format is Format.md:
        above = Path.cwd() if out is None else out.resolve().parent
        home = os.path.relpath(repository.reports.parent, above)
    return rendering.index(papers, configs, stored, home=home)


def _files(repository: Repository, experiment: str, results: Path | None) -> list[Path]:
    """Files with the rows of an experiment, of one folder: the user's own, or else the committed ones."""
    from suite import storage

    return next((found for root in repository.roots(results) if (found := storage.files([root], experiment))), [])


def _paper_report(repository: Repository, experiment: str, results: Path | None) -> Any:
    """The report of an experiment at its scale `paper`, or at one of its others where that one cannot run."""
    from suite import storage

    config, path = repository.experiment(experiment)
    scale = "paper" if "paper" in config.runnable else None
    rows = storage.read(_files(repository, experiment, results))
    return repository.rendering().build(config, path.parent, rows, scale=scale)
