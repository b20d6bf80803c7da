"""`export`: stored rows as CSV or JSON, with every setting as a column."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import typer

from subquad.suite.commands.repository import Repository, StoredResults, repository_of, shown
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
    verdicts: Annotated[
        bool,
        typer.Option(
            "--verdicts", help="In place of rows, every number and claim of the paper: verified, falsified, toy, ..."
        ),
    ] = False,
) -> None:
    """Print stored rows: the columns of results/README.md, then every setting under its dotted key.

    Numbers have all their digits. JSON is an array with one row a line.
    """
    if to is not None:
        if out is not None or format is not None or verdicts:
            raise ValueError(f"export --to {to}: a viewer gets the rows and no file; leave the other options out")
        _view(context, names, results, only or (), to)
        return
    of_file = None if out is None else next((kind for kind in Format if out.suffix == f".{kind}"), None)
    if out is not None and format is None and of_file is None:
        raise ValueError(f"--out {out}: the ending must be .csv or .json, or give --format")
    if format is not None and of_file not in (None, format):
        raise ValueError(f"--out {out} --format {format}: the two do not agree; leave one out")
    if verdicts and only:
        raise ValueError("export --verdicts: verdicts are of tables and not of rows; leave --only out")
    chosen = format or of_file or Format.csv
    repository = repository_of(context)
    count, write = (
        _verdicts(repository, names, results, chosen)
        if verdicts
        else _rows(repository, names, results, only or (), chosen)
    )

    from subquad.suite.store.target import is_remote, replacing, writable

    if out is None:
        write(sys.stdout)
        return
    # the user names a link for the file that it points to
    place = out.resolve() if not is_remote(out) and out.is_file() else out
    with writable("--out", out), replacing(place) as temporary, temporary.open("w", newline="") as file:
        write(file)
    print(f"wrote {count} {'verdicts' if verdicts else 'rows'} to {shown(out)}")


def _rows(
    repository: Repository, names: Sequence[str], results: Path | None, only: Sequence[str], format: Format
) -> tuple[int, Callable[[TextIO], None]]:
    """The number of stored rows that are wanted, and the function that writes them."""
    from subquad.suite.store.rows import write_csv, write_json

    selection = repository.selection(names, results, only)
    return len(selection), partial(write_json if format is Format.json else write_csv, selection)


def _verdicts(
    repository: Repository, names: Sequence[str], results: Path | None, format: Format
) -> tuple[int, Callable[[TextIO], None]]:
    """The number of verdicts, and the function that writes them. ValueError where there are none."""
    from subquad.suite.commands.report import verdicts_of
    from subquad.suite.store.rows import cell

    lines = list(verdicts_of(repository, names, results))
    if not lines:
        raise ValueError(
            f"export {' '.join(names)} --verdicts: no stored run has a number of a paper to compare with, or a claim"
        )

    def write(file: TextIO) -> None:
        if format is Format.json:
            file.write("[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n")
            return
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        # a text may begin as a formula of a spreadsheet does
        writer.writerows({key: cell(value) for key, value in line.items()} for line in lines)

    return len(lines), write


def _view(context: typer.Context, names: Sequence[str], results: Path | None, only: Sequence[str], to: Viewer) -> None:
    """Gives the runs to a viewer."""
    from subquad.suite import trackers
    from subquad.suite.training.live import require

    require(to, f"export --to {to}")
    count = trackers.export(repository_of(context).selection(names, results, only).rows())
    print(f"gave {counted(count)} to {to}")
