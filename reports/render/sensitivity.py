"""How often a model succeeds at every value of a setting, such as the learning rate, instead of at the best one alone.

Recurrent models recall in a narrow window of learning rates (arXiv 2508.19029), so the best of a few rates says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.render.cells import measurement
from reports.render.plan import Plan
from reports.render.rows import LOWER_IS_BETTER, StoredRun
from reports.render.units import shown
from suite.grid import lookup


@dataclass(frozen=True)
class Sensitivity:
    """The runs of one cell at all values of `select.best_of`."""

    row: str
    column: str
    tried: tuple[tuple[Any, int, int], ...]
    """(value, successes, runs), in ascending order; a value of several settings is a tuple."""

    @property
    def rate(self) -> tuple[int, int]:
        """Successes and runs over all values."""
        return sum(found[1] for found in self.tried), sum(found[2] for found in self.tried)

    @property
    def window(self) -> str:
        """The smallest and the largest value at which at least half of the runs succeed; `none` without one."""
        working = [value for value, successes, runs in self.tried if 2 * successes >= runs]
        if not working:
            return "none"
        span = f"{text(working[0])} to {text(working[-1])}" if len(working) > 1 else text(working[0])
        numbers = [value for value in working if isinstance(value, (int, float))]
        if len(numbers) < 2 or numbers[0] <= 0:
            return span
        return f"{span} ({numbers[-1] / numbers[0]:.3g} times)"


def text(value: Any) -> str:
    """A value of a setting in few digits."""
    if isinstance(value, tuple):
        return ", ".join(map(text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def sensitivities(plan: Plan, runs: Sequence[StoredRun]) -> list[Sensitivity]:
    """One entry for every cell that has runs, in table order; empty where `select.success` is not given.

    A run that failed or diverged has not succeeded.
    """
    select = plan.config.select
    if select is None or select.success is None:
        return []
    found = []
    for row, column in plan.places():
        counts: dict[Any, list[bool]] = {}
        metric = plan.spec.columns[column].get("metric", plan.spec.metric)
        for run in runs:
            if plan.selects(row, column, run):
                values = tuple(lookup(run.config, key) for key in select.best_of)
                counts.setdefault(values[0] if len(values) == 1 else values, []).append(
                    _succeeds(plan, column, run, select.success, lower=metric in LOWER_IS_BETTER)
                )
        if counts:
            tried = ((value, sum(ends), len(ends)) for value, ends in sorted(counts.items()))
            found.append(Sensitivity(row, column, tuple(tried)))
    return found


def _succeeds(plan: Plan, column: str, run: StoredRun, threshold: float, *, lower: bool) -> bool:
    value = measurement(plan.spec, column, run)
    if run.status != "ok" or value is None or value.value is None:
        return False
    reached = shown(value.value, value.unit, plan.spec.percent)
    return reached <= threshold if lower else reached >= threshold
