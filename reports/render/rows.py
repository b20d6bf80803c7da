"""Reads stored rows into runs: how each ended, its resolved settings, and its measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from subquad.suite.identity import setting_of
from subquad.suite.metrics import SPENT, smaller_is_better
from subquad.suite.options import visible
from subquad.suite.settings.grid import lookup
from subquad.suite.store import storage
from subquad.suite.store.documents import settings_in


class Value(NamedTuple):
    """One stored measurement of a run."""

    metric: str
    split: str
    slice: str
    unit: str
    step: int
    value: float | None
    samples: tuple[float, ...]
    status: str


class Columns:
    """The measurements of many runs, as one array a column, sorted by run and by what was measured.

    A run that trains has hundreds of them, of which a report reads a few; so objects are made of these alone.
    """

    def __init__(self, table: pa.Table) -> None:
        """table: the columns of READ. Runs are numbered in the order of their ids, and of their scales."""
        (ids, known), (scales, at) = _codes(table["run_id"]), _codes(table["scale"])
        # two scales may have one run, whose rows are then stored at each of them
        runs, self.run_ids = ids * len(at) + scales, [run_id for run_id in known for _ in at]
        metrics, self._metrics = _codes(table["metric"])
        (splits, self._splits), (slices, self._slices) = _codes(table["split"]), _codes(table["slice"])
        joined = (metrics * len(self._splits) + splits) * len(self._slices) + slices
        # metrics have the highest digits of the keys, so the keys of a metric follow each other
        names, keys = np.unique(joined, return_inverse=True)
        names, parts = np.divmod(names, len(self._slices))
        self._names = [
            (self._metrics[name // len(self._splits)], self._splits[name % len(self._splits)], self._slices[part])
            for name, part in zip(names.tolist(), parts.tolist(), strict=True)
        ]
        self._key = {name: key for key, name in enumerate(self._names)}
        self._of_metric: dict[str, tuple[int, int]] = {}
        for key, (metric, _, _) in enumerate(self._names):
            self._of_metric[metric] = self._of_metric.get(metric, (key, key))[0], key + 1
        # stable, so that the measurements of a key keep the order of their rows
        order = np.lexsort((keys, runs))
        self._keys = keys[order].astype(np.int32)
        self._places = order.astype(np.int32)
        self.starts = np.searchsorted(runs[order], np.arange(len(self.run_ids) + 1)).tolist()
        """The index at which the rows of each run begin, and at last the one behind all rows."""
        units, self._unit_names = _codes(table["unit"])
        status, self._status_names = _codes(table["status"])
        self._units, self._status = units[order].astype(np.int16), status[order].astype(np.int16)
        # NaN stands for a null among values
        self._steps = table["step"].combine_chunks().fill_null(0).to_numpy()[order]
        self._values = table["value"].to_numpy()[order]
        samples = table["samples"].combine_chunks()
        self._samples, self._offsets = samples.values.to_numpy(zero_copy_only=False), samples.offsets.to_numpy()

    def of(self, run: int, metric: str, split: str, slice_name: str) -> range:
        """The rows of a run with a metric on a split, or on a slice of it, in the order in which they were stored."""
        key = self._key.get((metric, split, slice_name))
        return range(0) if key is None else self._range(run, key, key + 1)

    def of_metric(self, run: int, metric: str | None) -> list[int]:
        """All rows of a run with a metric, or, for None, all of its rows, in the order in which they were stored."""
        low, high = (0, len(self._names)) if metric is None else self._of_metric.get(metric, (0, 0))
        rows = self._range(run, low, high)
        return [rows[i] for i in np.argsort(self._places[rows.start : rows.stop]).tolist()]

    def points(self, rows: range) -> list[tuple[int, float | None]]:
        """Step and value of rows."""
        steps, values = (column[rows.start : rows.stop].tolist() for column in (self._steps, self._values))
        return [(step, None if math.isnan(value) else value) for step, value in zip(steps, values, strict=True)]

    def last(self, run: int, metric: str) -> int | None:
        """The place, among all rows of the table, of the last row of a run that has this metric."""
        rows = self._range(run, *self._of_metric.get(metric, (0, 0)))
        return int(self._places[rows.start : rows.stop].max()) if rows else None

    def first(self, run: int) -> int:
        """The place, among all rows of the table, of the first row of a run."""
        return int(self._places[self.starts[run] : self.starts[run + 1]].min())

    def _range(self, run: int, low: int, high: int) -> range:
        """The rows of a run whose keys are at least `low` and less than `high`."""
        start = self.starts[run]
        keys = self._keys[start : self.starts[run + 1]]
        low, high = keys.searchsorted(np.array((low, high), np.int32)).tolist()
        return range(start + low, start + high)

    def value(self, row: int) -> Value:
        """The measurement of a row."""
        metric, split, slice_name = self._names[self._keys[row]]
        place = int(self._places[row])
        samples = self._samples[self._offsets[place] : self._offsets[place + 1]]
        return Value(
            metric=metric,
            split=split,
            slice=slice_name,
            unit=self._unit_names[self._units[row]],
            step=int(self._steps[row]),
            value=_number(self._values[row]),
            samples=tuple(samples.tolist()),
            status=self._status_names[self._status[row]],
        )


def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """A column of text as numbers of its sorted distinct texts; null is an empty text."""
    column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    texts = [text or "" for text in array.dictionary.to_pylist()]
    distinct = sorted({"", *texts})
    places = {text: place for place, text in enumerate(distinct)}
    number = np.array([*(places[text] for text in texts), places[""]], dtype=np.int64)
    codes = array.indices.fill_null(len(texts)).to_numpy()
    return number[codes], distinct


class Values:
    """The measurements of one run."""

    def __init__(self, columns: Columns, run: int) -> None:
        self._columns, self._run = columns, run

    def __iter__(self) -> Iterator[Value]:
        return map(self._columns.value, self._columns.of_metric(self._run, None))

    def of(self, metric: str, split: str, slice_name: str) -> list[Value]:
        """The measurements of a metric on a split, or on a slice of it."""
        return [self._columns.value(row) for row in self._columns.of(self._run, metric, split, slice_name)]

    def of_metric(self, metric: str) -> list[Value]:
        """All measurements of a metric."""
        return [self._columns.value(row) for row in self._columns.of_metric(self._run, metric)]

    def points(self, metric: str, split: str, slice_name: str) -> list[tuple[int, float | None]]:
        """Step and value of the measurements of a metric on a split, or on a slice of it."""
        return self._columns.points(self._columns.of(self._run, metric, split, slice_name))

    def at(self, place: int, metric: str, split: str, slice_name: str) -> Value:
        """The measurement at this place among `points`."""
        return self._columns.value(self._columns.of(self._run, metric, split, slice_name)[place])


FACTORS = {
    "state_size": 4 / 1024,
    "num_parameters": 1e-3,
    "peak_memory": 2.0**-30,
    "train_flops": 1e-15,
    "train_seconds": 1 / 60,
    "train_throughput": 1e-3,
    "train_tokens": 1e-6,
}
"""Metric to the factor by which its values are shown: KiB of numbers in fp32, thousands of parameters, GiB, 10^15
operations, minutes, thousands of tokens a second, millions of tokens. The label of the cost says so."""


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run: how it ended, its resolved configuration and its measurements."""

    run_id: str
    scale: str
    seed: int
    status: str
    error: str
    stand_in: str
    config: dict[str, Any]
    values: Values
    device: str
    torch: str
    precision: str
    commit: str
    started_at: str
    seconds: float | None
    """The duration of the run; None where its rows do not give it."""
    operators: str | None
    """JSON: version and backend of every operator that the run used; None where a row has no record of them."""

    @property
    def processor(self) -> str:
        """The name of the device, without how many runs shared it."""
        return re.sub(r", \d+ runs at a time$", "", self.device)

    def find(
        self, metric: str, split: str = "", slice_name: str = "", *, best: bool = False, step: int | None = None
    ) -> Value | None:
        """The last measurement of that name, or the best one, or that after `step` steps; or None."""
        name = metric, split, slice_name
        found = [
            (place, at, value) for place, (at, value) in enumerate(self.values.points(*name)) if step in (None, at)
        ]
        measured = [(place, value) for place, _, value in found if value is not None]
        if best and measured:
            sign = -1.0 if smaller_is_better(metric) else 1.0
            return self.values.at(max(measured, key=lambda point: sign * point[1])[0], *name)
        return self.values.at(max(found, key=lambda point: point[1])[0], *name) if found else None

    def costs(self, metric: str) -> list[float]:
        """All values of a metric, times its factor; of one that adds up over the training, the last."""
        found = self.values.of_metric(metric)
        if metric in SPENT:
            found = sorted(found, key=lambda value: value.step)[-1:]
        return [FACTORS.get(metric, 1.0) * value.value for value in found if value.value is not None]

    def setting(self, without: Iterable[str] = ()) -> str:
        """The run's settings as text, without what `setting_of` leaves out."""
        return setting_of(self.config, without)


