"""The cells of a report, ours over seeds beside the paper's value, with a verdict; and successes by setting.

A cell shows the best of several values of a setting, such as the learning rate. Recurrent models recall in a narrow
window of learning rates (arXiv 2508.19029), so `sensitivities` counts the successes at every value that was tried.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from subquad.reports.render.document import (
    EDGE,
    EPOCH_ON_TEST,
    FEW_SEEDS,
    MIXED,
    NOISY,
    REDUCED,
    SELECTED,
    SELECTED_ON_TEST,
    STAND_IN,
    shown,
    unit_shown,
)
from subquad.reports.render.plan import Plan, Published
from subquad.reports.render.rows import StoredRun, Value
from subquad.reports.render.selection import Tried, runs_by_cell, score, validates_on_test
from subquad.suite.bench.cases import spread
from subquad.suite.metrics import smaller_is_better
from subquad.suite.settings.grid import lookup, order
from subquad.suite.settings.report_spec import TableSpec
from subquad.suite.store.documents import operator_mix

Verdict = Literal[
    "", "agrees", "unclear", "unstable", "better", "worse", "differs", "at chance", "other device", "other protocol"
]
"""The last three say why a cell is not judged."""

FEWEST_SEEDS = 3
"""Cells with fewer seeds are marked, and counted apart."""
LARGE_SPREAD = 0.05
"""Timings with a larger spread are marked."""
DEVICE_UNITS = ("us", "ms", "s", "minutes", "hours", "steps/s", "tokens/s", "K tokens/s", "MiB", "GiB")
"""Units of times, speeds and memory, which belong to the device on which they were measured."""
OUTRIGHT = 5
"""A seed that is worse than the paper by more than this many tolerances has failed outright."""


@dataclass(frozen=True)
class Cell:
    """One row and column of the paper's table and what we have for it, in the shown unit."""

    row: str
    column: str
    published: Published | None = None
    mean: float | None = None
    sd: float | None = None
    """Sample standard deviation over seeds; None where there is one seed."""
    values: tuple[float, ...] = ()
    """The values behind the mean, in the order of their seeds."""
    median: float | None = None
    successes: int | None = None
    """Seeds within the tolerance of the paper's value, or better than it; None where there is no such value."""
    spread: float | None = None
    """Half the distance between the quartiles of the raw samples of a single run, over their median."""
    num_seeds: int = 0
    """Seeds that gave a value."""
    planned: int = 0
    """Seeds that the grid asks for; 0 in a row that only the paper has."""
    failures: tuple[tuple[str, int], ...] = ()
    """Status and count of the runs that gave no value, e.g. (`diverged`, 1)."""
    marks: tuple[str, ...] = ()
    difference: float | None = None
    verdict: Verdict = ""
    last: float | None = None
    """The mean at the last epoch, where the best epoch was chosen on the test rows."""
    unit: str = ""
    """The unit in which the mean is shown."""
    chosen: str = ""
    """The values of `select.best_of`, e.g. `train.lr=0.001 (best of 4)`."""
    mixed: str = ""
    """Operators and devices of the runs behind the mean if they differ; empty if they are the same."""
    run_ids: tuple[str, ...] = ()

    @property
    def lost(self) -> int:
        """Number of runs that gave no value. Those that did may be the lucky ones."""
        return sum(count for _, count in self.failures)

    @property
    def few_seeds(self) -> bool:
        """Whether the mean is of fewer seeds than a judgement should rest on. A timing has samples, and no seeds."""
        return FEW_SEEDS in self.marks

    def decimals(self, most: int) -> int:
        """Decimals to print, at most these: the last digit of a timing is the first of half its interquartile range.

        0.2851 with a spread of 10 % has two decimals. One digit other than zero stays, whatever the spread.
        """
        if not self.spread or not self.mean:
            return most
        return min(most, -math.floor(math.log10(min(self.spread, 1) * abs(self.mean))))

    @property
    def missing(self) -> bool:
        """Whether the grid asks for this cell and no run of it has ended."""
        return bool(self.planned) and self.mean is None and not self.failures


