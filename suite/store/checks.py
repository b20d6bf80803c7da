"""Checks rows whenever they are read: their numbers, their JSON, and whether a run is where and what it says it is.

A table is checked column by column, and the settings of a run once, so that 800,000 rows of 8,000 runs take two
seconds. What fails is a run and not a row: a run of which a part cannot be believed is left out as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from subquad.suite.identity import identity
from subquad.suite.metrics import FINITE, LARGEST, Domain, domain_of, value_fault
from subquad.suite.store.documents import STATUSES, operators_in, settings_in, verdict_in

PART = "part-"
"""Beginning of the name of a file with many runs, which is no beginning of a run id."""
KERNELS = "kernels"
"""The experiment of `bench`. Its files are no runs of a grid: their ids are no hashes of settings, and every row has
a `config` of its own."""
BY_HAND = (KERNELS, "sweep")
"""Experiment and scale of what was written by hand while a kernel was tuned. Some of these times are differences of
rounded times, which may be zero or less."""
EVALUATIONS = "evaluate"
"""The experiment of `evaluate`, whose metrics are those of lm-evaluation-harness, whatever their names."""
PROBES = "probes"
"""A folder with this name has rows of other experiments below it (results/README.md)."""

OF_A_RUN = (
    *("scale", "seed", "config", "operators", "model", "model_version", "task", "task_version", "device", "threads"),
    *("precision", "stand_in", "started_at"),
)
"""Columns that have one value in all rows of a run."""
TEXTS = (
    *("run_id", "experiment", "scale", "task", "model", "slice", "metric", "unit", "status", "config", "operators"),
    *("device", "precision", "stand_in", "started_at"),
)
WHOLE = ("task_version", "model_version", "seed", "step", "threads")
READ = (*TEXTS, *WHOLE, "value", "samples", "duration_s")
"""The columns that are checked."""
NULL = np.iinfo(np.int32).min
"""Stands for null among the numbers of a column."""

CASE = re.compile(r"[^=,]+=[^=,]*(,[^=,]+=[^=,]*)*")
"""The slice of a benchmark."""


@dataclass(frozen=True)
class Fault:
    """Why the rows of a run in one file are not believed."""

    path: Path
    run_id: str
    reason: str

    def __str__(self) -> str:
        run = f"run {self.run_id[:40]}: " if self.path.name.startswith(PART) else ""
        return f"{self.path}: {run}{self.reason}"


class _Rows:
    """The checked columns of a table as arrays."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.texts = {name: codes(table[name]) for name in TEXTS}
        self.numbers = {name: table[name].combine_chunks().fill_null(NULL).to_numpy() for name in WHOLE}
        self.values = table["value"].to_numpy()
        self.is_valued = table["value"].is_valid().to_numpy()
        self.durations = table["duration_s"].to_numpy()

    @property
    def by_hand(self) -> np.ndarray:
        """A mask of the rows that were written by hand."""
        return self.has("experiment", BY_HAND[0]) & self.has("scale", BY_HAND[1])

    def column(self, name: str) -> np.ndarray:
        """A column as numbers that are equal where its values are."""
        return self.texts[name][0] if name in self.texts else self.numbers[name]

    def text(self, name: str, row: int) -> str:
        """The text of a row, empty for null."""
        numbers, words = self.texts[name]
        return words[numbers[row]]

    def has(self, name: str, word: str) -> np.ndarray:
        """A mask of the rows with this text."""
        numbers, words = self.texts[name]
        return numbers == words.index(word) if word in words else np.zeros(len(numbers), bool)


