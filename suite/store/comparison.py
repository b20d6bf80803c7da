"""Compares two sets of stored rows, measurement by measurement.

Runs belong together that have the same settings. Left out of that comparison are the seed, the versions of task and
model, the identity of plugins and the folder of the data: these are what changes from one revision to another.

Accuracies and other qualities are compared by an exact permutation test on the difference of the means: p is the share
of all ways to deal out the values of both sides (n and m seeds) to groups of n and m whose difference is at least as
large. It assumes no distribution, which matters because seeds of these tasks succeed or fail as a whole. Values of one
seed on both sides are not paired: pairs would allow only 2^n outcomes, so five seeds could never reach p = 0.05.

Speeds and memory have no seeds. Their ratio counts by the rule of `bench --compare`: from 3 % on, and from three times
the noise of the samples on. They are compared only where both sides have one device, and the same one.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from subquad.suite.metrics import smaller_is_better
from subquad.suite.store.noise import error_of_median, limit
from subquad.suite.store.rows import scan, settings_of

ALPHA = 0.05
MOST_SPLITS = 50_000
"""More ways to deal out the values than that are drawn at random, with a fixed seed."""

SPEED_UNITS = frozenset({"s", "ms", "us", "tokens/s", "steps/s", "bytes/s", "flop/s", "bytes", "MiB"})
"""Units of what depends on the device."""
SMALLER_UNITS = frozenset({"s", "ms", "us", "bytes", "MiB", "nats", "bits", "sd"})
"""A value in one of these units is better where it is smaller."""
SPEEDS = frozenset(
    {
        *("time", "train_throughput", "inference_throughput", "decode_throughput", "generate_throughput"),
        *("decode_time", "prefill_time", "peak_memory"),
    }
)
"""Metrics of speed and memory that are compared unless a filter names others."""

Verdict = Literal["better", "worse", "differs", "same", "seeds lost", "too few seeds", "identical"]
"""`differs`: of a metric whose name and unit do not say whether a smaller value is the better one. `seeds lost`: some
runs of a side ended with an error, and those that are left may be the lucky ones."""


class Measure(NamedTuple):
    """A measurement of the runs of one setting, which is compared between two sides."""

    experiment: str
    scale: str
    task: str
    model: str
    settings: str
    """The settings as JSON, without those that may differ between two sides."""
    metric: str
    split: str
    slice: str
    unit: str
    device: str
    """The device of a speed; empty for a quality, which is compared across devices."""


class Value(NamedTuple):
    """One run's value of a measure."""

    seed: int
    value: float
    samples: tuple[float, ...]
    started_at: str
    step: int


@dataclass
class Rows:
    """The measurements of one side."""

    values: dict[Measure, dict[int, Value]] = field(default_factory=dict)
    """Measure to seed to the last value of the newest run."""
    failed: int = 0
    """Runs that ended with an error."""
    lost: dict[Measure, set[int]] = field(default_factory=dict)
    """Setting (a measure without metric, split, slice, unit and device) to the seeds of runs that did."""
    facts: dict[str, Counter[str]] = field(default_factory=dict)
    """Fact of the machine or the tree to its values, each with the number of its runs."""


FACTS = ("commit", "device", "torch", "triton", "threads", "task_version", "model_version")


COLUMNS = (
    *("run_id", "experiment", "scale", "task", "model", "seed", "split", "slice", "step", "metric", "unit", "value"),
    *("samples", "status", "config", "started_at", *FACTS),
)
"""Columns that `collect` reads."""


def collect(
    paths: Sequence[Path],
    only: Sequence[str] = (),
    *,
    every_metric: bool,
    watch: Callable[[int], None] = lambda done: None,
    skip: Callable[[str], None] | None = None,
) -> Rows:
    """Returns the measurements in results files.

    only: filters of the rows, as those of `suite.store.rows.Selection`.
    every_metric: take all metrics that the rows have, not only the qualities of the test split and SPEEDS.
    watch: called with the number of files that have been read.
    skip: called with a sentence on each file that cannot be read (`suite.store.storage.tables`).
    """
    found = Rows()
    runs: set[str] = set()
    for table in scan(paths, only, COLUMNS, watch, skip):
        known_as = ["run_id", *FACTS]
        for run in table.group_by(known_as, use_threads=False).aggregate([]).to_pylist():
            if run["run_id"] not in runs:
                runs.add(run["run_id"])
                for name in FACTS:
                    found.facts.setdefault(name, Counter())[str(run[name] or "")] += 1
        is_run = pc.equal(table["metric"], "run")
        for row in table.filter(pc.and_(is_run, pc.invert(_among(table, "status", ["ok", "n/a"])))).to_pylist():
            found.failed += 1
            found.lost.setdefault(_setting(_measure(row, _settings(row["config"]))), set()).add(row["seed"] or 0)
        # most rows are not compared, and to make objects of Python from all of them takes most of the time
        wanted = pc.and_(pc.equal(table["status"], "ok"), pc.and_(pc.is_valid(table["value"]), pc.invert(is_run)))
        table = table.filter(wanted if every_metric else pc.and_(wanted, _is_default(table)))
        before = text = ""
        for row in table.to_pylist():
            if not text or row["config"] != before:
                before, text = row["config"], _settings(row["config"])
            value = Value(
                row["seed"] or 0,
                row["value"],
                tuple(row["samples"] or ()),
                row["started_at"] or "",
                row["step"] or 0,
            )
            seeds = found.values.setdefault(_measure(row, text), {})
            known = seeds.get(value.seed)
            if known is None or (known.started_at, known.step) <= (value.started_at, value.step):
                seeds[value.seed] = value
    return found


