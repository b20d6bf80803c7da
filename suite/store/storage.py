"""Results as parquet: one tidy row a measurement, in files of one run or in parts with many runs.

A run writes a file of its own, so parallel workers never share one. `publish` (`suite.store.parts`) puts the runs of a
folder into one part. Every reader takes both, through `files`, `tables` and `endings_of`, and of a run that several
files of a folder have, the first one's rows count: its own file before a part.

A file is written under a temporary name and renamed, so a reader never sees half of one, and nothing is ever edited.
Readers verify the checksums of what they read. Files of an older schema are read with null in the columns they lack;
any other file is refused by name.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from suite.identity import likeness
from suite.store.target import as_oserror, files_like, is_remote, readable, replacing

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2

ENDING = b"subquad.ending"
"""Key of the footer of a file under which stands how the run ended: a CRC-32 in hexadecimal and JSON."""
OF_ENDINGS = ("metric", "status", "operators", "error", "scale", "config", "device", "duration_s")
"""The columns from which an ending is made where the footer has none."""

ADDED = {"threads": 2, "operators": 2}
"""Columns that not every schema version has, and the first one that does."""

SCHEMA = pa.schema(
    [
        ("schema", pa.int32()),  # SCHEMA_VERSION of the writer
        ("run_id", pa.string()),  # hash of the resolved run
        ("experiment", pa.string()),  # folder below reports/
        ("scale", pa.string()),  # name of the scale; everything but `paper` is reduced
        ("task", pa.string()),
        ("task_version", pa.int32()),
        ("model", pa.string()),
        ("model_version", pa.int32()),
        ("seed", pa.int64()),
        ("split", pa.string()),  # train, valid, test, test-last; empty where the metric has none
        ("slice", pa.string()),  # part of a split, e.g. `length=512,num_kv_pairs=64`; empty for the whole
        ("step", pa.int64()),  # optimizer steps done
        ("metric", pa.string()),  # accuracy, loss, train_throughput, peak_memory, ...
        ("unit", pa.string()),  # of `value` and `samples`: fraction, nats, tokens/s, bytes, ...
        ("value", pa.float64()),  # null where status says why there is none
        ("samples", pa.list_(pa.float64())),  # raw samples behind a speed value; a curve (`kernel`, `eigenvalue_*`)
        ("status", pa.string()),  # ok, failed, diverged, oom, n/a
        ("error", pa.string()),  # what went wrong, empty where status is ok
        ("stand_in", pa.string()),  # why the data are not the paper's; empty where they are
        ("split_policy", pa.string()),  # paper or clean
        ("config", pa.string()),  # the resolved run as JSON
        ("commit", pa.string()),
        ("dirty", pa.bool_()),  # uncommitted changes in the checkout
        ("device", pa.string()),  # name of the processor the run used
        ("torch", pa.string()),
        ("triton", pa.string()),
        ("cuda", pa.string()),
        ("threads", pa.int32()),  # CPU threads that torch computed with; null in rows of schema 1
        ("operators", pa.string()),  # JSON: version and backend of every operator used; null where not recorded
        ("python", pa.string()),
        ("precision", pa.string()),  # fp32, tf32, bf16
        ("deterministic", pa.bool_()),
        ("data_digest", pa.string()),  # SHA-256 of the training and validation data as used
        ("started_at", pa.string()),  # UTC, ISO 8601
        ("duration_s", pa.float64()),  # wall time of the run, interruptions left out
    ]
)


TEXTS = tuple(field.name for field in SCHEMA if field.type == pa.string())
"""Columns of text."""


class SchemaError(ValueError):
    """A results file that this version cannot read."""


def result_path(root: Path, experiment: str, scale: str, run_id: str) -> Path:
    """Path of the file with the rows of one run."""
    return root / experiment / scale / f"{run_id}.parquet"


def checkpoint_path(root: Path, experiment: str, scale: str, run_id: str) -> Path:
    """Path of the checkpoint from which an interrupted run continues; removed when its rows are written."""
    return root / experiment / scale / f"{run_id}.checkpoint"


def log_path(root: Path, experiment: str, scale: str, run_id: str) -> Path:
    """Path of the metrics that a run writes while it trains (`suite.training.live`)."""
    return root / experiment / scale / f"{run_id}.jsonl"


def weights_path(root: Path, experiment: str, scale: str, run_id: str) -> Path:
    """Path of the weights of a run that was asked to keep them."""
    return root / experiment / scale / f"{run_id}.weights"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows of one run, whole or not at all. A missing column is null; an unknown one is an error."""
    unknown = {key for row in rows for key in row} - set(SCHEMA.names)
    assert not unknown, f"columns not in the schema: {sorted(unknown)}"
    table = pa.Table.from_pylist([{"schema": SCHEMA_VERSION, **row} for row in rows], schema=SCHEMA)
    text = json.dumps(_ending_of(rows)).encode()
    table = table.replace_schema_metadata({ENDING: f"{zlib.crc32(text):08x} ".encode() + text})
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


