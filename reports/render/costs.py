"""What the rows of a table cost, by their own runs or by another experiment, as a figure shows it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from subquad.reports.render.report import SUMS, Report
from subquad.reports.render.rows import StoredRun
from subquad.suite.settings.report_spec import CostSpec

FACTORS = {
    "state_size": 4 / 1024,
    "num_parameters": 1e-3,
    "peak_memory": 2.0**-30,
    "train_flops": 1e-15,
    "train_throughput": 1e-3,
    "train_tokens": 1e-6,
}
"""Metric to the factor by which its values are shown: KiB of numbers in fp32, thousands of parameters, GiB, 10^15
operations, thousands of tokens a second, millions of tokens. The label of the cost says so."""


@dataclass(frozen=True)
class CostColumn:
    """One cost of every row that has it."""

    label: str
    """In words, with the unit."""
    values: Mapping[str, float]
    note: str = ""
    """Where the numbers are from, if not from the runs that the table shows."""

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
        measured = [value for run in shown for value in _measured(run, cost.metric)]
        if measured:
            value = FACTORS.get(cost.metric, 1.0) * statistics.median(measured)
            values[cell.row] = max(values.get(cell.row, value), value)
    return CostColumn(cost.label, values)


def _measured(run: StoredRun, metric: str) -> list[float]:
    """All values of a metric of a run; of one that adds up over the training, the last."""
    found = run.values.of_metric(metric)
    if metric in SUMS:
        found = sorted(found, key=lambda value: value.step)[-1:]
    return [value.value for value in found if value.value is not None]


def _other(shown: Report, cost: CostSpec) -> CostColumn | None:
    if shown.beside is None:
        return None
    report = shown.beside(cost.experiment)
    cells = [cell for cell in report.cells if cell.column == cost.column and cell.median is not None]
    values = {cell.row: cell.median for cell in cells if cell.median is not None}
    where = f" on {report.device}" if report.device else ""
    return CostColumn(cost.label, values, f"{cost.label}: {cost.note or cost.column}{where} ({cost.experiment}).")
