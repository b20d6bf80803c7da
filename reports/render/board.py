"""The scoreboard of many experiments as data: their reports, and the rows of the operators' benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from reports.render.report import Report
from suite.bench.cases import SETS

PAPERS = ("h3", "dss", "mamba", "gsa")
"""The papers that the suite reproduces, in the order in which they appeared; other folders follow them."""


@dataclass(frozen=True)
class Board:
    """What a scoreboard is made of."""

    name: str
    """Name of a paper, or `overview` for all of them."""
    reports: tuple[Report, ...]
    """One for each experiment, at its scale `paper` or else at the first that has rows or can run here."""
    others: tuple[Report, ...]
    """The other scales that have rows. Their cells are shown, but they are not counted."""
    kernels: pd.DataFrame
    """Stored rows of `bench`."""
    operators: tuple[str, ...] = ()
    """Every operator that the suite has."""

    @property
    def title(self) -> str:
        """The title of the page."""
        return "All experiments" if self.name == "overview" else f"Experiments of {self.name}"

    @property
    def folders(self) -> list[str]:
        """The papers and other folders that have a report, the papers first."""
        found = dict.fromkeys(folder_of(report.experiment) for report in self.reports)
        return [name for name in PAPERS if name in found] + sorted(found.keys() - set(PAPERS))


def folder_of(experiment: str) -> str:
    """`h3` for `h3/table2`; an experiment without a folder stands for itself."""
    return experiment.partition("/")[0]


def health(board: Board) -> list[tuple[str, Sequence[str]]]:
    """What data are missing: for each kind that there is a sentence with its number, and the names that it means."""
    reports = board.reports
    elsewhere = {report.experiment for report in board.others}
    empty = [report.experiment for report in reports if not report.runs and report.experiment not in elsewhere]
    reduced = [report.experiment for report in reports if not report.runs and report.experiment in elsewhere]
    asked = [cell for report in reports for cell in report.cells if cell.planned]
    missing = sum(cell.missing for cell in asked)
    short = sum(0 < cell.num_seeds < cell.planned for cell in asked)
    runs = {run.run_id: run for report in reports for run in report.runs}.values()
    ended = [run.run_id for run in runs if run.status not in ("ok", "n/a")]
    dirty = [run.run_id for run in runs if run.commit.endswith("-dirty")]
    rows = board.kernels[board.kernels["scale"].isin(SETS)]
    times = rows[rows["metric"] == "time"]
    measured = times[times["status"] == "ok"]
    unmeasured = [name for name in board.operators if name not in set(measured["task"])]
    cases = measured.groupby(["device", "task", "model", "slice"])["commit"].nunique()
    once = int((cases == 1).sum())
    found: list[tuple[int, str, Sequence[str]]] = [
        (len(empty), f"of {len(reports)} experiments have no rows", empty),
        (len(reduced), "experiments have rows of a smaller scale only", reduced),
        (missing, f"of {len(asked)} cells have not been run", ()),
        (short, ("cell has" if short == 1 else "cells have") + " fewer seeds than their grid asks for", ()),
        (len(ended), f"of {len(runs)} runs ended with an error, diverged or ran out of memory", ended),
        (len(dirty), f"of {len(runs)} runs were made with uncommitted changes", dirty),
        (len(unmeasured), f"of {len(board.operators)} operators have no benchmark", unmeasured),
        (once, f"of {len(cases)} benchmark cases were measured at one commit only, so they show no trend", ()),
    ]
    return [(f"{count} {text}", names) for count, text, names in found if count]
