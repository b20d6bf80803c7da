"""A report as data: the paper's values beside ours, the claims, the costs, and the provenance of every value.

`build` is pure: an experiment's folder (grid.yaml parsed, expected.csv, claims.csv) and stored rows in, a `Report` out.
The formats only print what stands in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from reports.render.cells import Cell, make_cell
from reports.render.claims import Claim, check_claims, read_claims
from reports.render.costs import Cost, costs_of
from reports.render.figure import Figure, make_figure
from reports.render.notes import notes_of, provenance_of
from reports.render.plan import make_plan, pick_scale
from reports.render.rows import StoredRun, as_rows, load_runs, on_grid, one_device, select_best, settle
from reports.render.sensitivity import Sensitivity, sensitivities
from reports.render.units import shared_unit
from suite.registry import counted
from suite.settings.config import ExperimentConfig
from suite.settings.grid import check_defaults
from suite.settings.report_spec import Source, TableSpec


@dataclass(frozen=True)
class Report:
    """Everything a format may print."""

    experiment: str
    title: str
    source: str
    scale: str
    unit: str
    decimals: int
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    """Lines under the table: marks, selected runs, missing runs, the criterion."""
    claims: tuple[Claim, ...]
    sensitivity: tuple[Sensitivity, ...]
    """Successes at every value of a setting of which the table shows the best."""
    costs: tuple[Cost, ...]
    provenance: tuple[str, ...]
    figure: Figure | None
    spec: TableSpec
    """Rows and columns of the table, with the settings that each stands for."""
    runs: tuple[StoredRun, ...]
    """The runs that the cells show."""
    timed: bool = False
    """Whether the runs time operators or models; then cells have a spread of samples in place of seeds."""
    device: str = ""
    """The one device of a timed report."""

    @property
    def has_published(self) -> bool:
        """Whether there is a number to compare with."""
        return any(cell.published for cell in self.cells)


def build(
    config: ExperimentConfig,
    folder: Path,
    frame: pa.Table | pd.DataFrame,
    *,
    scale: str | None = None,
    planned: Callable[[str], Iterable[Mapping[str, Any]]] | None = None,
) -> Report:
    """The report of one experiment.

    folder: where expected.csv and claims.csv may lie.
    frame: stored rows of the experiment, of any scales (`rows_of`, or `suite.store.storage.read`).
    scale: the one to show; None: `paper` if it has rows, else the first that has.
    planned: gives the resolved settings of the runs that the grid has today at a scale; it is asked where a cell has
        runs of several settings. None: the newest are shown.
    """
    rows = as_rows(frame)
    return report_of(config, folder, _name(rows, folder), load_runs(rows), scale=scale, planned=planned)


def report_of(
    config: ExperimentConfig,
    folder: Path,
    name: str,
    everything: Sequence[StoredRun],
    *,
    scale: str | None = None,
    planned: Callable[[str], Iterable[Mapping[str, Any]]] | None = None,
) -> Report:
    """`build` for the stored runs of an experiment of this name."""
    plan = make_plan(config, folder, pick_scale(config, everything, scale))
    check_defaults(config, lambda: (run.config for run in everything), str(folder / "grid.yaml"))
    runs, left_out = on_grid([run for run in everything if run.scale == plan.scale], plan.points)
    if config.timed:
        runs, elsewhere = one_device(runs)
        if elsewhere:
            left_out.append(f"left out: {counted(elsewhere)} on another device than that of the newest run")
    sensitivity = sensitivities(plan, runs)
    runs, tried = select_best(runs, config.select, plan.points)
    # in a mean over settings, another run may be the best one in each
    best_of = config.select.best_of if config.select else ()
    free = {*plan.spec.mean_over, *best_of} if plan.spec.mean_over else ()
    today = functools.cache(lambda: () if planned is None else tuple(planned(plan.scale)))
    settled: dict[tuple[str, str], list[StoredRun]] = {}
    stale: set[str] = set()
    cells = []
    for (row, column), found in plan.selected(runs).items():
        settled[row, column] = settle(found, free, today)
        stale |= {run.run_id for run in found} - {run.run_id for run in settled[row, column]}
        cells.append(make_cell(plan, row, column, settled[row, column], tried))
    if stale:
        left_out.append(f"left out: {counted(len(stale))} with another setting than the runs that their cell shows")
    shown = list({run.run_id: run for found in settled.values() for run in found}.values())
    return Report(
        experiment=name,
        title=config.title,
        source=_source(config.source),
        scale=plan.scale,
        unit="%" if plan.spec.percent else _unit(plan.spec, shown),
        decimals=plan.decimals,
        cells=tuple(cells),
        notes=tuple(notes_of(plan, cells, shown) + left_out),
        claims=tuple(check_claims(read_claims(folder / "claims.csv"), cells, plan.spec)),
        sensitivity=tuple(sensitivity),
        costs=tuple(costs_of(settled)),
        provenance=tuple(provenance_of(shown)),
        figure=None if config.figure is None else make_figure(plan, config.figure, settled, sensitivity, cells),
        timed=config.timed,
        device=shown[0].device if config.timed and shown else "",
        spec=plan.spec,
        runs=tuple(shown),
    )


def _name(rows: pa.Table, folder: Path) -> str:
    if rows.num_rows:
        return str(rows["experiment"][0].as_py())
    # the checkout itself may lie in a folder of that name, so the last one counts
    above, _, name = folder.resolve().as_posix().rpartition("/reports/")
    return name if above else folder.name


def _source(source: Source | None) -> str:
    if source is None:
        return ""
    kinds = (("table", source.table), ("figure", source.figure), ("section", source.section))
    return ", ".join([source.paper, *(f"{kind} {value}" for kind, value in kinds if value is not None)])


def _unit(spec: TableSpec, runs: Sequence[StoredRun]) -> str:
    """The unit that all cells share, or nothing."""
    metrics = {column.get("metric", spec.metric) for column in spec.columns.values()}
    return shared_unit(value.unit for run in runs for metric in metrics for value in run.values.of_metric(metric))
