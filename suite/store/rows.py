"""Stored rows, filtered and flat: every setting of a run as a column of its own, named by its dotted key.

`export` and the notebook functions read rows through a `Selection`. It reads the files twice, first only the columns
that the filters and the names of the settings need, so that a fault is known before anything is written, and then some
runs at a time, so that any number of rows needs the memory of a few. `scan`, for `compare`, reads every file once.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from subquad.suite.registry import nearest
from subquad.suite.settings.grid import Filters, iter_keys, lookup
from subquad.suite.store import storage
from subquad.suite.store.documents import settings_in

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = tuple(name for name in storage.SCHEMA.names if name != "config")
"""Columns of a flat row before its settings."""


@lru_cache(maxsize=64)
def settings_of(text: str | None) -> dict[str, Any]:
    """Dotted keys and values of a resolved run, without those that are columns of every row."""
    return {key: value for key, value in iter_keys(settings_in(text)) if key not in COLUMNS}


def _value(row: Mapping[str, Any], config: Mapping[str, Any], key: str) -> Any:
    """The value behind the key of a filter: a column of a row, or else a setting of its run."""
    return row[key] if key in row else lookup(config, key)


def _filters(only: Sequence[str]) -> tuple[Filters, list[str]]:
    """Returns the filters of `--only` and their keys that are columns. Raises ValueError for an unknown column."""
    filters = Filters(only)
    columns = [key for key in filters.wanted if "." not in key and key not in ("data", "plugins")]
    for key in columns:
        if key not in COLUMNS:
            raise ValueError(f"--only {key}: no row has this column{nearest(key, COLUMNS)}; see results/README.md")
    return filters, columns


def _mask(table: pa.Table, filters: Filters, columns: Sequence[str]) -> list[bool]:
    """Returns for each row whether it satisfies every filter."""
    if not filters.wanted:
        return [True] * table.num_rows
    rows = _pythonic(table.select(["config", *columns]))
    return [filters.keep(partial(_value, row, settings_in(row["config"]))) for row in rows]


def _pythonic(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table, of which only some exist as objects of Python at a time."""
    for batch in table.to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


def _check(filters: Filters, paths: Sequence[Path]) -> None:
    """Raises ValueError for a key or a value that no row has. All rows must have been filtered before."""

    def known() -> Iterator[str]:
        yield from COLUMNS
        # a file that cannot be read has been named before
        for table in storage.tables(paths, ["config"], encoded=("config",), skip=lambda reason: None):
            for text in table["config"].unique().to_pylist():
                yield from settings_of(text)

    filters.check(known, "row")


def scan(
    paths: Sequence[Path],
    only: Sequence[str],
    columns: Sequence[str],
    watch: Callable[[int], None] = lambda done: None,
    skip: Callable[[str], None] | None = None,
) -> Iterator[pa.Table]:
    """Yields, some files at a time, columns of the rows that satisfy every filter. Each file is read once.

    A row that says how a run ended satisfies each filter of a metric, split or slice.

    watch: called with the number of files that have been read.
    skip: called with a sentence on each file that cannot be read (`storage.tables`).

    Raises ValueError after the last file for a value of a filter that no row has.
    """
    filters, keys = _filters(only)
    of_runs = _filters([text for text in only if not text.startswith(MEASUREMENT)])
    needed = list(dict.fromkeys((*columns, "config", "metric", *keys)))
    for table in storage.tables(paths, needed, watch=watch, skip=skip):
        if filters.wanted:
            ends = np.flatnonzero(pc.equal(table["metric"], "run").to_numpy())
            mask = np.array(_mask(table, filters, keys), dtype=bool)
            mask[ends] |= np.array(_mask(table.take(ends), *of_runs), dtype=bool)
            table = table.filter(pa.array(mask))
        yield table.select(columns)
    _check(filters, paths)


MEASUREMENT = ("metric=", "split=", "slice=")
"""Beginnings of the filters that select rows of a run, and no runs."""