PART = "part-"
"""Beginning of the name of a file with many runs, which is no beginning of a run id."""
FILES_AT_ONCE = 256
"""`tables` yields the rows of so many files of one run together. A call on a table takes longer than its work on one
run."""


def is_part(path: Path) -> bool:
    """Whether a results file has many runs."""
    return path.name.startswith(PART)


def load(
    path: Path, columns: Sequence[str] = SCHEMA.names, *, run_id: str = "", encoded: tuple[str, ...] = ()
) -> pa.Table:
    """Columns of one results file. Raises SchemaError, by name, for a damaged one and for one of another schema.

    The checksum of every page that is read is verified. Columns that the file's schema version does not have are null.

    run_id: only the rows of this run, if the file is a part.
    encoded: columns of text that are returned as codes and a dictionary, which take a hundredth of the memory.
    """
    pieces = list(_pieces(path, columns, run_id, encoded))
    return pa.concat_tables(pieces) if pieces else pa.schema(map(_schema(encoded).field, columns)).empty_table()


def _pieces(path: Path, columns: Sequence[str], run_id: str, encoded: tuple[str, ...]) -> Iterator[pa.Table]:
    """The rows of a file, of a part one row group after the other (`load`)."""
    wanted = list(dict.fromkeys((*columns, "run_id"))) if run_id else list(columns)
    try:
        # opening a named pipe would wait for a writer
        if not is_remote(path) and not path.is_file():
            raise OSError("no regular file")
        with _opened(_content_of(path) if is_part(path) else readable(path), encoded) as file:
            there = file.schema_arrow
            names = [name for name in dict.fromkeys(("schema", *wanted)) if name in there.names]
            if not is_part(path):
                # a file is small, and threads would take longer to start than to read
                yield _as_today(path, file.read(names, use_threads=False), there, columns, encoded)
                return
            for i in range(file.num_row_groups):
                if run_id and not _may_have(file.metadata.row_group(i), run_id):
                    continue
                table = _as_today(path, file.read_row_group(i, names, use_threads=False), there, wanted, encoded)
                if run_id:
                    table = table.filter(pc.equal(table["run_id"], run_id)).select(list(columns))
                yield table
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        reason = " ".join(str(error).split())[:120]
        raise SchemaError(f"{path}: damaged or not a parquet file ({reason}); remove it") from None


def part_name(content: bytes) -> str:
    """The name of a part with this content."""
    return f"{PART}{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def _content_of(part: Path) -> BinaryIO:
    """The content of a part. ValueError where it is not that by which the part is named."""
    with as_oserror(part):
        content = part.read_bytes()
    if part_name(content) != part.name:
        raise ValueError("its name is not that of its content")
    return io.BytesIO(content)


def _opened(source: Path | BinaryIO, encoded: Sequence[str]) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=[*encoded])
    except KeyError:
        # an older schema lacks a column
        with pq.ParquetFile(source) as file:
            there = file.schema_arrow.names
        return _opened(source, [name for name in encoded if name in there])


def _may_have(group: pq.RowGroupMetaData, run_id: str) -> bool:
    """Whether a row group of a part may have rows of a run."""
    known = group.column(SCHEMA.get_field_index("run_id")).statistics
    return known is None or not known.has_min_max or known.min <= run_id <= known.max