def make_cell(plan: Plan, row: str, column: str, runs: Sequence[StoredRun], tried: Mapping[str, Tried]) -> Cell:
    """The cell of one row and column.

    runs: the runs of one setting that belong here (`selection.settle`).
    tried: run id to the values of `select.best_of` that were compared (`selection.select_best`).
    """
    published = plan.published.get((row, column))
    if row not in plan.spec.rows or plan.is_speedup(column) or (plan.cannot_run and not runs):
        return Cell(row, column, published)
    ordered = sorted(runs, key=lambda run: (run.seed, run.run_id))
    measured = [(run, measurement(plan.spec, column, run, row)) for run in ordered]
    seeds = _seeds(plan, row, column, measured)
    values, ends = seeds.values, seeds.failures
    samples = [value.samples for _, value in measured if value is not None]
    stand_in = any(run.stand_in for run in runs)
    chosen = _chosen(plan, row, column, runs, tried) if values or ends else ""
    chosen_on_test = bool(chosen) and _by_test(plan, runs)
    epoch_on_test = bool(values) and _best_epoch_of_test(plan, column, runs)
    mixed = _mixed(seeds.runs, alike=not plan.spec.mean_over)
    width = spread(samples[0]) if len(samples) == len(values) == 1 else None
    applies = {
        REDUCED: plan.reduced and bool(runs),
        FEW_SEEDS: 0 < len(values) < FEWEST_SEEDS and not plan.config.timed,
        STAND_IN: stand_in,
        MIXED: bool(mixed),
        SELECTED: bool(chosen) and not chosen_on_test,
        SELECTED_ON_TEST: chosen_on_test,
        EPOCH_ON_TEST: epoch_on_test,
        EDGE: bool(chosen) and any(tried[run.run_id].at_edge for run in runs),
        NOISY: width is not None and width > LARGE_SPREAD,
    }
    cell = Cell(
        row=row,
        column=column,
        published=None if stand_in else published,
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        values=tuple(values),
        median=statistics.median(values) if values else None,
        spread=width,
        num_seeds=len(values),
        planned=max(plan.num_seeds, seeds.num_started),
        failures=tuple((end, ends.count(end)) for end in sorted(set(ends))),
        marks=tuple(mark for mark, used in applies.items() if used),
        last=_last_epoch(plan, column, runs) if epoch_on_test else None,
        unit=unit_shown({value.unit for _, value in measured if value is not None}, plan.spec.percent),
        chosen=chosen,
        mixed=mixed,
        run_ids=tuple(run.run_id for run in ordered),
    )
    return _compared(plan, cell, ordered[0].device if ordered else "")


def _mixed(runs: Sequence[StoredRun], *, alike: bool) -> str:
    """The operators and the devices of runs that are averaged, where they differ."""
    devices = sorted({run.processor for run in runs})
    words = f"on {' and '.join(devices)}" if len(devices) > 1 else ""
    operators = operator_mix(({"operators": run.operators} for run in runs), alike=alike)
    return "; ".join(filter(None, (operators, words)))


def _by_test(plan: Plan, runs: Sequence[StoredRun]) -> bool:
    """Whether the rows by which `select` chose are those of the test."""
    select = plan.config.select
    if select is None or select.split == "train":
        return False
    return select.split == "test" or any(validates_on_test(run.config) for run in runs)


def _best_epoch_of_test(plan: Plan, column: str, runs: Sequence[StoredRun]) -> bool:
    """Whether a column shows the epoch of a run that is best on its test rows."""
    split, on_test = plan.spec.of(column, "split"), any(validates_on_test(run.config) for run in runs)
    if plan.spec.columns[column].get("at") == "best":
        return split == "test" or (split == "valid" and on_test)
    return split == "test" and on_test and any(lookup(run.config, "train.keep") == "best" for run in runs)


def _last_epoch(plan: Plan, column: str, runs: Sequence[StoredRun]) -> float | None:
    """Mean of the last evaluations of the test rows; None where a run has none of what the column shows."""
    metric, part = plan.spec.of(column, "metric"), plan.spec.columns[column].get("slice", "")
    # validation rows that are the test rows are measured after every epoch
    found = [run.find(metric, "valid" if validates_on_test(run.config) else "test", part) for run in runs]
    numbers = [shown(v.value, v.unit, plan.spec.percent) for v in found if v is not None and v.value is not None]
    return statistics.fmean(numbers) if numbers and len(numbers) == len(runs) else None