class Selection:
    """The rows of results files that satisfy every filter, in file order.

    only: `key=value` filters as those of `run --only`, where a key is a column of a row (`metric=accuracy`) or a dotted
        setting of its run (`model.name=gla`). ValueError for a key or a value that no row has.
    runs: the ids of the runs whose rows are wanted; None: all.
    skip: called with a sentence on each file and run that is left out (`storage.tables`).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        only: Sequence[str] = (),
        runs: Collection[str] | None = None,
        skip: Callable[[str], None] | None = None,
    ) -> None:
        self.paths = paths
        # the first reading of the files has named what is left out
        self._skip = None if skip is None else lambda reason: None
        filters, columns = _filters(only)
        settings: dict[str, None] = {}
        self._masks: list[pa.Array] = []
        ids = None if runs is None else pa.array(runs, pa.string())
        # all columns, so that a damaged one is known before anything is written
        for table in storage.tables(paths, encoded=storage.TEXTS, skip=skip):
            mask = pa.array(_mask(table, filters, columns), pa.bool_())
            if ids is not None:
                mask = pc.and_(mask, pc.is_in(table["run_id"], ids).combine_chunks())
            self._masks.append(mask)
            for text in table["config"].filter(mask).unique().to_pylist():
                settings.update(dict.fromkeys(settings_of(text)))
        self.settings = list(settings)
        """Dotted keys of the settings of all selected rows."""
        _check(filters, paths)

    def __len__(self) -> int:
        return sum(mask.true_count for mask in self._masks)

    def _tables(self, encoded: tuple[str, ...] = ()) -> Iterator[pa.Table]:
        """The rows of some runs after those of others, as they are stored."""
        for table, mask in zip(storage.tables(self.paths, encoded=encoded, skip=self._skip), self._masks, strict=True):
            yield table.filter(mask)

    def rows(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The rows one after the other, each as its columns and the settings of its run."""
        for table in self._tables():
            for row in _pythonic(table):
                settings = settings_of(row.pop("config"))
                yield row, settings

    def frame(self) -> pd.DataFrame:
        """All rows, flat. A setting that a run does not have is missing in its rows."""
        import pandas as pd

        tables = list(self._tables(encoded=("config",)))
        if not len(self):
            return pd.DataFrame(columns=COLUMNS)
        frame = pa.concat_tables(tables).unify_dictionaries().to_pandas()
        codes, distinct = pd.factorize(frame.pop("config"), use_na_sentinel=False)
        settings = pd.DataFrame([settings_of(text) for text in distinct]).reindex(columns=self.settings)
        return frame.join(settings.take(codes).set_axis(frame.index))


def write_csv(selection: Selection, file: TextIO) -> None:
    """One line a row; numbers with all their digits, lists as JSON, and nothing where a value is null."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *selection.settings])
    before: dict[str, Any] = {}
    for row, settings in selection.rows():
        if settings is not before:
            # all rows of a run share them
            cells, before = [cell(settings.get(name)) for name in selection.settings], settings
        writer.writerow([*(cell(row[name]) for name in COLUMNS), *cells])


def cell(value: Any) -> Any:
    """A value as it stands in a CSV file."""
    if isinstance(value, str) and value[:1] in FORMULA:
        return f"'{value}"
    return json.dumps(value) if isinstance(value, (bool, list, Mapping)) else value


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins so is a formula to a spreadsheet, which may run it; an apostrophe in front keeps it a text."""


def write_json(selection: Selection, file: TextIO) -> None:
    """A JSON array with one row a line; a row has the settings of its own run only."""
    before = "[\n"
    for row, settings in selection.rows():
        file.write(before + _json(row | settings))
        before = ",\n"
    file.write("\n]\n" if before == ",\n" else "[]\n")


def _json(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, allow_nan=False)
    except ValueError:
        # JSON has no NaN and no infinity
        return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None))
