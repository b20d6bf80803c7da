"""Selects, from stored rows, the runs that a report shows.

`load_runs` groups rows into runs, `on_grid` keeps those that the grid asks for, `one_device` those of one device,
`select_best` those with the best value of `select.best_of`, and `settle` those of one setting in each cell. A note
under the table counts the runs that are left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from suite.identity import setting_of
from suite.metrics import smaller_is_better
from suite.registry import counted
from suite.settings.grid import lookup, same
from suite.settings.report_spec import Select
from suite.store import storage


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
        """table: the columns of READ. Runs are numbered in the order of their ids."""
        (runs, self.run_ids), (metrics, self._metrics) = _codes(table["run_id"]), _codes(table["metric"])
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
        """Where the rows of each run begin, and where those of the last one end."""
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
    operators: str | None
    """JSON: version and backend of every operator that the run used; None where a row has no record of them."""

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

    def setting(self, without: Iterable[str] = ()) -> str:
        """The run's settings as text, without what `setting_of` leaves out."""
        return setting_of(self.config, without)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


HEAD = (
    *("status", "error", "scale", "seed", "stand_in", "config", "device", "torch", "precision", "commit", "dirty"),
    *("started_at", "operators"),
)
"""Columns of which a report reads one row a run."""
READ = ("run_id", "experiment", "metric", "split", "slice", "step", "unit", "value", "samples", *HEAD)
"""Columns of the rows that `load_runs` and `reports.render.report.build` need."""


def rows_of(paths: Sequence[Path], skip: Callable[[str], None] | None = None) -> pa.Table:
    """The rows of results files, for `load_runs`. Text is encoded, because it repeats from row to row.

    skip: called with a sentence on each file that cannot be read, whose rows are left out; None: it is an error.
    """
    found = [
        table.unify_dictionaries().combine_chunks()
        for table in storage.tables(paths, READ, encoded=storage.TEXTS, skip=skip)
    ]
    return pa.concat_tables(found) if found else storage.SCHEMA.empty_table().select(READ)


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


def _stored_run(run_id: str, head: Mapping[str, Any], values: Values, *, is_ended: bool) -> StoredRun:
    """head: the row that says how the run ended, or else its first."""
    return StoredRun(
        run_id=run_id,
        scale=_text(head["scale"]),
        seed=int(_number(head["seed"]) or 0),
        status=_text(head["status"]) if is_ended else "failed",
        error=_text(head["error"]) if is_ended else "no final row",
        stand_in=_text(head["stand_in"]),
        config=json.loads(_text(head["config"]) or "{}"),
        values=values,
        device=_text(head["device"]),
        torch=_text(head["torch"]),
        precision=_text(head["precision"]),
        commit=_text(head["commit"])[:10] + ("-dirty" if head["dirty"] is True or head["dirty"] == 1 else ""),
        started_at=_text(head["started_at"]),
        operators=_text(head["operators"]) or None,
    )


def slice_part(name: str, key: str) -> float | str | None:
    """The value of one key of a slice name, as a number where it is one: 512 for `length` of `length=512,width=64`.

    None where the name does not have the key.
    """
    parts = dict(part.partition("=")[::2] for part in name.split(",") if part)
    if key not in parts:
        return None
    try:
        number = float(parts[key])
    except ValueError:
        return parts[key]
    return int(number) if number.is_integer() else number