def codes(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """A column of text as numbers of its texts, where null is an empty text."""
    column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    words = array.dictionary.to_pylist()
    if "" not in words:
        words.append("")
    return array.indices.fill_null(words.index("")).to_numpy(zero_copy_only=False), words


def believed(table: pa.Table, paths: Sequence[Path], counts: Sequence[int], told: Callable[[Fault], None]) -> pa.Table:
    """The rows of the runs of a table that can be believed, with null in place of NaN where a row says why.

    table: rows with at least the columns READ, of several files in the order of `paths`.
    counts: the number of rows of each file.
    told: called with every run that cannot be believed.
    """
    if not table.num_rows:
        return table
    rows = _Rows(table)
    places = np.repeat(np.arange(len(paths)), counts)
    ids = rows.column("run_id")
    _, first, group = np.unique(
        places * len(rows.texts["run_id"][1]) + ids.astype(np.int64), return_index=True, return_inverse=True
    )
    faults: dict[int, str] = {}
    for number, row in enumerate(first.tolist()):
        try:
            _check_run(rows, row, paths[places[row]])
        except ValueError as error:
            faults[number] = str(error)
    lost = np.zeros(table.num_rows, bool)
    for bad, reason in _faulty_rows(rows, first, group, lost):
        for row in np.flatnonzero(bad).tolist():
            number = int(group[row])
            if number not in faults:
                faults[number] = reason(row)
    if faults:
        kept = ~np.isin(group, list(faults))
        # a fault in the file of one run concerns all rows of that file
        whole: set[int] = set()
        for number, reason_of_run in faults.items():
            row = int(first[number])
            path = paths[places[row]]
            if places[row] in whole:
                continue
            if not path.name.startswith(PART):
                whole.add(places[row])
            told(Fault(path, rows.text("run_id", row), reason_of_run))
        kept &= ~np.isin(places, list(whole))
        table, lost = table.filter(pa.array(kept)), lost[kept]
    if lost.any():
        table = _without_values(table, lost)
    return table


def check_numbers(table: pa.Table) -> None:
    """Raises ValueError for the first unit, value or sample of the rows of one run that its metric cannot have."""
    rows, group = _Rows(table), np.zeros(table.num_rows, np.int64)
    is_any = rows.has("experiment", EVALUATIONS) | rows.by_hand
    for bad, reason in (_faulty_units(rows, is_any), *_faulty_numbers(rows, group, is_any, np.zeros(len(group), bool))):
        if bad.any():
            raise ValueError(reason(int(bad.argmax())))


def _without_values(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """The table with null in the values and samples of some rows."""
    mask = pa.array(rows)
    for name in ("value", "samples"):
        column = table[name].combine_chunks()
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pc.if_else(mask, None, column))
    return table


def _check_run(rows: _Rows, row: int, path: Path) -> None:
    """Raises ValueError where a run is not at its place, or where its settings are not its own. row: its first."""
    run_id, experiment, scale = (rows.text(name, row) for name in ("run_id", "experiment", "scale"))
    check_file(path, run_id, experiment, scale)
    if experiment == KERNELS:
        return
    try:
        settings = settings_in(rows.text("config", row))
    except ValueError as error:
        raise ValueError(f"config: {error}") from None
    if (found := identity(settings)) != run_id:
        raise ValueError(f"its settings are those of the run {found}")
    _check_columns(rows, row, settings)


def check_file(path: Path, run_id: str, experiment: str, scale: str) -> None:
    """Raises ValueError where a file is none of this run, or in the folder of another experiment or scale."""
    if not run_id or not experiment or not scale:
        raise ValueError("its rows do not say which run they are of")
    if not path.name.startswith(PART) and path.stem != run_id:
        raise ValueError(f"its rows are those of the run {run_id[:40]}")
    wanted = (*experiment.split("/"), scale)
    # a folder may be the place of an experiment by the name of a link to it, or by its own
    for folder in (path.parent.absolute, path.parent.resolve):
        parts = str(folder()).replace("\\", "/").split("/")
        if tuple(parts[-len(wanted) :]) == wanted or PROBES in parts:
            return
    raise ValueError(f"its rows are of {experiment[:80]}, scale {scale[:40]}, which is not its folder")


def _check_columns(rows: _Rows, row: int, settings: dict[str, Any]) -> None:
    """Raises ValueError where columns of a run contradict its settings."""
    bench = settings.get("bench")
    told: dict[str, Any] = {}
    for section in ("task", "model"):
        if section in settings:
            told |= {section: settings[section]["name"], f"{section}_version": settings[section].get("version")}
    if bench is not None:
        told |= {"task": bench["op"], "model": bench["implementation"]}
    if "seed" in settings:
        told["seed"] = settings["seed"]
    for name, value in told.items():
        stored = rows.text(name, row) if name in TEXTS else rows.table[name][row].as_py()
        if stored != value:
            raise ValueError(f"{name} is {stored!r:.40} in its rows and {value!r:.40} in its settings")


Reason = Callable[[int], str]
Faulty = tuple[np.ndarray, Reason]
"""A mask of rows that cannot be believed, and a function from such a row to the reason."""


def _faulty_rows(rows: _Rows, first: np.ndarray, group: np.ndarray, lost: np.ndarray) -> Iterator[Faulty]:
    """Everything that is checked of single rows.

    first, group: the first row of each run, and the number of the run of each row.
    lost: is set at the rows of which the value is left out and the rest believed.
    """
    is_kernel, is_evaluation = rows.has("experiment", KERNELS), rows.has("experiment", EVALUATIONS)
    for name in ("experiment", *OF_A_RUN):
        column = rows.column(name)
        bad = column != column[first][group]
        if name not in ("experiment", "scale"):
            bad &= ~is_kernel
        if name in ("task", "task_version"):
            # an evaluation has rows of several tasks
            bad &= ~is_evaluation
        yield bad, partial(_several, name)
    yield rows.has("metric", ""), lambda row: "a row has no metric"
    is_status = np.logical_or.reduce([rows.has("status", status) for status in STATUSES])
    yield ~is_status, lambda row: f"the status {rows.text('status', row)[:20]!r} is unknown"
    steps = rows.numbers["step"]
    yield (steps < 0) & (steps != NULL), lambda row: f"step is {steps[row]}"
    threads = rows.numbers["threads"]
    yield (threads < 1) & (threads != NULL), lambda row: f"threads is {threads[row]}"
    times = rows.durations
    yield ~(np.isnan(times) | ((times >= 0) & (times <= LARGEST))), lambda row: f"duration_s is {times[row]:g}"
    by_hand = rows.by_hand
    yield _faulty_units(rows, is_evaluation)
    yield from _faulty_numbers(rows, group, is_evaluation | by_hand, lost)
    yield _unreadable(rows, "operators", np.ones_like(is_kernel), operators_in)
    yield _unreadable(rows, "config", is_kernel, settings_in)
    is_ratio = is_kernel & rows.has("metric", "ratio")
    yield _unreadable(rows, "config", is_ratio & rows.is_valued, verdict_in)
    yield _unreadable(rows, "slice", is_kernel & ~by_hand & (is_ratio | rows.has("metric", "time")), _check_case)


def _several(name: str, row: int) -> str:
    del row
    return f"its rows have several values of {name}"


def _faulty_units(rows: _Rows, is_any: np.ndarray) -> Faulty:
    """Rows with another unit than that of their metric. is_any: rows of which the metric is not known."""
    (metrics, names), (units, words) = rows.texts["metric"], rows.texts["unit"]
    pairs, pair = np.unique(metrics.astype(np.int64) * len(words) + units, return_inverse=True)
    wanted = [
        (domain_of(names[metric]).unit, words[unit]) for metric, unit in zip(*np.divmod(pairs, len(words)), strict=True)
    ]
    is_wrong = np.array([unit not in (None, found) for unit, found in wanted], bool)

    def reason(row: int) -> str:
        metric = rows.text("metric", row)
        return f"{metric} has the unit {rows.text('unit', row)[:20]!r}, not {domain_of(metric).unit!r}"

    return is_wrong[pair] & ~is_any, reason


def _faulty_numbers(rows: _Rows, group: np.ndarray, is_any: np.ndarray, lost: np.ndarray) -> Iterator[Faulty]:
    """Values and samples that a metric cannot have. is_any: rows of which the metric is not known."""
    metrics, names = rows.texts["metric"]
    domains = [domain_of(name) for name in names]
    least = np.where(is_any, FINITE.least, np.array([domain.least for domain in domains])[metrics])
    most = np.where(is_any, FINITE.most, np.array([domain.most for domain in domains])[metrics])
    whole = np.array([domain.is_whole for domain in domains])[metrics] & ~is_any
    # a run that diverged may have stored a loss that is not finite, before or beside the row that says so
    ended_badly = rows.has("metric", "run") & ~rows.has("status", "ok") & ~rows.has("status", "n/a")
    may_lack = ~rows.has("status", "ok") | np.isin(group, group[ended_badly])

    values = rows.values
    is_number = np.abs(values) <= LARGEST
    lost |= may_lack & rows.is_valued & ~is_number
    bad = rows.is_valued & ~((values >= least) & (values <= most) & ~(whole & (values != np.floor(values))))

    is_ok, has_none = rows.has("status", "ok"), np.array([domain.least > domain.most for domain in domains])[metrics]
    missing = is_ok & ~rows.is_valued & ~has_none & ~is_any & ~rows.table["samples"].is_valid().to_numpy()
    yield missing, lambda row: f"{rows.text('metric', row)} has no value, though its status is ok"

    samples = rows.table["samples"].combine_chunks()
    parents = pc.list_parent_indices(samples).to_numpy()
    flat = pc.list_flatten(samples).to_numpy(zero_copy_only=False).astype(float)
    lost[parents[may_lack[parents] & ~(np.abs(flat) <= LARGEST)]] = True
    outside = np.zeros_like(bad)
    outside[parents[~((flat >= least[parents]) & (flat <= most[parents]))]] = True

    def domain(row: int) -> tuple[str, Domain]:
        name = rows.text("metric", row)
        return name, FINITE if is_any[row] else domain_of(name)

    def of_value(row: int) -> str:
        return value_fault(*domain(row), values[row])

    def of_sample(row: int) -> str:
        found = (
            number for number in rows.table["samples"][row].as_py() if number is None or not domain(row)[1].has(number)
        )
        return value_fault(
            *domain(row), None, [next((math.nan if number is None else number for number in found), 0.0)]
        )

    yield bad & ~lost, of_value
    yield outside & ~lost, of_sample


def _unreadable(rows: _Rows, name: str, chosen: np.ndarray, read: Callable[[str], Any]) -> Faulty:
    """Those of the chosen rows whose text cannot be read. Each text is read once."""
    numbers, words = rows.texts[name]
    reasons = {}
    for number in np.unique(numbers[chosen]).tolist():
        try:
            read(words[number])
        except ValueError as error:
            reasons[number] = str(error)
    return chosen & np.isin(numbers, list(reasons)), lambda row: f"{name}: {reasons[numbers[row]]}"


def _check_case(text: str) -> None:
    if not CASE.fullmatch(text) or "pass=" not in text:
        raise ValueError(f"{text[:60]!r} names no case of a benchmark")
