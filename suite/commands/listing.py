"""`list`: tasks, models and experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.suite.commands.console import table_console
from subquad.suite.commands.repository import Plugins, Repository, repository_of
from subquad.suite.registry import nearest
from subquad.suite.settings.config import find_experiments, load_experiment

if TYPE_CHECKING:
    from rich.console import Console


class Kind(StrEnum):
    tasks = "tasks"
    models = "models"
    experiments = "experiments"


def list_names(
    context: typer.Context,
    kind: Annotated[
        str | None,
        typer.Argument(help="tasks, models, experiments, or a folder of experiments such as h3; default: all."),
    ] = None,
    plugins: Plugins = None,
) -> None:
    """List tasks, models and experiments.

    A terminal shows what fits: a line for each task and model, and the experiments by folder. `list FOLDER` has their
    titles and scales. A pipe gets a line for each name, with all words.
    """
    repository = repository_of(context, plugins)
    names = list(find_experiments(repository.reports))
    folders = list(dict.fromkeys(name.partition("/")[0] for name in names))
    folder = "" if kind is None or kind in list(Kind) else kind.rstrip("/")
    if folder and folder not in folders:
        known = (*(one.value for one in Kind), *folders)
        raise ValueError(f"list: no kind or folder {kind!r}{nearest(folder, known)}; there are: {', '.join(known)}")
    console = table_console()
    kinds = [Kind.experiments] if folder else [one for one in Kind if kind in (None, one)]
    if not console.is_terminal:
        for one in kinds:
            for line in _lines(repository, one, folder):
                print("\t".join(line))
    elif folder:
        _print(console, _lines(repository, Kind.experiments, folder))
    else:
        for one in kinds:
            if one is Kind.experiments:
                _print_folders(console, folders, names)
            else:
                _print(console, _lines(repository, one, ""))


def _lines(repository: Repository, kind: Kind, folder: str) -> Iterator[tuple[str, str, str]]:
    """Kind, name and summary of everything of a kind; of experiments those of a folder, if one is named."""
    if kind is not Kind.experiments:
        registry = repository.tasks if kind is Kind.tasks else repository.models
        yield from ((registry.kind, name, entry.summary) for name, entry in registry.entries.items())
        return
    for name, path in find_experiments(repository.reports).items():
        if folder and name.partition("/")[0] != folder:
            continue
        try:
            config = load_experiment(path)
            scales = f"scales: {', '.join(config.runnable)}" if config.runnable else "cannot run here"
            summary = f"{config.title} ({scales})"
        except ValueError as error:
            summary = f"cannot be read: {error}"
        yield "experiment", name, summary


def _print(console: Console, lines: Iterator[tuple[str, str, str]]) -> None:
    """A line for each name. A narrow terminal cuts its summary, and never its name."""
    found = list(lines)
    width = max((len(name) for _, name, _ in found), default=0)
    for kind, name, summary in found:
        text = f"{kind}  {name.ljust(width)}  {summary}"
        cut = text if len(text) <= console.width else text[: console.width - 1] + "…"
        # brackets in a plugin's summary are no markup
        console.print(cut, markup=False, highlight=False, no_wrap=True)


def _print_folders(console: Console, folders: Sequence[str], names: Sequence[str]) -> None:
    """The experiments of each folder side by side."""
    from rich.table import Table

    table = Table("folder", "experiments", box=None)
    for folder in folders:
        own = [name.removeprefix(f"{folder}/") for name in names if name.partition("/")[0] == folder]
        table.add_row(folder, "  ".join(own))
    console.print(table, markup=False)
    console.print("`list FOLDER` shows what they are, and their scales", highlight=False)