def _as_today(
    path: Path, table: pa.Table, there: pa.Schema, columns: Sequence[str], encoded: tuple[str, ...]
) -> pa.Table:
    """The columns of a table that was read, with the types of SCHEMA. SchemaError for one of another schema.

    there: the columns of its file.
    """
    versions = table["schema"].unique().to_pylist() if "schema" in there.names else [None]
    if versions == [SCHEMA_VERSION] and there.remove_metadata().equals(_schema(encoded)):
        # nearly every file; to compare and convert its columns one by one takes half as long as to read them
        return table.select(list(columns))
    read = range(1, SCHEMA_VERSION + 1)
    # a part may have rows of several versions
    oldest = min(versions, default=None) if all(version in read for version in versions) else None
    wanted = [field for field in SCHEMA if oldest is not None and ADDED.get(field.name, 1) <= oldest]
    if oldest is None or not all(_is_in(field, there) for field in wanted):
        version = versions[0] if len(versions) == 1 else versions
        raise SchemaError(
            f"{path}: results schema {version}, this version reads 1 to {SCHEMA_VERSION}; "
            "read it with the commit that wrote it, or move it away and run again"
        )
    arrays = []
    for field in map(SCHEMA.field, columns):
        there_is = field.name in table.column_names
        array = table[field.name].cast(field.type) if there_is else pa.nulls(table.num_rows, field.type)
        arrays.append(array.dictionary_encode() if field.name in encoded else array)
    return pa.table(arrays, schema=pa.schema(map(_schema(encoded).field, columns)))


@lru_cache
def _schema(encoded: tuple[str, ...]) -> pa.Schema:
    """SCHEMA with these columns as codes and a dictionary."""
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(text) if field.name in encoded else field for field in SCHEMA])


def _is_in(field: pa.Field, schema: pa.Schema) -> bool:
    """Whether a file has a column, of its type or of one that pandas writes in its place."""
    if field.name not in schema.names:
        return False
    found = schema.field(field.name).type
    if pa.types.is_dictionary(found):
        found = found.value_type
    return (
        found == field.type
        or (pa.types.is_string(field.type) and pa.types.is_large_string(found))
        or (pa.types.is_integer(field.type) and pa.types.is_float64(found))
        or (pa.types.is_list(field.type) and pa.types.is_list(found) and pa.types.is_null(found.value_type))
    )


def files(roots: Iterable[Path], experiment: str) -> list[Path]:
    """Results files of an experiment below several roots; of two files of one name, the first root's."""
    found: dict[tuple[str, str], Path] = {}
    for root in roots:
        for path in files_below(root / experiment, "*/*"):
            found.setdefault((path.parent.name, path.name), path)
    return list(found.values())