def _is_default(table: pa.Table) -> pa.Array:
    """Returns a mask of the rows that are compared where no filter names a metric, split or slice."""

    is_whole = pc.or_kleene(pc.is_null(table["slice"]), _among(table, "slice", [""]))
    is_quality = pc.and_(_among(table, "split", ["test", "generated"]), is_whole)
    is_quality = pc.and_(is_quality, pc.invert(_among(table, "unit", ["ratio"])))
    return pc.if_else(_among(table, "unit", SPEED_UNITS), _among(table, "metric", SPEEDS), is_quality)


def _among(table: pa.Table, column: str, values: Iterable[str]) -> pa.Array:
    return pc.is_in(table[column], pa.array(values, pa.string()))


def _setting(measure: Measure) -> Measure:
    return measure._replace(metric="", split="", slice="", unit="", device="")


def _settings(text: str | None) -> str:
    """Returns the settings of a run as JSON, without versions, folders of data and plugins, which may differ."""
    kept = {
        key: value
        for key, value in settings_of(text).items()
        if key not in ("task.version", "model.version", "task.data") and not key.startswith("plugins.")
    }
    return json.dumps(kept, sort_keys=True)


def _measure(row: Mapping[str, Any], settings: str) -> Measure:
    device = ""
    if row["unit"] in SPEED_UNITS or '"train.budget.seconds"' in settings:
        device = row["device"] or "an unknown device"
        # the speed of a processor is that of its threads
        device += f", {row['threads']} threads" if " cores)" in device else ""
    names = {name: row[name] or "" for name in Measure._fields if name not in ("settings", "device")}
    return Measure(**names, settings=settings, device=device)


@dataclass(frozen=True)
class Line:
    """The values of a measure on both sides."""

    measure: Measure
    a: dict[int, Value]
    b: dict[int, Value]
    lost: int = 0
    """Seeds of either side that have no value, because their runs ended with an error."""

    @property
    def is_speed(self) -> bool:
        return self.measure.unit in SPEED_UNITS

    @property
    def means(self) -> tuple[float, float]:
        a, b = (statistics.fmean(value.value for value in side.values()) for side in (self.a, self.b))
        return a, b

    @property
    def is_identical(self) -> bool:
        a, b = ({seed: value.value for seed, value in side.items()} for side in (self.a, self.b))
        return a == b

    @property
    def smallest_p(self) -> float:
        """The smallest p that so many seeds can give."""
        return smallest_p(len(self.a), len(self.b))

    @property
    def p(self) -> float | None:
        """The p of the permutation test; None for speeds."""
        if self.is_speed:
            return None
        a, b = ([value.value for value in side.values()] for side in (self.a, self.b))
        return permutation_p(a, b)

    @property
    def noise(self) -> float:
        """Relative noise of the ratio of two speeds, from the samples of all runs of each side."""
        return math.hypot(*(_noise(side.values()) for side in (self.a, self.b)))

    @property
    def verdict(self) -> Verdict:
        """The verdict on B against A."""
        if self.is_identical:
            return "identical"
        a, b = self.means
        lower = _is_better_smaller(self.measure)
        direction: Verdict = "differs" if lower is None else "better" if (b < a) == lower else "worse"
        if self.is_speed:
            if min(a, b) <= 0:
                return "same" if a == b else direction
            return direction if max(a / b, b / a) > limit(self.noise) else "same"
        if self.lost:
            return "seeds lost"
        if self.smallest_p > ALPHA:
            return "too few seeds"
        return direction if (self.p or 0.0) <= ALPHA else "same"


def _is_better_smaller(measure: Measure) -> bool | None:
    if measure.unit in SMALLER_UNITS:
        return True
    if measure.unit.endswith("/s"):
        return False
    return smaller_is_better(measure.metric)


