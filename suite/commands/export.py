"""`export`: stored rows as CSV or JSON, with every setting as a column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subquad.suite.commands.repository import StoredResults, repository_of, shown
from subquad.suite.registry import counted


class Format(StrEnum):
    csv = "csv"
    json = "json"


class Viewer(StrEnum):
    trackio = "trackio"


def export(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT", help="Experiments, `kernels` for the rows of bench, or folders of results."
        ),
    ],
    format: Annotated[Format | None, typer.Option(help="Default: by the ending of --out, or csv.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Keep rows with one of these values: metric=accuracy,loss or model.name=dss-*; repeatable."),
    ] = None,
    results: StoredResults = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
    to: Annotated[Viewer | None, typer.Option(help="Give every run to this viewer, in place of a file.")] = None,
) -> None:
    """Print stored rows: the columns of results/README.md, then every setting under its dotted key.

    Numbers have all their digits. JSON is an array with one row a line.
    """
    if to is not None:
        if out is not None or format is not None:
            raise ValueError(f"export --to {to}: a viewer gets the rows, so there is no file; leave --out and --format")
        _view(context, names, results, only or (), to)
        return
    of_file = None if out is None else next((kind for kind in Format if out.suffix == f".{kind}"), None)
    if out is not None and format is None and of_file is None:
        raise ValueError(f"--out {out}: the ending must be .csv or .json, or give --format")
    if format is not None and of_file not in (None, format):
        raise ValueError(f"--out {out} --format {format}: the two do not agree; leave one out")
    selection = repository_of(context).selection(names, results, only or ())

    from subquad.suite.store.rows import write_csv, write_json
    from subquad.suite.store.target import is_remote, replacing, writable

    write = write_json if (format or of_file) is Format.json else write_csv
    if out is None:
        write(selection, sys.stdout)
        return
    # the user names a link for the file that it points to
    place = out.resolve() if not is_remote(out) and out.is_file() else out
    with writable("--out", out), replacing(place) as temporary, temporary.open("w", newline="") as file:
        write(selection, file)
    print(f"wrote {len(selection)} rows to {shown(out)}")


def _view(context: typer.Context, names: Sequence[str], results: Path | None, only: Sequence[str], to: Viewer) -> None:
    """Gives the runs to a viewer."""
    from subquad.suite import trackers
    from subquad.suite.training.live import require

    require(to, f"export --to {to}")
    count = trackers.export(repository_of(context).selection(names, results, only).rows())
    print(f"gave {counted(count)} to {to}")