def days_of(runs: Iterable[StoredRun]) -> str:
    """The days on which runs began, `2026-03-01` or `2026-03-01 to 2026-03-04`; "" where no run says it."""
    days = sorted({run.started_at[:10] for run in runs if run.started_at})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


HEAD = (
    *("status", "error", "scale", "seed", "stand_in", "config", "device", "torch", "precision", "commit", "dirty"),
    *("started_at", "duration_s", "operators"),
)
"""Columns of which a report reads one row a run."""
READ = ("run_id", "experiment", "metric", "split", "slice", "step", "unit", "value", "samples", *HEAD)
"""Columns of the rows that `load_runs` and `reports.render.report.build` need."""


def rows_of(paths: Sequence[Path], skip: Callable[[str], None] | None = None) -> pa.Table:
    """The rows of results files, for `load_runs`. Text is encoded, because it repeats from row to row.

    skip: called with a sentence on each file that cannot be read, whose rows are left out; None: it is an error.
    """
    found = [
        _visible(table.unify_dictionaries().combine_chunks())
        for table in storage.tables(paths, READ, encoded=storage.TEXTS, skip=skip)
    ]
    return pa.concat_tables(found) if found else storage.SCHEMA.empty_table().select(READ)


def _visible(table: pa.Table) -> pa.Table:
    """The table without characters that would steer a terminal, which rows of others may have in any text."""
    for i, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not pa.types.is_dictionary(column.type):
            continue
        for chunk in column.chunks:
            words = chunk.dictionary.to_pylist()
            if any(word and not word.isprintable() for word in words):
                shown = pa.array([word and visible(word) for word in words], chunk.dictionary.type)
                table = table.set_column(
                    i, name, pa.DictionaryArray.from_arrays(chunk.indices, shown).cast(column.type)
                )
    return table


