"""Every file of a folder of results, read whole, with each file and run that cannot be believed, and why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from subquad.suite.store.checks import Fault, believed
from subquad.suite.store.documents import ending_of
from subquad.suite.store.endings import footer
from subquad.suite.store.storage import SCHEMA, SchemaError, files_below, is_part, load, pieces

OUTSIDE = ".quarantine"
"""Ending of the folder beside a folder of results that gets its bad files."""
UNREAD = ".bad"
"""Ending of the name of a bad file, which no reader of results takes."""


@dataclass
class Findings:
    """The counts of what was read below a folder, and the problems that were found."""

    num_files: int = 0
    num_runs: int = 0
    num_rows: int = 0
    num_again: int = 0
    """Runs that an earlier file of their folder has with the same rows."""
    problems: list[tuple[Path, str]] = field(default_factory=list)
    """The file, and a sentence that names it, for every fault."""


def verify(root: Path) -> Findings:
    """Reads every results file below a folder with all columns, and checks what every reader checks and more.

    More: that the ending in the footer of a file is that of its rows, and that runs which several files of a folder
    have, of which readers take the first one's, have the same rows in all of them.
    """
    found = Findings()
    for _, paths in groupby(files_below(root), lambda path: path.parent):
        before: dict[str, Path] = {}
        for path in paths:
            found.num_files += 1
            try:
                _read(path, before, found)
            except SchemaError as error:
                found.problems.append((path, str(error)))
    return found


def _read(path: Path, before: dict[str, Path], found: Findings) -> None:
    """Adds what one file has. before: run id to the first file of its folder that has the run."""

    def told(fault: Fault) -> None:
        found.problems.append((path, str(fault)))

    num_before, num_rows = len(found.problems), found.num_rows
    for piece in pieces(path, SCHEMA.names):
        table = believed(piece, [path], [len(piece)], told)
        found.num_rows += len(piece)
        found.num_runs += len(piece["run_id"].unique())
        for run_id in table["run_id"].unique().to_pylist():
            if run_id in before:
                _compare(table.filter(pc.equal(table["run_id"], run_id)), path, run_id, before[run_id], found)
            before.setdefault(run_id, path)
        if not is_part(path) and len(found.problems) == num_before:
            for reason in _faults_of_ending(table, path):
                found.problems.append((path, f"{path}: {reason}"))
    if found.num_rows == num_rows:
        found.problems.append((path, f"{path}: it has no rows"))


def _compare(rows: pa.Table, path: Path, run_id: str, first: Path, found: Findings) -> None:
    """Adds a problem where two files of a folder have different rows of a run."""
    other = load(first, run_id=run_id)
    if repr(rows.select(SCHEMA.names).to_pylist()) == repr(other.to_pylist()):
        found.num_again += 1
    else:
        found.problems.append((path, f"{path}: run {run_id}: its rows are not those in {first}, which count"))


def _faults_of_ending(table: pa.Table, path: Path) -> Iterator[str]:
    """Says where the footer of a file contradicts its rows, which `run` and `status` do not read."""
    said, rows = footer(path), ending_of(table.filter(pc.equal(table["metric"], "run")).to_pylist())
    for name in ("status", "error", "operators") if said is not None else ():
        words, is_so = getattr(said, name) or "", getattr(rows, name) or ""
        if words != is_so:
            yield f"{name} is {words[:40]!r} in its footer and {is_so[:40]!r} in its rows"


def why_not_moved(path: Path) -> str:
    """The reason for which `quarantine` leaves a file where it is; "" for one that it moves."""
    if is_part(path):
        return "a part may have good runs, too"
    return "its rows may be good" if path.is_file() and not os.access(path, os.R_OK) else ""


def quarantine(root: Path, paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Moves files below a folder into one beside it, from which nothing reads; yields their old and new paths.

    Files that `why_not_moved` names stay.
    """
    root = root.resolve()
    for path in dict.fromkeys(paths):
        if why_not_moved(path):
            continue
        within = path.parent.resolve().relative_to(root)
        place = root.with_name(root.name + OUTSIDE) / within / (path.name + UNREAD)
        for number in range(1, 1000):
            if not place.exists() and not place.is_symlink():
                break
            place = place.with_name(f"{path.name}.{number}{UNREAD}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
        yield path, place