def speedups(plan: Plan, cells: Sequence[Cell]) -> list[Cell]:
    """The cells, those of columns with `speedup_over` filled: the ratio of a row to another, within one device.

    A ratio is above one where the row is faster than the other, whichever of time and throughput is measured.
    """
    found = {(cell.row, cell.column): cell for cell in cells}
    return [_speedup(plan, cell, found) if plan.is_speedup(cell.column) else cell for cell in cells]


def _speedup(plan: Plan, cell: Cell, found: Mapping[tuple[str, str], Cell]) -> Cell:
    over, take = (plan.spec.columns[cell.column][key] for key in ("speedup_over", "take"))
    columns = [column for column in plan.spec.columns if not plan.is_speedup(column)]
    pairs = [(found[cell.row, column], found[over, column]) for column in columns if cell.row in plan.spec.rows]
    if cell.row == over or not any(ours.planned for ours, _ in pairs):
        return cell
    ratios = []
    for column, (ours, theirs) in zip(columns, pairs, strict=True):
        if ours.mean and theirs.mean:
            faster_if_smaller = smaller_is_better(plan.spec.of(column, "metric"))
            ratios.append(theirs.mean / ours.mean if faster_if_smaller else ours.mean / theirs.mean)
    if len(ratios) < len(columns):
        return replace(cell, planned=1)
    value = max(ratios) if take == "max" else statistics.fmean(ratios)
    run_ids = dict.fromkeys(run_id for pair in pairs for part in pair for run_id in part.run_ids)
    noisy = any(NOISY in part.marks for pair in pairs for part in pair)
    marks = tuple(mark for mark, used in ((REDUCED, plan.reduced), (NOISY, noisy)) if used)
    filled = replace(cell, mean=value, values=(value,), median=value, num_seeds=1, planned=1, unit="x", marks=marks)
    return _compared(plan, replace(filled, run_ids=tuple(run_ids)), "")


@dataclass(frozen=True)
class _Seeds:
    """The seeds of a cell gave these values and failures. In a timing, each run is counted as a seed."""

    values: list[float]
    """One for each seed whose runs have all been measured."""
    runs: list[StoredRun]
    """The runs behind the values."""
    failures: list[str]
    """Statuses of the seeds that gave no value because one of their runs ended with an error."""
    num_started: int
    """Seeds that have a run."""


def _seeds(plan: Plan, row: str, column: str, measured: Sequence[tuple[StoredRun, Value | None]]) -> _Seeds:
    """Returns the values of a cell, each of a single run or, with `table.mean_over`, the mean over all settings.

    measured: the runs of the cell, ordered by their seeds, with the measurement that the column shows.
    """
    together = [[pair] for pair in measured]
    num_settings = 1
    if plan.spec.mean_over:
        together = [list(pairs) for _, pairs in groupby(measured, key=lambda pair: pair[0].seed)]
        num_settings = plan.num_settings(row, column)
    found = _Seeds([], [], [], num_started=len(together))
    for pairs in together:
        numbers = [shown(v.value, v.unit, plan.spec.percent) for _, v in pairs if v is not None and v.value is not None]
        bad = [end for end in (_ending(run, value) for run, value in pairs) if end not in ("", "ok")]
        if bad:
            found.failures.append(bad[0])
        elif len(numbers) == len(pairs) and len({plan.setting(run.config) for run, _ in pairs}) >= num_settings:
            found.values.append(statistics.fmean(numbers))
            found.runs.extend(run for run, _ in pairs)
    return found


def _compared(plan: Plan, cell: Cell, device: str) -> Cell:
    """Adds to a cell how its values compare with that of the paper, where it has both and they can be compared."""
    published = cell.published
    if cell.mean is None or published is None or published.value is None:
        return cell
    if plan.spec.protocol:
        return replace(cell, verdict="other protocol")
    if of_another_device(published, device):
        return replace(cell, verdict="other device")
    tolerance, failures = plan.spec.of(cell.column, "tolerance"), dict(cell.failures)
    # a run that ran out of memory or was interrupted says nothing about its seed; one that diverged does
    diverged = failures.pop("diverged", 0)
    verdict: Verdict = ""
    if not plan.reduced and not failures:
        at_chance = is_at_chance(published, plan.spec.of(cell.column, "chance"), tolerance)
        verdict = "at chance" if at_chance else judge(cell.values, published, tolerance, diverged=diverged)
    return replace(
        cell,
        difference=cell.mean - published.value,
        successes=sum(shortfall(value, published) <= tolerance + ROUNDING for value in cell.values),
        verdict=verdict,
    )


