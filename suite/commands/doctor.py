"""`doctor`: what works on this machine."""

from __future__ import annotations

from subquad.suite.commands.console import table_console


def doctor() -> None:
    """Say what works on this machine, and why the rest does not."""
    from rich.table import Table

    from subquad.suite.environment import capabilities

    table = Table("part", "for", "state", box=None)
    for part in capabilities():
        table.add_row(part.name, part.purpose, f"n/a ({part.missing})" if part.missing else f"ok  {part.found}")
    table_console().print(table, highlight=False, markup=False)
