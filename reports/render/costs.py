"""The costs of the rows of a table, by their own runs or by another experiment, and their values on the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from subquad.reports.render.document import shown
from subquad.reports.render.judge import Cell
from subquad.reports.render.report import Report
from subquad.reports.render.rows import FACTORS, StoredRun
from subquad.reports.render.selection import commonest_device
from subquad.suite.settings.grid import lookup
from subquad.suite.settings.report_spec import CostSpec


@dataclass(frozen=True)
class CostColumn:
    """One cost of every row that has it."""

    label: str
    """In words, with the unit."""
    values: Mapping[str, float]
    note: str = ""
    """The source of the numbers, if they are not from the runs that the table shows."""

    def text(self, row: str) -> str:
        """The cost of a row in three digits; empty where it is not known."""
        value = self.values.get(row)
        if value is None:
            return ""
        return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def columns_of(report: Report) -> list[CostColumn]:
    """The costs that the figure of a report asks for, each where some row has it.

    A cost of another experiment is left out where the report was built without `beside`.
    """
    found = (_other(report, cost) if cost.experiment else _own(report, cost) for cost in report.figure.spec.costs)
    return [column for column in found if column is not None and column.values]


def _own(report: Report, cost: CostSpec) -> CostColumn:
    """The largest of the medians over the columns of the table: a state may grow with the length."""
    runs = {run.run_id: run for run in report.runs}
    values: dict[str, float] = {}
    for cell in report.cells:
        shown = [run for run in map(runs.get, cell.run_ids) if run is not None]
        measured = [value for run in shown for value in run.costs(cost.metric)]
        if measured:
            value = statistics.median(measured)
            values[cell.row] = max(values.get(cell.row, value), value)
    return CostColumn(cost.label, values)


def _other(shown: Report, cost: CostSpec) -> CostColumn | None:
    if shown.beside is None:
        return None
    report = shown.beside(cost.experiment)
    cells = [cell for cell in report.cells if cell.column == cost.column and cell.median is not None]
    values = {cell.row: cell.median for cell in cells if cell.median is not None}
    where = f" on {report.device}" if report.device else ""
    return CostColumn(cost.label, values, f"{cost.label}: {cost.note or cost.column}{where} ({cost.experiment}).")


@dataclass(frozen=True)
class Curve:
    """The values of the seeds of one row and column on the way, against a cost."""

    row: str
    column: str
    seeds: tuple[tuple[tuple[float, float], ...], ...]
    """For each seed, cost and value of every evaluation, in the order of its steps."""
    is_budget: bool
    """Whether this cost is the budget of the runs, so that all end with it, apart from a part of their last step."""

    @property
    def end(self) -> float:
        """The largest cost at which every seed is known."""
        return math.inf if self.is_budget else min(seed[-1][0] for seed in self.seeds)

    def at(self, cost: float) -> tuple[float, ...]:
        """The value of each seed at a cost, between two evaluations by a straight line; empty where one has none."""
        known = max(seed[0][0] for seed in self.seeds) <= cost <= self.end
        return tuple(float(np.interp(cost, *np.transpose(seed))) for seed in self.seeds) if known else ()

    @property
    def middle(self) -> tuple[tuple[float, float], ...]:
        """The median over the seeds, at every cost of an evaluation at which all of them are known."""
        costs = sorted({cost for seed in self.seeds for cost, _ in seed})
        return tuple((cost, statistics.median(values)) for cost in costs if (values := self.at(cost)))


def curves_of(report: Report, cost: CostSpec) -> list[Curve]:
    """The curve of every cell against a cost that is counted on the way; none where its runs have no evaluations.

    Against seconds, it has the runs of the device that most runs used.
    """
    of_time = cost.metric == "train_seconds"
    runs = {run.run_id: run for run in (commonest_device(report.runs)[0] if of_time else report.runs)}
    budget = f"train.budget.{cost.metric.removeprefix('train_')}"
    found = []
    for cell in report.cells:
        ended = [run for run in map(runs.get, cell.run_ids) if run is not None and run.status == "ok"]
        seeds = tuple(points for run in ended if (points := _on_the_way(report, cost, run, cell)))
        # a run that stops early has another end
        is_budget = all(
            lookup(run.config, budget) is not None and not lookup(run.config, "train.early_stop") for run in ended
        )
        found += [Curve(cell.row, cell.column, seeds, is_budget)] * bool(seeds)
    return found


def _on_the_way(report: Report, cost: CostSpec, run: StoredRun, cell: Cell) -> tuple[tuple[float, float], ...]:
    spec, factor = report.figure.spec, FACTORS[cost.metric]
    # before the first step nothing is spent, which has no place on a logarithmic axis
    spent = {one.step: factor * one.value for one in run.values.of_metric(cost.metric) if one.value}
    values = {
        one.step: shown(one.value, one.unit, spec.percent)
        for one in run.values.of(spec.y, spec.split, report.spec.part(cell.row, cell.column))
        if one.value is not None
    }
    return tuple((spent[step], values[step]) for step in sorted(spent.keys() & values.keys()))


def band_of(rows: Sequence[Sequence[float]], lower: bool) -> tuple[float, float] | None:
    """The smallest and the largest seed of the best of several rows: a row of which a seed reaches there is a tie.

    None where there is one row, or the best has one seed. lower: whether a smaller number is the better one.
    """
    there = [values for values in rows if values]
    if len(there) < 2:
        return None
    best = (min if lower else max)(there, key=statistics.median)
    return (min(best), max(best)) if len(best) > 1 else None


def bands_of(curves: Sequence[Curve], lower: bool) -> list[tuple[float, float, float]]:
    """Every cost of an evaluation, with `band_of` the rows that are known there, where there is one."""
    costs = sorted({cost for curve in curves for seed in curve.seeds for cost, _ in seed})
    found = [(cost, band_of([curve.at(cost) for curve in curves], lower)) for cost in costs]
    return [(cost, *band) for cost, band in found if band is not None]


def tied(curves: Sequence[Curve], lower: bool) -> set[str]:
    """The rows of which a seed reaches those of the best row at the end of their budget, where all have that end."""
    found = set()
    for curve in curves if all(curve.is_budget for curve in curves) else ():
        band, values = band_of([other.at(curve.end) for other in curves], lower), curve.at(curve.end)
        if band is not None and values and (min(values) <= band[1] if lower else max(values) >= band[0]):
            found.add(curve.row)
    return found