def of_another_device(published: Published, device: str) -> bool:
    """Whether a published time, speed or memory is not of our device; it is of another one where it names none."""
    words = [word for word in published.hardware.split() if not re.fullmatch(r"\d+x", word)]
    return published.unit in DEVICE_UNITS and not (words and all(word in device for word in words))


def is_at_chance(published: Published, chance: float | None, tolerance: float) -> bool:
    """Whether a published number is better than a guess by no more than the tolerance."""
    if chance is None or published.value is None:
        return False
    return shortfall(chance, published) <= tolerance + ROUNDING


def measurement(spec: TableSpec, column: str, run: StoredRun, row: str = "") -> Value | None:
    """The measurement of a run that a column shows, in any row or in one of the table; None where the run has none."""
    name = spec.of(column, "metric"), spec.of(column, "split"), spec.part(row, column)
    return run.find(*name, best=spec.columns[column].get("at") == "best")


def _ending(run: StoredRun, value: Value | None) -> str:
    """Status of a run's measurement: `ok`, a failure, or empty if nothing was measured."""
    if run.status != "ok":
        return run.status
    if value is None:
        return ""
    if value.value is None:
        return value.status if value.status != "ok" else "failed"
    return "ok"


ROUNDING = 1e-9
"""A difference of exactly the tolerance must not hang on its last bit."""


def shortfall(value: float, published: Published) -> float:
    """By how much a value is worse than the paper's; negative where it is better.

    Where the paper says of neither direction that it is better (`better` in expected.csv), any distance counts.
    """
    assert published.value is not None
    difference = value - published.value
    return {"higher": -difference, "lower": difference}.get(published.better, abs(difference))


def judge(values: Sequence[float], published: Published, tolerance: float, *, diverged: int = 0) -> Verdict:
    """The verdict on the seeds of a cell, which more variance cannot soften.

    A seed fails outright where its run diverged or it is worse than the paper by more than `OUTRIGHT` tolerances. Then
    the cell is `unstable` if another seed meets the paper, and else `worse` (or `differs`). Without such a seed, mean
    or median decides, whichever is farther from the paper: `agrees` within the tolerance, `unclear` within two standard
    errors of the mean but at most twice the tolerance, else `better` or `worse`.
    """
    assert published.value is not None
    behind = [shortfall(value, published) for value in values]
    if diverged or max(behind) > OUTRIGHT * tolerance + ROUNDING:
        if min(behind) <= tolerance + ROUNDING:
            return "unstable"
        return "worse" if published.better else "differs"
    target = published.value
    centre = max(statistics.fmean(values), statistics.median(values), key=lambda x: abs(x - target))
    distance = abs(centre - target)
    if distance <= tolerance + ROUNDING:
        return "agrees"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    if distance <= min(2 * error, 2 * tolerance):
        return "unclear"
    if not published.better:
        return "differs"
    return "worse" if shortfall(centre, published) > 0 else "better"


def _chosen(plan: Plan, row: str, column: str, runs: Sequence[StoredRun], tried: Mapping[str, Tried]) -> str:
    """The chosen values of a cell, and of how many they are the best: `train.lr=0.001 (best of 2 of 4)`."""
    select = plan.config.select
    if select is None or not runs:
        return ""
    values = plan.num_values(row, column)
    if values == 1 and all(tried[run.run_id].compared == 1 for run in runs):
        # a single value is not the best of several
        return ""

    def may_change(run: StoredRun) -> bool:
        """Whether another value may be shown once its runs are there; no value after one that is good enough is."""
        found = tried[run.run_id]
        return found.lacks_earlier if select.suffices(score(run, select)) else found.compared < values

    missing = {plan.setting(run.config) for run in runs if may_change(run)}
    if plan.spec.mean_over:
        counts = sorted({tried[run.run_id].compared for run in runs})
        best = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        lack = f", values missing in {len(missing)}" if missing else ""
        return f"{', '.join(select.best_of)} (best of {best} in every setting{lack})"
    chosen = ", ".join(f"{key}={lookup(runs[0].config, key)}" for key in select.best_of)
    return f"{chosen} (best of {tried[runs[0].run_id].compared}{f' of {values}' if missing else ''})"


