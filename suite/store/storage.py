"""Results as parquet: one tidy row a measurement, in files of one run or in parts with many runs.

A run writes a file of its own, so parallel workers never share one. `publish` (`suite.store.parts`) puts the runs of a
folder into one part. Every reader takes both, through `files`, `tables` and `suite.store.endings`, and of a run that
several files of a folder have, the first one's rows count: its own file before a part.

A file is written under a temporary name and renamed, so a reader never sees half of one, and nothing is ever edited.
Readers verify the checksums of what they read, and leave out runs whose numbers, JSON or identity cannot be believed
(`suite.store.checks`). Files of an older schema are read with null in the columns they lack; any other file is refused
by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subquad.suite.store import checks
from subquad.suite.store.checks import PART, Fault
from subquad.suite.store.documents import ENDING, footer_of
from subquad.suite.store.target import as_oserror, files_like, is_remote, replacing

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2

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
    """Writes the rows of one run, whole or not at all. A missing column is null; an unknown one is an error.

    Raises ValueError for a number that its metric cannot have (`suite.metrics.METRICS`). NaN and infinity are stored
    where the status of the row or of the run is not `ok`; readers get null in their place.
    """
    try:
        table = _table(rows)
    except UnicodeEncodeError:
        # an error may name a file whose bytes are no UTF-8
        rows = [{name: _encodable(cell) for name, cell in row.items()} for row in rows]
        table = _table(rows)
    checks.check_numbers(table)
    table = table.replace_schema_metadata({ENDING: footer_of(rows), DIGEST: _UNKNOWN})
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd", write_page_checksum=True)
    with replacing(path) as temporary:
        temporary.write_bytes(_sealed(content.getvalue()))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The rows with all columns of the schema."""
    unknown = set().union(*rows) - set(SCHEMA.names)
    assert not unknown, f"columns not in the schema: {sorted(unknown)}"
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    columns["schema"] = [row.get("schema", SCHEMA_VERSION) for row in rows]
    # Arrow refuses integers above 2^53, which counts of operations exceed, where a float64 would round
    columns["value"] = [value if value is None else float(value) for value in columns["value"]]
    return pa.table(columns, schema=SCHEMA)


def _encodable(cell: Any) -> Any:
    """A cell whose text can be stored."""
    return cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell


DIGEST = b"subquad.digest"
"""The key in a footer with the SHA-256 of the file of one run, for which this digest itself counts as zeros. Parquet
has checksums of pages and none of the footer, by which a reader finds the pages of a column."""
_UNKNOWN = b"0" * 64


def _sealed(content: bytes) -> bytes:
    """The content of a file with its digest."""
    start, digest = _digest_of(content)
    return content[:start] + digest + content[start + len(digest) :]


def _digest_of(content: bytes) -> tuple[int, bytes]:
    """The place of the digest in a file, which is between two bytes after its key (`endings.value_in`), and its value.

    The place is -1 in a file that has no digest, as those of before.
    """
    key = content.rfind(DIGEST)
    if key < 0:
        return -1, b""
    start = key + len(DIGEST) + 2
    total = hashlib.sha256(content[:start])
    total.update(_UNKNOWN)
    total.update(content[start + len(_UNKNOWN) :])
    return start, total.hexdigest().encode()


MOST_VALUES, MOST_TEXT = 1 << 22, 1 << 30
"""The most values of a column, and bytes of a column of text, that a row group may have, or the file of one run. Ours
have a hundredth. A file of kilobytes can claim terabytes, because Parquet stores once what is repeated."""
FILES_AT_ONCE = 256
"""`tables` yields the rows of so many files of one run together. A call on a table takes longer than its work on one
run."""


def is_part(path: Path) -> bool:
    """Whether a results file has many runs."""
    return path.name.startswith(PART)


def load(
    path: Path, columns: Sequence[str] = SCHEMA.names, *, run_id: str = "", encoded: tuple[str, ...] = ()
) -> pa.Table:
    """Columns of one results file. Raises SchemaError, by name, for a damaged one, for one of another schema, and for
    one with a run that cannot be believed.

    The checksum of every page that is read is verified. Columns that the file's schema version does not have are null.

    run_id: only the rows of this run, if the file is a part.
    encoded: columns of text that are returned as codes and a dictionary, which take a hundredth of the memory.
    """
    found = [
        _shaped(checks.believed(piece, [path], [piece.num_rows], _refuse), columns, encoded)
        for piece in pieces(path, columns, run_id)
    ]
    return pa.concat_tables(found) if found else _nothing(columns, encoded)


def _refuse(fault: Fault) -> None:
    raise SchemaError(f"{fault}; move the file away")


def _nothing(columns: Sequence[str], encoded: tuple[str, ...]) -> pa.Table:
    return pa.schema(map(_schema(encoded).field, columns)).empty_table()