def _noise(values: Iterable[Value]) -> float:
    """Relative standard error of a side's speed: that within the runs' samples, or between runs if it is larger.

    Between runs it is that of the mean, because the ratio is one of means, which a single slow run can move.
    """
    values = list(values)
    middle = statistics.fmean(value.value for value in values)
    if middle <= 0:
        return 0.0
    within = max((error_of_median(value.samples) / middle for value in values if len(value.samples) > 1), default=0.0)
    spread = statistics.stdev(value.value for value in values) if len(values) > 1 else 0.0
    between = spread / math.sqrt(len(values)) / middle
    return max(within, between)


@lru_cache(maxsize=8)
def _splits(total: int, n: int) -> np.ndarray:
    """The first of two parts of `total` values, of n values each, [splits, n]: all ways to deal them out, or some.

    An interval asks for the same ones sixty times.
    """
    if math.comb(total, n) <= MOST_SPLITS:
        return np.array(list(itertools.combinations(range(total), n)))
    random = np.random.default_rng(0)
    return random.permuted(np.tile(np.arange(total), (MOST_SPLITS, 1)), axis=1)[:, :n]


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """p of the two-sided permutation test on the difference of the means, exact for up to MOST_SPLITS splits."""
    pooled = np.array([*a, *b], dtype=float)
    n, total = len(a), len(pooled)
    observed = abs(pooled[:n].mean() - pooled[n:].mean())
    # sums of the same numbers in another order differ by rounding
    least = observed - 1e-12 * float(np.abs(pooled).max())
    exact = math.comb(total, n) <= MOST_SPLITS
    sums = pooled[_splits(total, n)].sum(axis=1)
    differences = np.abs(sums / n - (pooled.sum() - sums) / (total - n))
    hits = int((differences >= least).sum())
    return hits / len(differences) if exact else (1 + hits) / (1 + len(differences))


def smallest_p(n: int, m: int) -> float:
    """The smallest p that the permutation test can give for n and m values: 0.1 for three each, 0.029 for four."""
    return (2 if n == m else 1) / math.comb(n + m, n)


def holm(ps: Sequence[float]) -> list[float]:
    """Every p corrected for their number (Holm 1979): with the k-th smallest of n multiplied by n - k + 1, and no
    corrected p smaller than that of a smaller one. To call those that are at most 0.05 different errs in any of them
    with probability 0.05 at most."""
    found = [0.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        found[index] = largest
    return found


@dataclass(frozen=True)
class Comparison:
    """Everything that two sides have in common, and what cannot be compared."""

    lines: list[Line]
    other_devices: list[tuple[set[str], set[str]]]
    """Devices of A and of B for every speed that both have, but on no device in common."""
    only_a: int
    only_b: int
    """Measures that one side has alone."""

    @cached_property
    def tested(self) -> list[Line]:
        """Lines whose seeds suffice for the test and whose values differ."""
        apart = [line for line in self.lines if not (line.is_speed or line.is_identical or line.lost)]
        return [line for line in apart if line.smallest_p <= ALPHA]

    @cached_property
    def corrected(self) -> dict[Measure, float]:
        """p of the tested lines, corrected for their number."""
        return dict(zip((x.measure for x in self.tested), holm([x.p or 0.0 for x in self.tested]), strict=True))


def compare(a: Rows, b: Rows) -> Comparison:
    """Holds the measures that both sides have against each other, in the order of A."""

    def lost(measure: Measure) -> int:
        return sum(len(side.lost.get(_setting(measure), set()) - side.values[measure].keys()) for side in (a, b))

    lines = [Line(one, values, b.values[one], lost(one)) for one, values in a.values.items() if one in b.values]
    devices: tuple[dict[Measure, set[str]], dict[Measure, set[str]]] = {}, {}
    for found, side in zip(devices, (a, b), strict=True):
        for measure in side.values:
            found.setdefault(measure._replace(device=""), set()).add(measure.device)
    both = devices[0].keys() & devices[1].keys()
    pairs = [(devices[0][measure], devices[1][measure]) for measure in devices[0] if measure in both]
    apart = [pair for pair in pairs if not pair[0] & pair[1]]
    return Comparison(lines, apart, len(devices[0]) - len(both), len(devices[1]) - len(both))


def labels(measures: Sequence[Measure]) -> dict[Measure, str]:
    """Labels that tell the measures of an experiment apart: task, model, and the settings in which they differ."""
    alike: dict[tuple[str, ...], list[Measure]] = {}
    for one in measures:
        alike.setdefault((one.experiment, one.scale, one.task, one.model), []).append(one)
    found = {}
    for group in alike.values():
        parts = {text: json.loads(text) for text in {one.settings for one in group}}
        keys = sorted({key for part in parts.values() for key in part})
        varying = [key for key in keys if len({json.dumps(part.get(key)) for part in parts.values()}) > 1]
        for one in group:
            part = parts[one.settings]
            changes = [f"{key.partition('.')[2] or key}={_short(part[key])}" for key in varying if key in part]
            found[one] = " ".join([f"{one.model} on {one.task}" if one.model and one.task else one.model, *changes])
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
