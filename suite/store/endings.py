"""The endings of stored runs and the file of each of them, read without their measurements.

`run` and `status` ask this of thousands of files. A file of one run says it in its footer, which takes a third of the
time of its rows; of a part, which is never edited, the rows are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subquad.suite.store.checks import PART, Fault, believed, check_file
from subquad.suite.store.documents import ENDING, OF_ENDINGS, StoredEnding, ending_in, ending_of, operators_in
from subquad.suite.store.storage import SchemaError, content_of, files_below, ids_in, is_part, load, pieces, result_path
from subquad.suite.store.target import as_oserror, files_like, is_remote


@dataclass(frozen=True)
class Ending:
    """Status of a stored run (`ok`, `failed`, `diverged`, `oom` or `n/a`), and the operators that it used."""

    status: str
    """Or DAMAGED, for a file that cannot be read and for a run that cannot be believed; `error` says why."""
    operators: dict[str, dict[str, Any]]
    """Name to `version` and `backend`; empty where they were not recorded."""
    error: str = ""
    """Why the run ended, where its status is not `ok`."""
    device: str = ""
    """Name of the processor, and how many runs shared it."""
    duration_s: float | None = None
    like: tuple[str, ...] = ()
    """The settings that runs of equal duration share (`suite.identity.likeness`); empty where the footer of an older
    file does not give them."""


DAMAGED = "damaged"


def ending(path: Path, *, with_likeness: bool = False) -> Ending | None:
    """The ending of the run of a file; None if there is no file. A file without a row `run` belongs to a failed run.

    It is read from the footer of the file, which takes a third of the time of its rows; older files have it in these
    alone, or do not say there whose ending it is. Raises SchemaError as `load` does.

    with_likeness: read the rows where the footer does not say which runs are like this one.
    """
    with as_oserror(path):
        if not path.exists():
            return None
    found = footer(path)
    if found is None or found.run_id is None or (with_likeness and found.like is None):
        # `load` refuses a file whose rows are not those of the run that it is named after
        found = ending_of(load(path, OF_ENDINGS).to_pylist())
    else:
        try:
            check_file(path, found.run_id, found.experiment or "", found.scale or "")
        except ValueError as error:
            raise SchemaError(f"{path}: {error}; move the file away") from None
    return _parsed(found)


def _parsed(found: StoredEnding) -> Ending:
    return Ending(
        found.status,
        operators_in(found.operators),
        found.error or "",
        found.device or "",
        found.duration_s,
        tuple(found.like or ()),
    )


def footer(path: Path) -> StoredEnding | None:
    """The ending in the footer of a file; None where there is none, or the file is not whole."""
    try:
        content = content_of(path)
        if (found := ending_in(value_in(content.getvalue()))) is not None:
            return found
        with pq.ParquetFile(content) as file:
            return ending_in((file.metadata.metadata or {}).get(ENDING, b""))
    except (pa.ArrowException, OSError, ValueError):
        return None


def value_in(content: bytes) -> bytes:
    """The value of ENDING in the bytes of a parquet file; something else where they are not as expected.

    To parse the whole footer takes ten times as long, seconds for thousands of runs. In Thrift's compact protocol a key
    is followed by the byte 0x18, by the length of the value, seven bits in a byte, lowest first, and by the value.
    """
    place = content.rfind(ENDING) + len(ENDING) + 1
    footer_bytes = int.from_bytes(content[-8:-4], "little")
    if content[-4:] != b"PAR1" or not len(content) - 8 - footer_bytes < place:
        # the file has lost its end, where the length of the footer is
        return b""
    length = shift = 0
    for byte in content[place : place + 4]:
        length |= (byte & 127) << shift
        shift += 7
        place += 1
        if byte < 128:
            break
    return content[place : place + length]


Told = Callable[[str], None]


def _ending(path: Path, *, with_likeness: bool, skip: Told | None) -> Ending | None:
    try:
        return ending(path, with_likeness=with_likeness)
    except SchemaError as error:
        if skip is None:
            raise
        skip(str(error))
        return Ending(DAMAGED, {}, str(error))


def endings(paths: Iterable[Path], *, with_likeness: bool = False, skip: Told | None = None) -> list[Ending | None]:
    """The endings of the runs of files, of a remote place several at a time, because it takes long to answer.

    skip: called with a sentence on each file that cannot be read or believed; None: SchemaError is raised.
    """
    paths = list(paths)
    one = partial(_ending, with_likeness=with_likeness, skip=skip)
    if not any(is_remote(path) for path in paths):
        # threads would wait for each other
        return list(map(one, paths))
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, paths))


@lru_cache(maxsize=1024)
def endings_in(part: Path) -> Mapping[str, Ending]:
    """Run id to ending for all runs of a part, which is never edited, so that it is read once.

    A run that cannot be believed has the status DAMAGED. Raises SchemaError for a part that cannot be read.
    """
    found: dict[str, Ending] = {}
    for piece in pieces(part, OF_ENDINGS):
        faults: list[Fault] = []
        table = believed(piece, [part], [len(piece)], faults.append)
        rows: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in table["run_id"].unique().to_pylist()}
        for row in table.select(OF_ENDINGS).filter(pc.equal(table["metric"], "run")).to_pylist():
            rows[row["run_id"]].append(row)
        found |= {key: _parsed(ending_of(of_run)) for key, of_run in rows.items()}
        found |= {fault.run_id: Ending(DAMAGED, {}, str(fault)) for fault in faults}
    return found


def _endings_in(part: Path, skip: Told | None) -> Mapping[str, Ending]:
    try:
        found = endings_in(part)
    except SchemaError as error:
        if skip is None:
            raise
        skip(str(error))
        return {}
    for ended in found.values():
        if ended.status == DAMAGED:
            if skip is None:
                raise SchemaError(ended.error)
            skip(ended.error)
    return found


def published_in(folder: Path, skip: Told | None = None) -> dict[str, Path]:
    """Run id to part, of all runs in the parts of one folder; of a run that several parts have, the first one.

    skip: as for `endings`.
    """
    try:
        parts = files_like(folder, f"{PART}*.parquet")
    except FileNotFoundError:
        # there is no such bucket, which whoever writes to it is told
        return {}
    return {run_id: part for part in reversed(parts) for run_id in _endings_in(part, skip)}


def endings_of(root: Path, runs: Sequence[tuple[str, str, str]], skip: Told | None = None) -> list[Ending | None]:
    """The endings of runs, each given by experiment, scale and id, below a root; None of a run that is not stored.

    skip: called with a sentence on each file and run that cannot be read or believed; then the status of the run is
        DAMAGED. None: SchemaError is raised.
    """
    paths = [result_path(root, *run) for run in runs]
    found = endings(paths, skip=skip)
    # a folder is listed once, because a bucket answers slowly
    parts = {
        folder: published_in(folder, skip)
        for folder in {path.parent for path, ended in zip(paths, found, strict=True) if ended is None}
    }
    return [
        endings_in(part)[path.stem] if ended is None and (part := parts[path.parent].get(path.stem)) else ended
        for path, ended in zip(paths, found, strict=True)
    ]


def files_of(root: Path, runs: Sequence[tuple[str, str, str]]) -> list[Path]:
    """The files that have the rows of runs, each given by experiment, scale and id, below a root."""
    paths = [result_path(root, *run) for run in runs]
    own = {path for path in paths if path.exists()}
    parts = {folder: published_in(folder) for folder in {path.parent for path in paths if path not in own}}
    found = [path if path in own else parts[path.parent].get(path.stem) for path in paths]
    return list(dict.fromkeys(path for path in found if path is not None))


def every_ending(paths: Iterable[Path], skip: Told | None = None) -> list[Ending]:
    """The endings of all runs of files, with what they are like. Of a run that several files have, the first one's.

    skip: as for `endings`.
    """
    paths = list(paths)
    own = [path for path in paths if not is_part(path)]
    ended = endings(own, with_likeness=True, skip=skip)
    found = dict(zip(((_place(path), path.stem) for path in own), ended, strict=True))
    for path in paths:
        if is_part(path):
            for run_id, of_run in _endings_in(path, skip).items():
                found.setdefault((_place(path), run_id), of_run)
    return [ended for ended in found.values() if ended is not None]


def _place(path: Path) -> tuple[str, str]:
    """The part of a path below its root that the folders of an experiment's scale share."""
    return path.parent.parent.name, path.parent.name


def runs_of(path: Path, skip: Told | None = None) -> Iterable[str]:
    """The ids of the runs that a results file has, whether they can be believed or not.

    skip: called with a sentence on a part that cannot be read; None: SchemaError is raised.
    """
    if not is_part(path):
        return (path.stem,)
    try:
        return ids_in(path)
    except SchemaError as error:
        if skip is None:
            raise
        skip(str(error))
        return ()


def find(roots: Iterable[Path], beginning: str, skip: Told | None = None) -> list[tuple[str, Path]]:
    """Id and file of every stored run whose id begins so, below several roots in their order.

    skip: as for `runs_of`.
    """
    paths = [path for root in roots for path in files_below(root)]
    return [(run_id, path) for path in paths for run_id in runs_of(path, skip) if run_id.startswith(beginning)]
