"""Parts: immutable files with the rows of many runs, which `publish` writes below a folder of results.

There is one part for each folder of an experiment's scale and each call. Its rows are sorted by run, and the rows of a
run keep their order, so that text that repeats from row to row takes hardly any space; sorted by metric, the committed
rows would take a fifth more. A row group has whole runs, and its statistics say which, so one run is read without the
others. A part is named by the hash of its content: the same rows give the same file, and an edited one is refused.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subquad.suite.registry import few
from subquad.suite.store import endings, storage
from subquad.suite.store.checks import KERNELS
from subquad.suite.store.storage import SCHEMA, SchemaError
from subquad.suite.store.target import replacing

ROWS_A_GROUP = 1 << 14
"""A row group ends with the run that reaches so many rows. Its columns of text take about 40 MB while it is read."""
STATISTICS = ["run_id", "metric", "split"]
"""Columns whose least and largest values stand beside each row group."""
UNMARKED = KERNELS
"""The experiment whose files have no row `run`, because a benchmark is no run of a grid."""


@dataclass(frozen=True)
class Part:
    """The runs of one folder that are to be published."""

    folder: Path
    table: pa.Table
    """Their rows, text as codes and a dictionary."""
    run_ids: tuple[str, ...]

    @property
    def experiments(self) -> list[str]:
        """Experiment and scale of the rows, as their folder is named where they are no probes."""
        names = self.table.select(["experiment", "scale"]).group_by(["experiment", "scale"]).aggregate([])
        return [f"{row['experiment']}/{row['scale']}" for row in names.to_pylist()]


def unpublished(source: Path, target: Path) -> tuple[list[Part], int]:
    """The runs below a folder of results that another one lacks, and the number of those that it has.

    The runs of `source/experiment/scale` belong to `target/experiment/scale`.

    Raises ValueError that names the files, and before anything is written, for damaged files, for runs that have not
    ended, and for runs that both folders have with different rows.
    """
    folders: dict[Path, list[Path]] = {}
    for path in storage.files_below(source):
        folders.setdefault(path.parent, []).append(path)
    found, there, faults = [], 0, []
    for folder, paths in folders.items():
        place = target.joinpath(*folder.parts[len(source.parts) :])
        try:
            table = _sorted(storage.tables(paths, encoded=storage.TEXTS))
        except SchemaError as error:
            faults.append(str(error))
            continue
        own = _files_of_runs(paths)
        faults += list(_unfinished(table, own))
        run_ids = table["run_id"].unique().to_pylist()
        stored = _files_of_runs(storage.files_below(place, "*"))
        again = [run_id for run_id in run_ids if run_id in stored]
        for run_id in again:
            rows = table.filter(pc.equal(table["run_id"], run_id))
            if _text(rows) != _text(storage.load(stored[run_id], run_id=run_id)):
                faults.append(
                    f"{own[run_id]} has other rows of the run {run_id} than {stored[run_id]}, which is never edited; "
                    "remove the first, or publish to another folder (--results)"
                )
        there += len(again)
        if new := tuple(run_id for run_id in run_ids if run_id not in stored):
            is_new = pc.is_in(table["run_id"].cast(pa.string()), pa.array(new))
            found.append(Part(place, table.filter(is_new), new))
    if faults:
        raise ValueError("; ".join(faults[:5]) + f"; and {len(faults) - 5} more" * (len(faults) > 5))
    return found, there


def of_runs(paths: Sequence[Path], run_ids: Collection[str], folder: Path) -> Part:
    """The rows of some runs in results files, as a part of a folder. SchemaError for a file that cannot be believed."""
    table = _sorted(storage.tables(paths, encoded=storage.TEXTS))
    table = table.filter(pc.is_in(table["run_id"].cast(pa.string()), pa.array(run_ids, pa.string())))
    return Part(folder, table, tuple(table["run_id"].unique().to_pylist()))


def _sorted(tables: Iterator[pa.Table]) -> pa.Table:
    table = pa.concat_tables(tables)
    # sorting is stable
    return table.take(pc.sort_indices(table["run_id"].cast(pa.string())))


def _unfinished(table: pa.Table, files: Mapping[str, Path]) -> Iterator[str]:
    """A sentence on the runs that have not ended, or will be repeated by the next call of `run`."""
    ended = table.filter(pc.equal(table["metric"], "run"))
    good = set(ended.filter(pc.not_equal(ended["status"], "failed"))["run_id"].unique().to_pylist())
    marked = table.filter(pc.not_equal(table["experiment"], UNMARKED))
    bad = [run_id for run_id in marked["run_id"].unique().to_pylist() if run_id not in good]
    if bad:
        names = few(list(dict.fromkeys(str(files[run_id]) for run_id in bad)))
        yield f"{names}: {len(bad)} runs failed or have not ended; repeat them with `run`, or move their files away"


def _files_of_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run id to the file that counts, the first one."""
    return {run_id: path for path in reversed(paths) for run_id in endings.runs_of(path)}


def _text(rows: pa.Table) -> str:
    """The rows as text, in which a NaN equals a NaN."""
    return repr(rows.to_pylist())


def write(part: Part) -> Path:
    """Writes a part, whole or not at all, and returns its path."""
    content = _content(part.table)
    path = part.folder / storage.part_name(content)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _content(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer,
        SCHEMA,
        compression="zstd",
        compression_level=12,
        write_statistics=STATISTICS,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for start, end in _groups(table["run_id"].cast(pa.string()).to_pylist()):
            writer.write_table(table.slice(start, end - start).cast(SCHEMA), row_group_size=end - start)
    return buffer.getvalue()


def _groups(run_ids: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The first row of each row group of sorted rows, and the one behind its last."""
    start = 0
    for place in range(1, len(run_ids) + 1):
        is_end = place == len(run_ids) or (place - start >= ROWS_A_GROUP and run_ids[place] != run_ids[place - 1])
        if is_end:
            yield start, place
            start = place
