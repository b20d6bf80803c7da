"""`doctor`: what works on this machine."""

from __future__ import annotations

import typer

from subquad.suite.commands.console import table_console
from subquad.suite.commands.repository import repository_of, shown


def doctor(context: typer.Context) -> None:
    """Say what works on this machine, and why the rest does not."""
    from rich.table import Table

    from subquad.suite.environment import capabilities

    table = Table("part", "for", "state", box=None)
    for part in capabilities():
        table.add_row(part.name, part.purpose, f"n/a ({part.missing})" if part.missing else f"ok  {part.found}")
    repository = repository_of(context)
    rows = f"n/a ({repository.unfetched.removeprefix('; ')})" if repository.unfetched else ""
    table.add_row("committed rows", "report, status, compare", rows or f"ok  {shown(repository.reference)}")
    table_console().print(table, highlight=False, markup=False)
