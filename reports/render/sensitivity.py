"""How often a model succeeds at every value of a setting, such as the learning rate, instead of at the best one alone.

Recurrent models recall in a narrow window of learning rates (arXiv 2508.19029), so the best of a few rates says little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.render.cells import measurement
from reports.render.plan import Plan
from reports.render.rows import StoredRun
from reports.render.units import shown
from suite.metrics import smaller_is_better
from suite.settings.grid import lookup, order


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
            return f"{text(low)} (no other was tried)"
        if not all(_is_number(value) for value, _, _ in self.tried):
            return ", ".join(text(value) for value, successes, runs in self.tried if 2 * successes >= runs)
        below, above = " or less" * (first == 0), " or more" * (last == len(self.tried) - 1)
        if low == high:
            return text(low) + below + above
        span = f"{text(low)}{below} to {text(high)}{above}"
        if not isinstance(low, (int, float)) or low <= 0:
            return span
        return f"{span} ({high / low:.3g} times)"


def _stretches(working: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last index of every stretch of neighbours that are true."""
    starts = [i for i, works in enumerate(working) if works and (i == 0 or not working[i - 1])]
    ends = [i for i, works in enumerate(working) if works and (i == len(working) - 1 or not working[i + 1])]
    return list(zip(starts, ends, strict=True))


def text(value: Any) -> str:
    """A value of a setting in few digits."""
    if isinstance(value, tuple):
        return ", ".join(map(text, value))
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
    for (row, column), selected in plan.selected(runs).items():
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
    """The number of a cell from one run, in the shown unit; None for a run that did not end well or has none."""
    value = measurement(plan.spec, column, run)
    if run.status != "ok" or value is None or value.value is None:
        return None
    return shown(value.value, value.unit, plan.spec.percent)


def _reaches(number: float | None, threshold: float, sign: float) -> bool:
    return number is not None and sign * number >= sign * threshold