def _shaped(table: pa.Table, columns: Sequence[str], encoded: tuple[str, ...]) -> pa.Table:
    """The columns that are wanted, with text as text where it is not wanted as codes."""
    return table.select(list(columns)).cast(pa.schema(map(_schema(encoded).field, columns)))


def pieces(path: Path, columns: Sequence[str], run_id: str = "") -> Iterator[pa.Table]:
    """The rows of a file, of a part one row group after the other (`load`), with text as codes and a dictionary.

    They have the columns that `suite.store.checks` needs, too.
    """
    wanted = list(dict.fromkeys((*columns, *checks.READ)))
    with _named(path), _opened(content_of(path), TEXTS) as file:
        there = file.schema_arrow
        if len(set(there.names)) < len(there.names):
            raise ValueError("it has a column twice")
        names = [name for name in dict.fromkeys(("schema", *wanted)) if name in there.names]
        _check_size(file.metadata)
        if not is_part(path):
            # a file is small, and threads would take longer to start than to read
            table = file.read(names, use_threads=False)
            # Arrow believes the count of a row group, which no checksum covers
            if table.num_rows != file.metadata.num_rows:
                raise ValueError(f"it has {table.num_rows} of its {file.metadata.num_rows} rows")
            yield _as_today(path, table, there, wanted)
            return
        _check_order(file.metadata)
        for i in range(file.num_row_groups):
            if run_id and not _may_have(file.metadata.row_group(i), run_id):
                continue
            table = _as_today(path, file.read_row_group(i, names, use_threads=False), there, wanted)
            yield table.filter(pc.equal(table["run_id"], run_id)) if run_id else table


@lru_cache(maxsize=1024)
def ids_in(part: Path) -> tuple[str, ...]:
    """The ids of the runs in a part, which is never edited, so that they are read once; their rows are not checked.

    Raises SchemaError for a part that cannot be read.
    """
    with _named(part), _opened(content_of(part), ["run_id"]) as file:
        if "run_id" not in file.schema_arrow.names:
            raise ValueError("it has no column run_id")
        found = file.read(["run_id"], use_threads=False)["run_id"].unique().cast(pa.string())
        found.validate(full=True)
        return tuple(found.drop_null().to_pylist())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Makes a SchemaError that names the file of an error that arises while it is read."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        if isinstance(error, PermissionError):
            raise SchemaError(f"{path}: cannot be read ({error.strerror}); change its permissions") from None
        reason = " ".join(str(error).split())[:120]
        raise SchemaError(f"{path}: damaged or not a parquet file ({reason}); remove it") from None


def part_name(content: bytes) -> str:
    """The name of a part with this content."""
    return f"{PART}{hashlib.sha256(content).hexdigest()[:16]}.parquet"


def content_of(path: Path) -> io.BytesIO:
    """The content of a results file. ValueError where its digest, or the name of a part, is that of another content."""
    # opening a named pipe would wait for a writer
    if not is_remote(path) and not path.is_file():
        raise OSError("no regular file")
    with as_oserror(path):
        content = path.read_bytes()
    if is_part(path):
        if part_name(content) != path.name:
            raise ValueError("its name is not that of its content")
        return io.BytesIO(content)
    start, digest = _digest_of(content)
    if start >= 0 and not content.startswith(digest, start):
        raise ValueError("its digest is not that of its content")
    return io.BytesIO(content)


def _opened(source: BinaryIO, encoded: Sequence[str]) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=[*encoded])
    except KeyError:
        # an older schema lacks a column
        with pq.ParquetFile(source) as file:
            there = file.schema_arrow.names
        return _opened(source, [name for name in encoded if name in there])


def _check_size(file: pq.FileMetaData) -> None:
    """Raises ValueError where more values than a reader has memory for are in a row group."""
    for i in range(file.num_row_groups):
        group = file.row_group(i)
        most = max((group.column(place).num_values for place in range(group.num_columns)), default=0)
        if max(most, group.num_rows) > MOST_VALUES:
            raise ValueError(f"a column has {max(most, group.num_rows):,} values, at most {MOST_VALUES:,} are read")


def _check_order(part: pq.FileMetaData) -> None:
    """Raises ValueError where a run may have rows in two row groups, so that a reader could take a part of them."""
    place = SCHEMA.get_field_index("run_id")
    known = [part.row_group(i).column(place).statistics for i in range(part.num_row_groups)]
    if not all(a and b and a.has_min_max and b.has_min_max and a.max < b.min for a, b in pairwise(known)):
        raise ValueError("its runs are not sorted")


def _may_have(group: pq.RowGroupMetaData, run_id: str) -> bool:
    """Whether a row group of a part may have rows of a run."""
    known = group.column(SCHEMA.get_field_index("run_id")).statistics
    return known is None or not known.has_min_max or known.min <= run_id <= known.max


