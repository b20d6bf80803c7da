"""`show`: everything that is stored about one run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from suite.commands.repository import StoredResults, repository_of

FACTS = (
    *("run_id", "experiment", "scale", "seed", "device", "threads", "torch", "triton", "cuda", "python", "commit"),
    *("dirty", "operators", "stand_in", "split_policy", "data_digest", "started_at", "duration_s"),
)
"""Columns that are the same in all rows of a run."""


def show(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(help="A run id or the beginning of one.")],
    results: StoredResults = None,
) -> None:
    """Show everything that is stored about one run."""
    from rich.console import Console
    from rich.table import Table

    from suite import storage
    from suite.grid import iter_keys

    if not run_id or set(run_id) - set("0123456789abcdef"):
        raise ValueError(f"{run_id!r} is no run id: those are hexadecimal, as in the plan and the file names")
    roots = repository_of(context).roots(results)
    paths = [path for root in roots for path in sorted(root.rglob(f"{run_id}*.parquet"))]
    if not paths:
        raise ValueError(f"no stored run begins with {run_id!r} below {', '.join(map(str, roots))}")
    if len({path.stem for path in paths}) > 1:
        raise ValueError(f"{run_id!r} is ambiguous: {', '.join(path.stem for path in paths)}")
    frame = storage.read(paths[:1])
    first = frame.iloc[0]
    console = Console()
    facts = Table("", "", box=None, show_header=False)
    for column in FACTS:
        facts.add_row(column, str(first[column]))
    for key, value in iter_keys(json.loads(first["config"])):
        facts.add_row(key, json.dumps(value))
    console.print(facts, markup=False, highlight=False)
    rows = Table("metric", "split", "slice", "step", "value", "unit", "status", box=None)
    for row in frame.to_dict("records"):
        value = "" if row["value"] is None or row["value"] != row["value"] else f"{row['value']:.6g}"
        rows.add_row(row["metric"], row["split"], row["slice"], str(row["step"]), value, row["unit"], row["status"])
    console.print(rows, markup=False, highlight=False)
    for error in dict.fromkeys(error for error in frame["error"] if error):
        console.print(error, style="red", markup=False, highlight=False)
