"""`list`: tasks, models and experiments."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from subquad.suite.commands.console import table_console
from subquad.suite.commands.repository import Plugins, repository_of
from subquad.suite.settings.config import find_experiments, load_experiment


class Kind(StrEnum):
    tasks = "tasks"
    models = "models"
    experiments = "experiments"


def list_names(
    context: typer.Context,
    kind: Annotated[Kind | None, typer.Argument(help="What to list; default: all.")] = None,
    plugins: Plugins = None,
) -> None:
    """List tasks, models and experiments."""
    from rich.table import Table

    repository = repository_of(context, plugins)
    table = Table("kind", "name", "summary", box=None)
    for registry in (repository.tasks, repository.models):
        if kind in (None, f"{registry.kind}s"):
            for name, entry in registry.entries.items():
                table.add_row(registry.kind, name, entry.summary)
    if kind in (None, Kind.experiments):
        for name, path in find_experiments(repository.reports).items():
            try:
                config = load_experiment(path)
                scales = f"scales: {', '.join(config.runnable)}" if config.runnable else "cannot run here"
                summary = f"{config.title} ({scales})"
            except ValueError as error:
                summary = f"cannot be read: {error}"
            table.add_row("experiment", name, summary)
    console = table_console()
    if console.is_terminal:
        # brackets in a plugin's summary are no markup
        console.print(table, markup=False)
    else:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            print("\t".join(str(cell) for cell in row))