def matches(selector: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a resolved run has every value that a selector names.

    Keys without a dot (`slice`, `metric`, `split`) name a measurement and no setting of the run, so they are skipped.
    """
    return all(same(value, lookup(config, key)) for key, value in selector.items() if "." in key)


def keys_of(point: Mapping[str, Any]) -> Iterator[str]:
    """Dotted keys that a run must share with a point of the grid: all but the folder of the data."""
    return (key for key in point if key != "task.data")


class GridPoints:
    """Tells whether a resolved run is a point of a grid, for thousands of runs and points.

    A set of points is an integer with a bit for each. Every value that points state under a key is compared with the
    run once, however many points state it.
    """

    def __init__(self, points: Sequence[Mapping[str, Any]]) -> None:
        self.all = (1 << len(points)) - 1
        self.stated: dict[str, dict[str, tuple[Any, int]]] = {}
        """Key to the text of each value, to the value and the points that state it."""
        for i, point in enumerate(points):
            for key in keys_of(point):
                values = self.stated.setdefault(key, {})
                value, found = values.get(repr(point[key]), (point[key], 0))
                values[repr(value)] = value, found | 1 << i

    def __call__(self, config: Mapping[str, Any]) -> bool:
        return bool(self._matching(config))

    def place(self, config: Mapping[str, Any]) -> int:
        """Index of the first point that a resolved run is; -1 where it is none."""
        found = self._matching(config)
        return (found & -found).bit_length() - 1

    def _matching(self, config: Mapping[str, Any]) -> int:
        """The points that a resolved run is, a bit for each."""
        left = self.all
        for key, values in self.stated.items():
            found = lookup(config, key)
            for value, stating in values.values():
                if left & stating and not same(value, found):
                    left &= ~stating
        return left


def on_grid(runs: Sequence[StoredRun], points: Sequence[Mapping[str, Any]]) -> tuple[list[StoredRun], list[str]]:
    """The runs that are points of the grid, and a note for each kind of the others.

    Only values that the grid states are compared. A run whose setting was changed with `--set`, where the grid leaves
    that setting at its default, counts as a point of the grid here; `settle` separates it.
    """
    kept = []
    strange: dict[str, int] = {}
    is_point = GridPoints(points)
    for run in runs:
        if is_point(run.config):
            kept.append(run)
            continue
        missed = [[key for key in keys_of(point) if not same(point[key], lookup(run.config, key))] for point in points]
        text = ", ".join(f"{key}: {lookup(run.config, key)}" for key in min(missed, key=len))
        strange[text] = strange.get(text, 0) + 1
    notes = [
        f"left out: {counted(count)} with {text}, which no point of this grid has"
        for text, count in sorted(strange.items())
    ]
    return kept, notes


def one_device(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], int]:
    """The runs of the device that the newest run used, and how many runs are of others.

    Times of different devices are never compared.
    """
    if not runs:
        return [], 0
    return _of_device(runs, max(runs, key=lambda run: (run.started_at, run.run_id)).device)


def commonest_device(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], int]:
    """The runs of the device that most runs used, of two the newer one, and how many runs are of others."""
    if not runs:
        return [], 0
    times: dict[str, list[str]] = {}
    for run in runs:
        times.setdefault(run.device, []).append(run.started_at)
    return _of_device(runs, max(times, key=lambda device: (len(times[device]), max(times[device]), device)))


def _of_device(runs: Sequence[StoredRun], device: str) -> tuple[list[StoredRun], int]:
    kept = [run for run in runs if run.device == device]
    return kept, len(runs) - len(kept)


def score(run: StoredRun, select: Select) -> float | None:
    """The number that a run is selected by (`Select.score`); None for a run that did not end well."""
    chosen = _evaluation(run, select)
    return None if chosen is None else chosen[1]


def _evaluation(run: StoredRun, select: Select) -> tuple[int, float] | None:
    """Step and score of the evaluation that a run is selected by; None for a run that did not end well."""
    if run.status != "ok":
        return None
    return select.evaluation(run.values.points(select.by, select.split, ""), lookup(run.config, "train.keep"))


@dataclass(frozen=True)
class Tried:
    """The values of `select.best_of` that were tried in the setting of a chosen run."""

    compared: int
    """Number of values that were compared."""
    lacks_earlier: bool
    """Whether a value before the chosen one in the grid was not compared, because some of its runs are missing."""


def select_best(
    runs: Sequence[StoredRun], select: Select | None, points: Sequence[Mapping[str, Any]]
) -> tuple[list[StoredRun], dict[str, Tried]]:
    """The runs with the best value of `select.best_of`, among runs that differ only in it and in the seed.

    The best value has the largest mean score over seeds, and `Select` says which one of equal values is taken. A value
    with fewer failed runs is preferred, so that the surviving seeds of a setting that mostly diverges do not win.

    points: all points of the grid, in its order.

    Returns the runs, and run id to the values that were compared.
    """
    if select is None:
        return list(runs), {}
    groups: dict[str, dict[str, list[StoredRun]]] = {}
    for run in runs:
        groups.setdefault(run.setting(without=select.best_of), {}).setdefault(run.setting(), []).append(run)
    grid = GridPoints(points)
    siblings = _siblings(points, select.best_of)
    kept: list[StoredRun] = []
    tried: dict[str, Tried] = {}
    for values in groups.values():
        places = {found[0].run_id: grid.place(found[0].config) for found in values.values()}
        candidates = sorted(values.values(), key=lambda found: places[found[0].run_id])
        if select.enough is not None:
            # `run` may have stopped a value after some of its seeds, which must not win by one lucky seed
            most = max(map(len, candidates))
            candidates = [found for found in candidates if len(found) == most]
        best = _best(candidates, select)
        kept += best
        chosen = places[best[0].run_id]
        compared = {places[found[0].run_id] for found in candidates}
        earlier = {place for place in siblings[chosen] if place < chosen}
        found = Tried(len(candidates), lacks_earlier=not earlier <= compared)
        tried.update({run.run_id: found for run in best})
    return sorted(kept, key=lambda run: run.run_id), tried


def _siblings(points: Sequence[Mapping[str, Any]], keys: Collection[str]) -> list[list[int]]:
    """For each point, the indices of the points that differ from it only in these keys, in order, its own included."""
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    found = []
    for index, point in enumerate(points):
        rest = frozenset((key, repr(value)) for key, value in point.items() if key not in keys)
        found.append(groups.setdefault(rest, []))
        found[-1].append(index)
    return found


def _best(candidates: Sequence[list[StoredRun]], select: Select) -> list[StoredRun]:
    """The runs of the best value of `select.best_of`, from those of every value in the order of the grid."""
    for found in candidates:
        # `run` may have skipped the values after this one, so they must not count
        if all(select.suffices(score(run, select)) for run in found):
            return found
    merits = [_merit(found, select) for found in candidates]
    tied = [found for found, merit in zip(candidates, merits, strict=True) if merit == max(merits)]
    losses = [loss for found in tied if (loss := _loss(found, select)) is not None]
    return tied[losses.index(min(losses))] if len(losses) == len(tied) else tied[0]


def _merit(runs: Sequence[StoredRun], select: Select) -> tuple[int, float]:
    """Number of failures, negative, and mean score of the runs of one value; more is better."""
    scores = [score(run, select) for run in runs]
    good = [s for s in scores if s is not None]
    return len(good) - len(scores), statistics.fmean(good) if good else -math.inf


def _loss(runs: Sequence[StoredRun], select: Select) -> float | None:
    """Mean loss of the evaluations that runs are selected by; None where one of them has no loss."""
    steps = [(run, chosen[0]) for run in runs if (chosen := _evaluation(run, select)) is not None]
    found = [run.find("loss", select.split, step=step) for run, step in steps]
    losses = [value.value for value in found if value is not None and value.value is not None]
    return statistics.fmean(losses) if losses and len(losses) == len(steps) else None


Planned = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the resolved settings of the runs that a grid has today."""


def settle(runs: Sequence[StoredRun], without: Collection[str] = (), planned: Planned = tuple) -> list[StoredRun]:
    """The runs of the one setting that a cell shows, or of the settings that differ only in the dotted keys `without`.

    A setting with real data is preferred to one with stand-in data, then one that the grid has today (`planned`) to
    one that was made with `--set` or before a default changed, and then the setting with the newest run. Runs of
    different settings must not be averaged.
    """
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.setting(without), []).append(run)
    if len(groups) < 2:
        return list(runs)
    # the data are part of a setting, and need not be here
    hidden = ("data", *without)
    today = {setting_of(config, hidden) for config in planned()}
    chosen = max(
        groups,
        key=lambda s: (
            not groups[s][0].stand_in,
            groups[s][0].setting(hidden) in today,
            max(run.started_at for run in groups[s]),
            s,
        ),
    )
    return groups[chosen]