def files_below(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Results files below a folder, folder by folder, the parts last."""
    found = files_like(folder, f"{pattern}.parquet")
    return sorted(found, key=lambda path: (path.parent, is_part(path), path.name))


def tables(
    paths: Sequence[Path],
    columns: Sequence[str] = SCHEMA.names,
    *,
    encoded: tuple[str, ...] = (),
    watch: Callable[[int], None] = lambda done: None,
    skip: Callable[[str], None] | None = None,
) -> Iterator[pa.Table]:
    """Yields columns of the rows of files, in their order, some files of one run or a piece of a part at a time.

    Of a run that several files of a folder have, the first one's rows are taken.

    encoded: columns of text that are returned as codes and a dictionary (`load`).
    watch: called with the number of files that have been read.
    skip: called with a sentence on each file that cannot be read, whose rows are left out; None: SchemaError is raised.
    """

    def loaded(path: Path) -> pa.Table:
        try:
            return load(path, columns, encoded=encoded)
        except SchemaError as error:
            if skip is None:
                raise
            skip(str(error))
            return nothing

    nothing = pa.schema(map(_schema(encoded).field, columns)).empty_table()
    before: dict[Path, set[str]] = {}
    # half of the time of a file passes outside of Python, so that more threads would wait for each other
    with ThreadPoolExecutor(2) as pool:
        start = 0
        while start < len(paths):
            path, end = paths[start], start + 1
            stored = before.setdefault(path.parent, set())
            if is_part(path):
                try:
                    yield from _of_part(path, columns, encoded, stored)
                except SchemaError as error:
                    if skip is None:
                        raise
                    skip(str(error))
            else:
                while end < len(paths) and end - start < FILES_AT_ONCE and not is_part(paths[end]):
                    end += 1
                some = paths[start:end]
                for path in some:
                    before.setdefault(path.parent, set()).add(path.stem)
                yield pa.concat_tables(pool.map(loaded, some))
            start = end
            watch(start)


def _of_part(path: Path, columns: Sequence[str], encoded: tuple[str, ...], before: set[str]) -> Iterator[pa.Table]:
    """The rows of a part, without those of runs that stand in files before it; its own runs are added to these."""
    own: set[str] = set()
    for table in _pieces(path, list(dict.fromkeys(("run_id", *columns))), "", encoded):
        ids = set(table["run_id"].unique().to_pylist())
        own |= ids
        if again := ids & before:
            is_again = pc.is_in(table["run_id"].cast(pa.string()), pa.array(again, pa.string()))
            table = table.filter(pc.invert(is_again))
        yield table.select(list(columns))
    before |= own


def read(
    paths: Sequence[Path], columns: Sequence[str] = SCHEMA.names, skip: Callable[[str], None] | None = None
) -> pd.DataFrame:
    """Columns of the rows of many files as one frame, in file order (`tables`)."""
    import pandas as pd

    found = list(tables(paths, columns, skip=skip))
    return pa.concat_tables(found).to_pandas() if found else pd.DataFrame(columns=list(columns))


@dataclass(frozen=True)
class Ending:
    """Status of a stored run (`ok`, `failed`, `diverged`, `oom` or `n/a`), and the operators that it used."""

    status: str
    operators: dict[str, dict[str, Any]]
    """Name to `version` and `backend`; empty where they were not recorded."""
    error: str = ""
    """Why the run ended, where its status is not `ok`."""
    device: str = ""
    """Name of the processor, and how many runs shared it."""
    duration_s: float | None = None
    like: tuple[str, ...] = ()
    """What the run has in common with runs that take as long (`suite.identity.likeness`); empty where the footer of an
    older file does not say so."""


def ending(path: Path, *, with_likeness: bool = False) -> Ending | None:
    """The ending of the run of a file; None if there is no file. A file without a row `run` belongs to a failed run.

    It is read from the footer of the file, which takes a third of the time of its rows; older files have it in these
    alone.

    with_likeness: read the rows where the footer does not say which runs are like this one.
    """
    with as_oserror(path):
        if not path.exists():
            return None
    found = _footer(path)
    if found is None or (with_likeness and "like" not in found):
        found = _ending_of(load(path, OF_ENDINGS).to_pylist())
    return _parsed(found)


def _parsed(found: Mapping[str, Any]) -> Ending:
    return Ending(
        found["status"],
        json.loads(found["operators"] or "{}"),
        found["error"] or "",
        found.get("device") or "",
        found.get("duration_s"),
        tuple(found.get("like") or ()),
    )


def _ending_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    for row in rows:
        if row.get("metric") == "run":
            kept = {key: row.get(key) for key in ("status", "operators", "error", "device", "duration_s")}
            return {**kept, "like": _likeness_of(row)}
    return {"status": "failed", "operators": None, "error": None}


def _likeness_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """That of the run of a row; empty where its columns do not say which run it was."""
    try:
        return likeness(row["scale"], json.loads(row["config"]))
    except (KeyError, ValueError, TypeError, AttributeError):
        return ()


def _footer(path: Path) -> dict[str, Any] | None:
    """The ending in the footer of a file; None where there is none, or none that is whole."""
    try:
        if not is_remote(path):
            if not path.is_file():
                return None
            if (found := _checked(ending_in(path.read_bytes()))) is not None:
                return found
        with pq.ParquetFile(readable(path)) as file:
            return _checked((file.metadata.metadata or {}).get(ENDING, b""))
    except (pa.ArrowException, OSError, ValueError):
        return None


def ending_in(content: bytes) -> bytes:
    """The value of ENDING in the bytes of a parquet file; something else where they are not as expected.

    To parse the whole footer takes ten times as long, seconds for thousands of runs. In Thrift's compact protocol a key
    is followed by the byte 0x18, by the length of the value, seven bits in a byte, lowest first, and by the value.
    """
    place = content.rfind(ENDING) + len(ENDING) + 1
    length = shift = 0
    for byte in content[place : place + 4]:
        length |= (byte & 127) << shift
        shift += 7
        place += 1
        if byte < 128:
            break
    return content[place : place + length]


def _checked(value: bytes) -> dict[str, Any] | None:
    """Parses the value of ENDING; returns None if its checksum does not fit, or if it is empty."""
    checksum, _, text = value.partition(b" ")
    if not text or checksum != f"{zlib.crc32(text):08x}".encode():
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def endings(paths: Iterable[Path], *, with_likeness: bool = False) -> list[Ending | None]:
    """The endings of the runs of files, of a remote place several at a time, because it takes long to answer."""
    paths = list(paths)
    if not any(is_remote(path) for path in paths):
        # threads would wait for each other
        return [ending(path, with_likeness=with_likeness) for path in paths]
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(ending, with_likeness=with_likeness), paths))


@lru_cache(maxsize=1024)
def endings_in(part: Path) -> Mapping[str, Ending]:
    """Run id to ending for all runs of a part, which is never edited, so that it is read once."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for table in _pieces(part, ("run_id", *OF_ENDINGS), "", TEXTS):
        rows |= {run_id: [] for run_id in table["run_id"].unique().to_pylist()}
        for row in table.filter(pc.equal(table["metric"], "run")).to_pylist():
            rows[row["run_id"]].append(row)
    return {run_id: _parsed(_ending_of(found)) for run_id, found in rows.items()}


def published_in(folder: Path) -> dict[str, Path]:
    """Run id to part, of all runs in the parts of one folder; of a run that several parts have, the first one."""
    try:
        parts = files_like(folder, f"{PART}*.parquet")
    except FileNotFoundError:
        # there is no such bucket, which whoever writes to it is told
        return {}
    return {run_id: part for part in reversed(parts) for run_id in endings_in(part)}


def endings_of(root: Path, runs: Sequence[tuple[str, str, str]]) -> list[Ending | None]:
    """The endings of runs, each given by experiment, scale and id, below a root; None of a run that is not stored."""
    paths = [result_path(root, *run) for run in runs]
    found = endings(paths)
    # a folder is listed once, because a bucket answers slowly
    parts = {
        folder: published_in(folder)
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


def every_ending(paths: Iterable[Path]) -> list[Ending]:
    """The endings of all runs of files, with what they are like. Of a run that several files have, the first one's."""
    paths = list(paths)
    own = [path for path in paths if not is_part(path)]
    found = dict(zip(((_place(path), path.stem) for path in own), endings(own, with_likeness=True), strict=True))
    for path in paths:
        if is_part(path):
            for run_id, ended in endings_in(path).items():
                found.setdefault((_place(path), run_id), ended)
    return [ended for ended in found.values() if ended is not None]


def _place(path: Path) -> tuple[str, str]:
    """The part of a path below its root that the folders of an experiment's scale share."""
    return path.parent.parent.name, path.parent.name


def runs_of(path: Path) -> Iterable[str]:
    """The ids of the runs that a results file has."""
    return endings_in(path) if is_part(path) else (path.stem,)


def find(roots: Iterable[Path], beginning: str) -> list[tuple[str, Path]]:
    """Id and file of every stored run whose id begins so, below several roots in their order."""
    paths = [path for root in roots for path in files_below(root)]
    return [(run_id, path) for path in paths for run_id in runs_of(path) if run_id.startswith(beginning)]


def operator_mix(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Description of the operator versions and backends behind several rows if they differ; None if they are the same.

    rows: stored rows or the first row of each run; only the column `operators` is read. `selective_scan: version 1
    (torch), version 2 (triton)`. Rows without a record among rows with one are counted, because their versions are
    not known.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    unknown = known = 0
    for row in rows:
        text = row.get("operators")
        # pandas has NaN for null
        if not isinstance(text, str):
            unknown += 1
            continue
        known += 1
        for name, used in json.loads(text).items():
            found.setdefault(name, set()).add((used["version"], used["backend"]))
    parts = [
        f"{name}: {', '.join(f'version {version} ({backend})' for version, backend in sorted(kinds))}"
        for name, kinds in sorted(found.items())
        if len(kinds) > 1
    ]
    if unknown and known:
        parts.append(f"not recorded in {unknown} of {unknown + known} rows")
    return "; ".join(parts) or None
