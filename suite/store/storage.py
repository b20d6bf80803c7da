"""Results as parquet: one tidy row a measurement, one file a run, written once.

A file is written under a temporary name and renamed, so a reader never sees half of one, parallel workers never share
one, and nothing is ever edited. Readers verify the checksums of what they read. Files of an older schema are read with
null in the columns they lack; any other file is refused by name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
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


def load(path: Path, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Columns of one results file. Raises SchemaError, by name, for a damaged one and for one of another schema.

    The checksum of every page that is read is verified. Columns that the file's schema version does not have are null.
    """
    try:
        # opening a named pipe would wait for a writer
        if not is_remote(path) and not path.is_file():
            raise OSError("no regular file")
        with pq.ParquetFile(readable(path), page_checksum_verification=True) as file:
            there = file.schema_arrow
            names = [name for name in dict.fromkeys(("schema", *columns)) if name in there.names]
            # a file is small, and threads would take longer to start than to read
            table = file.read(columns=names, use_threads=False)
        versions = table["schema"].unique().to_pylist() if "schema" in there.names else [None]
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise SchemaError(f"{path}: damaged or not a parquet file ({reason}); remove it") from None
    if versions == [SCHEMA_VERSION] and there.equals(SCHEMA):
        # nearly every file; to compare and convert its columns one by one takes half as long as to read them
        return table.select(list(columns))
    version = versions[0] if len(versions) == 1 else versions
    wanted = [field for field in SCHEMA if isinstance(version, int) and ADDED.get(field.name, 1) <= version]
    if version not in range(1, SCHEMA_VERSION + 1) or not all(_is_in(field, there) for field in wanted):
        raise SchemaError(
            f"{path}: results schema {version}, this version reads 1 to {SCHEMA_VERSION}; "
            "read it with the commit that wrote it, or move it away and run again"
        )
    fields = [SCHEMA.field(name) for name in columns]
    arrays = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in fields
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def _is_in(field: pa.Field, schema: pa.Schema) -> bool:
    """Whether a file has a column, of its type or of one that pandas writes in its place."""
    if field.name not in schema.names:
        return False
    found = schema.field(field.name).type
    return (
        found == field.type
        or (pa.types.is_string(field.type) and pa.types.is_large_string(found))
        or (pa.types.is_integer(field.type) and pa.types.is_float64(found))
        or (pa.types.is_list(field.type) and pa.types.is_list(found) and pa.types.is_null(found.value_type))
    )


def files(roots: Iterable[Path], experiment: str) -> list[Path]:
    """Results files of an experiment below several roots; of a run stored twice, the first root's file."""
    found: dict[tuple[str, str], Path] = {}
    for root in roots:
        for path in files_like(root / experiment, "*/*.parquet"):
            found.setdefault((path.parent.name, path.name), path)
    return list(found.values())


def read(paths: Sequence[Path], columns: Sequence[str] = SCHEMA.names) -> pd.DataFrame:
    """Columns of the rows of many files as one frame, in file order."""
    import pandas as pd

    if not paths:
        return pd.DataFrame(columns=list(columns))
    return pa.concat_tables(load(path, columns) for path in paths).to_pandas()


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
    """The ending of a stored run; None if there is no file. A file without a row `run` belongs to a failed run.

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
    """The endings of many stored runs, of a remote place several at a time, because it takes long to answer."""
    paths = list(paths)
    if not any(is_remote(path) for path in paths):
        # threads would wait for each other
        return [ending(path, with_likeness=with_likeness) for path in paths]
    # pyarrow imports it at its first use, which fails where several threads come to it at once
    import pyarrow.compute

    assert pyarrow.compute
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(ending, with_likeness=with_likeness), paths))


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