def _as_today(path: Path, table: pa.Table, there: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """The columns of a table that was read, with the types of SCHEMA. SchemaError for one of another schema.

    there: the columns of its file.
    """
    versions = table["schema"].unique().to_pylist() if "schema" in there.names else [None]
    if versions == [SCHEMA_VERSION] and there.remove_metadata().equals(_schema(TEXTS)):
        # nearly every file; to compare and convert its columns one by one takes half as long as to read them
        return _valid(table.select(list(columns)))
    read = range(1, SCHEMA_VERSION + 1)
    # a part may have rows of several versions
    oldest = min(versions, default=None) if all(version in read for version in versions) else None
    version = versions[0] if len(versions) == 1 else versions
    if oldest is None:
        raise SchemaError(
            f"{path}: results schema {version}, this version reads 1 to {SCHEMA_VERSION}; "
            "read it with the commit that wrote it, or move it away and run again"
        )
    for field in SCHEMA:
        if ADDED.get(field.name, 1) <= oldest and not _is_in(field, there):
            found = f"is {there.field(field.name).type} in it" if field.name in there.names else "is not in it"
            raise SchemaError(
                f"{path}: no file of results schema {version}: the column {field.name} ({field.type}) {found}; "
                "restore the file, or move it away and run again"
            )
    arrays = []
    for field in map(SCHEMA.field, columns):
        there_is = field.name in table.column_names
        array = table[field.name].cast(field.type) if there_is else pa.nulls(table.num_rows, field.type)
        arrays.append(array.dictionary_encode() if field.name in TEXTS else array)
    return _valid(pa.table(arrays, schema=pa.schema(map(_schema(TEXTS).field, columns))))


def _valid(table: pa.Table) -> pa.Table:
    """The table. ArrowException where a text is no UTF-8 or has no place in its dictionary, which Arrow does not look
    for when it reads a file. ValueError for a column whose text would take more memory than MOST_TEXT."""
    for name in table.column_names:
        if name in TEXTS:
            for chunk in table[name].chunks:
                chunk.validate(full=True)
                # every row can have no more than all texts together, which is quickly known
                if len(chunk) * chunk.dictionary.nbytes > MOST_TEXT:
                    lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
                    if (pc.sum(lengths.take(chunk.indices)).as_py() or 0) > MOST_TEXT:
                        raise ValueError(f"{name} has more than {MOST_TEXT:,} bytes of text")
    return table


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
    skip: called with a sentence on each file that cannot be read, and on each run that cannot be believed, whose rows
        are left out; None: SchemaError is raised.
    """

    def loaded(path: Path) -> pa.Table:
        try:
            return next(pieces(path, columns))
        except SchemaError as error:
            left_out(str(error), error)
            return nothing

    def left_out(sentence: str, error: SchemaError | None = None) -> None:
        if skip is None:
            raise error or SchemaError(sentence)
        skip(sentence)

    def told(fault: Fault) -> None:
        left_out(str(fault))

    nothing = _nothing(list(dict.fromkeys((*columns, *checks.READ))), TEXTS)
    before: dict[Path, set[str]] = {}
    # half of the time of a file passes outside of Python, so that more threads would wait for each other
    with ThreadPoolExecutor(2) as pool:
        start = 0
        while start < len(paths):
            path, end = paths[start], start + 1
            stored = before.setdefault(path.parent, set())
            if is_part(path):
                try:
                    for table in _of_part(path, columns, stored, told):
                        yield _shaped(table, columns, encoded)
                except SchemaError as error:
                    left_out(str(error), error)
            else:
                while end < len(paths) and end - start < FILES_AT_ONCE and not is_part(paths[end]):
                    end += 1
                some = paths[start:end]
                found = list(pool.map(loaded, some))
                table = checks.believed(pa.concat_tables(found), some, [len(piece) for piece in found], told)
                for path in some:
                    before.setdefault(path.parent, set()).add(path.stem)
                yield _shaped(table, columns, encoded)
            start = end
            watch(start)


def _of_part(path: Path, columns: Sequence[str], before: set[str], told: Callable[[Fault], None]) -> Iterator[pa.Table]:
    """The rows of a part, without those of runs that stand in files before it; its own runs are added to these."""
    own: set[str] = set()
    for table in pieces(path, columns):
        table = checks.believed(table, [path], [len(table)], told)
        ids = set(table["run_id"].unique().to_pylist())
        own |= ids
        if again := ids & before:
            is_again = pc.is_in(table["run_id"].cast(pa.string()), pa.array(again, pa.string()))
            table = table.filter(pc.invert(is_again))
        yield table
    before |= own


def read(
    paths: Sequence[Path], columns: Sequence[str] = SCHEMA.names, skip: Callable[[str], None] | None = None
) -> pd.DataFrame:
    """Columns of the rows of many files as one frame, in file order (`tables`)."""
    import pandas as pd

    found = list(tables(paths, columns, skip=skip))
    return pa.concat_tables(found).to_pandas() if found else pd.DataFrame(columns=list(columns))