@dataclass(frozen=True)
class Sensitivity:
    """The runs of one cell at all values of `select.best_of`."""

    row: str
    column: str
    tried: tuple[tuple[Any, int, int], ...]
    """(value, successes, runs), in ascending order; a value of several settings is a tuple, and a list is its text."""
    medians: tuple[float, ...]
    """Median of the cell's number at each of these values, in the shown unit; a run without a number counts as 0, or as
    infinity where smaller is better."""

    @property
    def rate(self) -> tuple[int, int]:
        """Successes and runs over all values."""
        return sum(found[1] for found in self.tried), sum(found[2] for found in self.tried)

    @property
    def window(self) -> str:
        """The longest stretch of neighbouring values at which at least half of the runs succeed; `none` without one.

        `or less` and `or more` say that it reaches the smallest or the largest value that was tried, if there are more.
        Words have no neighbours: where one was tried, as `null` is, it is all values at which half of the runs succeed.
        """
        stretches = _stretches([2 * successes >= runs for _, successes, runs in self.tried])
        if not stretches:
            return "none"
        first, last = max(stretches, key=lambda ends: ends[1] - ends[0])
        low, high = self.tried[first][0], self.tried[last][0]
        if len(self.tried) == 1:
            return f"{setting_text(low)} (no other was tried)"
        if not all(_is_number(value) for value, _, _ in self.tried):
            return ", ".join(setting_text(value) for value, successes, runs in self.tried if 2 * successes >= runs)
        below, above = " or less" * (first == 0), " or more" * (last == len(self.tried) - 1)
        if low == high:
            return setting_text(low) + below + above
        span = f"{setting_text(low)}{below} to {setting_text(high)}{above}"
        if not isinstance(low, (int, float)) or low <= 0:
            return span
        return f"{span} ({high / low:.3g} times)"


def _stretches(working: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last index of every stretch of neighbours that are true."""
    starts = [i for i, works in enumerate(working) if works and (i == 0 or not working[i - 1])]
    ends = [i for i, works in enumerate(working) if works and (i == len(working) - 1 or not working[i + 1])]
    return list(zip(starts, ends, strict=True))


def setting_text(value: Any) -> str:
    """A value of a setting in few digits."""
    if isinstance(value, tuple):
        return ", ".join(map(setting_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, or a tuple of numbers."""
    if isinstance(value, tuple):
        return all(_is_number(part) for part in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Returns a number, a word or None as it is, and the text of any other value of a setting, such as a list.

    The result can be a key and be sorted by `order`.
    """
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def rank(value: Any) -> tuple[tuple[bool, float, str], ...]:
    """Returns a key that sorts the values of one setting, or the tuples that are the values of several."""
    return tuple(map(order, value if isinstance(value, tuple) else (value,)))


def sensitivities(plan: Plan, runs: Sequence[StoredRun]) -> list[Sensitivity]:
    """One entry for every cell that has runs, in table order; empty where `select.success` is not given.

    A run that failed or diverged has not succeeded.
    """
    select = plan.config.select
    if select is None or select.success is None:
        return []
    found = []
    for (row, column), selected in runs_by_cell(plan, runs).items():
        results: dict[Any, list[float | None]] = {}
        metric = plan.spec.of(column, "metric")
        for run in selected:
            values = tuple(plain(lookup(run.config, key)) for key in select.best_of)
            results.setdefault(values[0] if len(values) == 1 else values, []).append(_number(plan, column, run))
        if results:
            sign, worst = (-1.0, math.inf) if smaller_is_better(metric) else (1.0, 0.0)
            ordered = [(value, results[value]) for value in sorted(results, key=rank)]
            tried = [
                (value, sum(_reaches(number, select.success, sign) for number in numbers), len(numbers))
                for value, numbers in ordered
            ]
            medians = (statistics.median(worst if n is None else n for n in numbers) for _, numbers in ordered)
            found.append(Sensitivity(row, column, tuple(tried), tuple(medians)))
    return found


def _number(plan: Plan, column: str, run: StoredRun) -> float | None:
    """The number of a cell from one run, in the shown unit; None for a run that failed or has none."""
    value = measurement(plan.spec, column, run)
    if run.status != "ok" or value is None or value.value is None:
        return None
    return shown(value.value, value.unit, plan.spec.percent)


def _reaches(number: float | None, threshold: float, sign: float) -> bool:
    return number is not None and sign * number >= sign * threshold
