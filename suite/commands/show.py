"""`show`: everything that is stored about one run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.repository import StoredResults, repository_of
from subquad.suite.options import visible
from subquad.suite.registry import few

FACTS = (
    *("run_id", "experiment", "scale", "seed", "device", "threads", "torch", "triton", "cuda", "python", "commit"),
    *("dirty", "operators", "stand_in", "split_policy", "data_digest", "started_at", "duration_s"),
)
"""Columns that are the same in all rows of a run."""

COLUMNS = ("metric", "split", "slice", "step", "value", "unit", "status")
"""Columns of a measurement."""


def show(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(help="A run id or the beginning of one.")],
    results: StoredResults = None,
) -> None:
    """Show everything that is stored about one run."""
    from rich.table import Table

    from subquad.suite.settings.grid import iter_keys
    from subquad.suite.store import documents, endings, storage

    if not run_id or set(run_id) - set("0123456789abcdef"):
        raise ValueError(f"{run_id!r} is no run id: those are hexadecimal, as in the plan and the file names")
    repository = repository_of(context)
    roots = repository.roots(results)
    found = endings.find(roots, run_id, skipped)
    if not found:
        raise ValueError(
            f"no stored run begins with {run_id!r} below {', '.join(map(str, roots))}{repository.unfetched}"
        )
    if len(ids := {stored for stored, _ in found}) > 1:
        raise ValueError(f"{run_id!r} is ambiguous: {few(sorted(ids))}; give more of the id")
    whole, path = found[0]
    stored = storage.load(path, run_id=whole).to_pylist()
    if not stored:
        raise ValueError(f"{path}: holds no rows; remove it")
    console = table_console()
    facts = Table("", "", box=None, show_header=False)
    for column in FACTS:
        facts.add_row(column, _text(stored[0][column]))
    for key, value in iter_keys(documents.settings_in(stored[0]["config"])):
        facts.add_row(key, json.dumps(value))
    console.print(facts, markup=False, highlight=False)
    rows = Table(*COLUMNS, box=None)
    for row in stored:
        rows.add_row(*(f"{row[name]:.6g}" if name == "value" and row[name] else _text(row[name]) for name in COLUMNS))
    console.print(rows, markup=False, highlight=False)
    for error in dict.fromkeys(row["error"] for row in stored if row["error"]):
        console.print(visible(error), style="red", markup=False, highlight=False)


def _text(value: Any) -> str:
    """A stored value, where null is no text."""
    return "" if value is None else visible(str(value))
