"""Committed rows as the source of the numbers that documents quote (`quotes`)."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pandas as pd

from reports.render.claims import tally
from reports.render.quotes import Query, Quote, quotes, read_queries, updated
from reports.render.report import Report, report_of
from reports.render.results_table import rewritten
from reports.render.rows import StoredRun, load_runs, rows_of
from reports.render.units import shown
from suite.settings.config import find_experiments, load_experiment
from suite.settings.grid import lookup, same
from suite.store import storage


class CommittedRows:
    """A `quotes.Source` that reads the folder of committed results.

    experiments: name to the path of its grid.yaml.
    """

    def __init__(self, results: Path, experiments: Mapping[str, Path]) -> None:
        self.results, self.experiments = results, experiments
        # a document quotes many cells of few reports
        self.report = cache(self._report)
        self.stored = cache(self._stored)
        self.committed = cache(self._committed)
        self.kernels = cache(self._kernels)

    def _committed(self, experiment: str) -> list[StoredRun]:
        return load_runs(rows_of(storage.files([self.results / "reference"], experiment)))

    def _kernels(self) -> pd.DataFrame:
        # beside the shapes of `bench` lie sweeps of configurations, which measure no revision
        files = storage.files([self.results / "reference"], "kernels")
        return storage.read([path for path in files if path.parent.name in ("paper", "quick")])

    def _report(self, experiment: str, scale: str) -> Report:
        if experiment not in self.experiments:
            raise ValueError(f"there is no experiment {experiment!r}")
        path = self.experiments[experiment]
        return report_of(load_experiment(path), path.parent, experiment, self.committed(experiment), scale=scale)

    def _stored(self, experiment: str, scale: str) -> list[StoredRun]:
        probes = load_runs(rows_of(storage.files_below(self.results / "reference" / "probes" / experiment)))
        return [run for run in self.committed(experiment) + probes if run.scale == scale]

    def cell(self, experiment: str, scale: str, row: str, column: str, what: str) -> list[float]:
        cells = self.report(experiment, scale).cells
        found = next((cell for cell in cells if (cell.row, cell.column) == (row, column)), None)
        if found is None:
            known = " or ".join(sorted({cell.row for cell in cells} if row else {cell.column for cell in cells}))
            raise ValueError(f"{experiment}, {scale}: no cell {row!r} | {column!r}; rows are {known}")
        values: dict[str, float | None] = {
            "mean": found.mean,
            "sd": found.sd,
            "median": found.median,
            "paper": None if found.published is None else found.published.value,
            "count": float(found.num_seeds),
            "successes": None if found.successes is None else float(found.successes),
        }
        if what == "seeds":
            return list(found.values)
        if what not in values:
            raise ValueError(f"{what!r} is not one of {', '.join([*values, 'seeds'])}")
        value = values[what]
        if value is None:
            raise ValueError(f"{experiment}, {scale}: {row} | {column} has no {what}")
        return [value]

    def tried(self, experiment: str, scale: str, row: str, column: str) -> list[float]:
        for found in self.report(experiment, scale).sensitivity:
            if (found.row, found.column) == (row, column):
                return [float(successes) for _, successes, _ in found.tried]
        raise ValueError(f"{experiment}, {scale}: {row!r} | {column!r} has no runs at several values of a setting")

    def claims(self, experiment: str, scale: str) -> tuple[int, int]:
        return tally(self.report(experiment, scale).claims)

    def runs(self, experiment: str, scale: str, selector: dict[str, str]) -> list[float]:
        wanted = dict(selector)
        part = wanted.pop("slice", "")
        split = wanted.pop("split", "test")
        step = wanted.pop("step", None)
        metric = wanted.pop("metric", "accuracy")
        values = {key: json_value(text) for key, text in wanted.items()}
        found = []
        for run in self.stored(experiment, scale):
            if run.status != "ok" or not all(same(value, lookup(run.config, key)) for key, value in values.items()):
                continue
            value = run.find(metric, split, part, step=None if step is None else int(step))
            if value is not None and value.value is not None:
                found.append((run.seed, shown(value.value, value.unit, percent=True)))
        if not found or len({seed for seed, _ in found}) < len(found):
            raise ValueError(f"{experiment}, {scale}: {selector} selects {len(found)} runs, not one for every seed")
        return [value for _, value in sorted(found)]

    def bench(self, operator: str, implementation: str, case: str, metric: str = "time", device: str = "") -> float:
        rows = self.kernels()
        wanted = {"task": operator, "model": implementation, "slice": case, "metric": metric, "status": "ok"}
        named = rows["device"].str.contains(device, regex=False)
        rows = rows[named if device else rows["device"] == rows["device"].mode()[0]]
        for column, value in wanted.items():
            rows = rows[rows[column] == value]
        if rows.empty:
            raise ValueError(f"no row of {wanted} on {device or 'the device that has the most rows'}")
        return float(rows.sort_values("started_at")["value"].iloc[-1])

    def peer(self, operator: str, implementation: str, shape: str, column: str) -> float:
        with (self.results / "peers.csv").open(newline="") as file:
            for line in csv.DictReader(file):
                if (line["op"], line["implementation"], line["shape"]) == (operator, implementation, shape):
                    return float(line[column])
        raise ValueError(f"results/peers.csv has no {operator}, {implementation}, {shape}")


def json_value(text: str) -> object:
    """The value that a text stands for: `true`, a number, null, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def queries_of(path: Path, home: Path, source: CommittedRows) -> dict[str, Query]:
    """The queries beside a document; that of an experiment quotes this experiment unless a line says otherwise."""
    folder = path.parent.relative_to(home).as_posix().removeprefix("reports/")
    return read_queries(path.with_name("quotes.csv"), folder if folder in source.experiments else "")


def quoted(path: Path, home: Path, source: CommittedRows) -> list[Quote]:
    """The quoted numbers of one document."""
    return quotes(path.read_text(), queries_of(path, home, source), source)


def documents(home: Path) -> list[Path]:
    """The documents that quote numbers: those of the repository, of experiments and of operators."""
    folders = ("docs", "kernels", "reports", "results")
    return [*sorted(home.glob("*.md")), *(path for name in folders for path in sorted((home / name).rglob("*.md")))]


def update_documents(reports: Path) -> list[Path]:
    """Writes the quoted numbers and the results tables of all documents again; gives those that changed.

    A quote without a source raises ValueError before any document is written.

    reports: the folder of the experiments, in the home of the repository.
    """
    home = reports.resolve().parent
    source = CommittedRows(home / "results", find_experiments(reports))
    changed = {}
    for path in documents(home):
        text = path.read_text()
        new = rewritten(updated(text, quoted(path, home, source)), source.report)
        if new != text:
            changed[path] = new
    for path, new in changed.items():
        path.write_text(new)
    return list(changed)
