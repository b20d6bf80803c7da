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
    Plugins,
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
    plugins: Plugins = None,
    format: Annotated[
        Format | None,
        typer.Option(help="terminal, md and latex print; png and html write a file. Default: by --out, or terminal."),
    ] = None,
    scale: Annotated[str | None, typer.Option(help="Show this scale; default: paper if it has rows.")] = None,
    results: StoredResults = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="Show every stored run by this setting, on the grid or not: train.lr; repeatable."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All experiments on one page: cells that agree, differ, are empty.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; a figure is a PNG and an SVG of one name.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--update-docs", help="Write the numbers that documents quote again, from committed rows.")
    ] = False,
) -> None:
    """Render an experiment (paper's number, ours, difference, seeds, verdict, figure), or the history of `kernels`.

    `tables` is a page of every table and figure of the papers, with what runs here and what has rows.
    """
    from suite import storage

    repository = repository_of(context, plugins)
    if update_docs:
        for path in repository.rendering().update_documents(repository.reports):
            print(f"updated {shown(path)}")
        return
    if results is not None and not results.is_dir():
        raise ValueError(f"--results {results}: there is no such folder")
    chosen = _format(format, out)
    if by and (every or experiment in (None, TABLES, KERNELS)):
        raise ValueError("report --by: name the experiment whose runs to show")
    rendered: Any
    if every or experiment is None:
        if not every or experiment is not None:
            raise ValueError("report: name one experiment, or give --all for a page of all of them")
        experiment = "overview"
        rendering = repository.rendering()
        names = [name for name in repository.experiments() if repository.experiment(name).config.runnable]
        rendered = rendering.overview([_paper_report(repository, name, results) for name in names])
    elif experiment == TABLES:
        rendering = repository.rendering()
        rendered = _tables(repository, rendering, chosen, out)
    elif experiment == KERNELS:
        rendering = repository.rendering()
        paths = _files(repository, experiment, results)
        rendered = rendering.history(storage.read([path for path in paths if scale in (None, path.parent.name)]))
    else:
        experiment, config, path = repository.experiment(experiment)
        if scale is not None and scale not in config.scales:
            raise ValueError(
                f"unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
            )
        rendering = repository.rendering()
        frame = storage.read(_files(repository, experiment, results))
        if by:
            rendered = rendering.grouped(config, path.parent, experiment, frame, by, scale)
        else:
            rendered = rendering.build(config, path.parent, frame, scale=scale)
    if out is None and chosen in (Format.png, Format.html):
        out = (results or LOCAL) / experiment / f"{'figure' if chosen is Format.png else 'report'}.{chosen}"
    try:
        made = rendering.render(rendered, chosen.value, out)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    print(f"wrote {shown(made)}" if isinstance(made, Path) else made)


SUFFIXES = {".png": Format.png, ".svg": Format.png, ".html": Format.html, ".md": Format.md, ".tex": Format.latex}
"""Endings of `--out`, and the format that each asks for."""


def _format(format: Format | None, out: Path | None) -> Format:
    """The format that was asked for, by name or by the name of the file."""
    of_file = None if out is None else SUFFIXES.get(out.suffix)
    if out is not None and Format.png in (format, of_file) and out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out {out}: a figure is a .png with a .svg beside it; name one of them")
    if format is not None and of_file not in (None, format):
        raise ValueError(f"--out {out} --format {format}: the two do not agree; leave one out")
    return format or of_file or Format.terminal


def _tables(repository: Repository, rendering: Any, format: Format, out: Path | None) -> Any:
    """The page of every table and figure. Rows are the committed ones, since the page itself is committed."""
    from suite import storage

    names = repository.experiments()
    papers = rendering.read_papers(repository.reports / "papers.yaml", names)
    configs = {name: repository.experiment(name).config for name in names}
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

    _, config, path = repository.experiment(experiment)
    scale = "paper" if "paper" in config.runnable else None
    rows = storage.read(_files(repository, experiment, results))
    return repository.rendering().build(config, path.parent, rows, scale=scale)
