"""The cells of a report, ours over seeds beside the paper's value, with a verdict; and successes by setting.

A cell shows the best of several values of a setting, such as the learning rate. Recurrent models recall in a narrow
window of learning rates (arXiv 2508.19029), so `sensitivities` counts the successes at every value that was tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from reports.render.document import MIXED, ONE_SEED, REDUCED, SELECTED, STAND_IN, shown
from reports.render.plan import Plan, Published
from reports.render.rows import StoredRun, Value
from reports.render.selection import Tried, runs_by_cell, score
from suite.bench.cases import spread
from suite.metrics import smaller_is_better
from suite.settings.grid import lookup, order
from suite.settings.report_spec import TableSpec
from suite.store.storage import operator_mix

Verdict = Literal["", "agrees", "unclear", "unstable", "better", "worse", "differs"]

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
    chosen: str = ""
    """The values of `select.best_of`, e.g. `train.lr=0.001 (best of 4)`."""
    mixed: str = ""
    """Operator versions and backends of the runs behind the mean if they differ; empty if they are the same."""
    run_ids: tuple[str, ...] = ()

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
    if row not in plan.spec.rows or (plan.cannot_run and not runs):
        return Cell(row, column, published)
    ordered = sorted(runs, key=lambda run: (run.seed, run.run_id))
    measured = [(run, measurement(plan.spec, column, run)) for run in ordered]
    seeds = _seeds(plan, row, column, measured)
    values, ends = seeds.values, seeds.failures
    samples = [value.samples for _, value in measured if value is not None]
    stand_in = any(run.stand_in for run in runs)
    chosen = _chosen(plan, row, column, runs, tried) if values or ends else ""
    mixed = operator_mix({"operators": run.operators} for run in seeds.runs) or ""
    applies = {
        REDUCED: plan.reduced and bool(runs),
        ONE_SEED: len(values) == 1 and not plan.config.timed,
        STAND_IN: stand_in,
        MIXED: bool(mixed),
        SELECTED: bool(chosen),
    }
    cell = Cell(
        row=row,
        column=column,
        published=None if stand_in else published,
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        values=tuple(values),
        median=statistics.median(values) if values else None,
        spread=spread(samples[0]) if len(samples) == len(values) == 1 else None,
        num_seeds=len(values),
        planned=max(plan.num_seeds, seeds.num_started),
        failures=tuple((end, ends.count(end)) for end in sorted(set(ends))),
        marks=tuple(mark for mark, used in applies.items() if used),
        chosen=chosen,
        mixed=mixed,
        run_ids=tuple(run.run_id for run in ordered),
    )
    return _compared(plan, cell)


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


def _compared(plan: Plan, cell: Cell) -> Cell:
    """Adds to a cell how its values compare with that of the paper, where it has both."""
    published = cell.published
    if cell.mean is None or published is None or published.value is None:
        return cell
    tolerance, failures = plan.spec.tolerance, dict(cell.failures)
    # a run that ran out of memory or was interrupted says nothing about its seed; one that diverged does
    diverged = failures.pop("diverged", 0)
    may_judge = not plan.reduced and not failures
    return replace(
        cell,
        difference=cell.mean - published.value,
        successes=sum(shortfall(value, published) <= tolerance + ROUNDING for value in cell.values),
        verdict=judge(cell.values, published, tolerance, diverged=diverged) if may_judge else "",
    )


def measurement(spec: TableSpec, column: str, run: StoredRun) -> Value | None:
    """The measurement of a run that a column shows, or None where the run has none."""
    choice = spec.columns[column]
    metric, split = choice.get("metric", spec.metric), choice.get("split", spec.split)
    return run.find(metric, split, choice.get("slice", ""), best=choice.get("at") == "best")


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
        metric = plan.spec.columns[column].get("metric", plan.spec.metric)
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