def _config(text: str) -> Any:
    """Settings of a row. JSON writes a character that steers a terminal as a code, so it is looked for behind it."""
    found = settings_in(text)
    return _visible_tree(found) if "\\u" in text else found


def _visible_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {visible(key): _visible_tree(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_visible_tree(part) for part in value]
    return visible(value) if isinstance(value, str) else value


def as_rows(frame: pa.Table | pd.DataFrame) -> pa.Table:
    """The rows of a frame (`suite.store.storage.read`), as `rows_of` gives them."""
    if isinstance(frame, pa.Table):
        return frame
    schema = pa.schema([storage.SCHEMA.field(name) for name in READ])
    return pa.Table.from_pandas(frame[list(READ)], schema, preserve_index=False)


def load_runs(rows: pa.Table | pd.DataFrame) -> list[StoredRun]:
    """The runs of stored rows, in the order of their ids."""
    rows = as_rows(rows)
    columns = Columns(rows)
    present = [run for run in range(len(columns.run_ids)) if columns.starts[run] < columns.starts[run + 1]]
    # the row `run` says how the run ended; a run without one was interrupted
    ended = [columns.last(run, "run") for run in present]
    places = [columns.first(run) if place is None else place for run, place in zip(present, ended, strict=True)]
    heads = rows.select(HEAD).take(pa.array(places, pa.int64())).to_pylist()
    return [
        _stored_run(columns.run_ids[run], head, Values(columns, run), is_ended=place is not None)
        for run, head, place in zip(present, heads, ended, strict=True)
    ]


GENERATED = "pictures generated here"
"""Why data stand in for the paper's in rows of Pathfinder and Path-X from before the task said so."""


def _is_generated(config: Mapping[str, Any]) -> bool:
    """Whether a run read pictures that were generated in place of those of a release."""
    return lookup(config, "task.pictures") == "generated"


def _stored_run(run_id: str, head: Mapping[str, Any], values: Values, *, is_ended: bool) -> StoredRun:
    """head: the row that says how the run ended, or else its first."""
    config = _config(_text(head["config"]))
    return StoredRun(
        run_id=run_id,
        scale=_text(head["scale"]),
        seed=int(_number(head["seed"]) or 0),
        status=_text(head["status"]) if is_ended else "failed",
        error=_text(head["error"]) if is_ended else "no final row",
        stand_in=_text(head["stand_in"]) or (GENERATED if _is_generated(config) else ""),
        config=config,
        values=values,
        device=_text(head["device"]),
        torch=_text(head["torch"]),
        precision=_text(head["precision"]),
        commit=_text(head["commit"])[:10] + ("-dirty" if head["dirty"] is True or head["dirty"] == 1 else ""),
        started_at=_text(head["started_at"]),
        seconds=_number(head["duration_s"]),
        operators=_text(head["operators"]) or None,
    )
