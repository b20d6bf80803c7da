"""A report as data: the paper's values beside ours, the claims, the costs, and the provenance of every value.

`build` is pure: an experiment's folder (grid.yaml parsed, expected.csv, claims.csv) and stored rows in, a `Report` out.
The formats only print what stands in it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from subquad.reports.render.claims import Claim, check_claims, read_claims
from subquad.reports.render.document import (
    EDGE,
    EPOCH_ON_TEST,
    FEW_SEEDS,
    LISTED,
    MIXED,
    NOISY,
    REDUCED,
    SELECTED,
    SELECTED_ON_TEST,
    STAND_IN,
    shared_unit,
)
from subquad.reports.render.figure import Figure, make_figure
from subquad.reports.render.judge import (
    DEVICE_UNITS,
    FEWEST_SEEDS,
    LARGE_SPREAD,
    OUTRIGHT,
    Cell,
    Sensitivity,
    make_cell,
    sensitivities,
    speedups,
)
from subquad.reports.render.plan import Plan, Published, make_plan, pick_scale
from subquad.reports.render.rows import StoredRun, as_rows, days_of, load_runs
from subquad.reports.render.selection import Settled, select_runs, training_times
from subquad.suite.metrics import SPENT
from subquad.suite.registry import nearest
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import check_defaults, lookup
from subquad.suite.settings.report_spec import FigureSpec, Source, TableSpec


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
    figure: Figure
    """The one that the grid asks for, or else every seed of every cell."""
    spec: TableSpec
    """Rows and columns of the table, with the settings that each stands for."""
    runs: tuple[StoredRun, ...]
    """The runs that the cells show."""
    published: Mapping[tuple[str, str], Published]
    """(row, column) to the number of the paper, also where the grid has no such cell."""
    config: ExperimentConfig
    reduced: bool
    """Whether the scale is smaller than the one that the paper's numbers belong to."""
    timed: bool = False
    """Whether the runs time operators or models; then cells have a spread of samples in place of seeds."""
    device: str = ""
    """The one device of a timed report."""
    beside: Callable[[str], Report] | None = None
    """Gives the report of another experiment, whose columns a figure shows as costs; asked only when it is drawn."""

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
    beside: Callable[[str], Report] | None = None,
) -> Report:
    """The report of one experiment.

    folder: where expected.csv and claims.csv may lie.
    frame: stored rows of the experiment, of any scales (`rows_of`, or `suite.store.storage.read`).
    scale: the one to show; None: `paper` if it has rows, else the first that has.
    planned: gives the resolved settings of the runs that the grid has today at a scale; it is asked where a cell has
        runs of several settings. None: the newest are shown.
    beside: gives the reports of the experiments whose columns the figure shows as costs (`figure.costs`).
    """
    rows = as_rows(frame)
    name = _name(rows, folder)
    if config.reads:
        # the rows name the experiment that made them
        name = f"{name.rpartition('/')[0]}/{folder.resolve().name}".lstrip("/")
    return report_of(config, folder, name, load_runs(rows), scale=scale, planned=planned, beside=beside)


def report_of(
    config: ExperimentConfig,
    folder: Path,
    name: str,
    everything: Sequence[StoredRun],
    *,
    scale: str | None = None,
    planned: Callable[[str], Iterable[Mapping[str, Any]]] | None = None,
    beside: Callable[[str], Report] | None = None,
) -> Report:
    """`build` for the stored runs of an experiment of this name."""
    plan = make_plan(config, folder, pick_scale(config, {run.scale for run in everything}, scale))
    check_defaults(config, lambda: (run.config for run in everything), str(folder / "grid.yaml"))
    selection = select_runs(plan, everything, lambda: () if planned is None else planned(plan.scale))
    settled, shown = selection.settled, selection.shown
    sensitivity = sensitivities(plan, selection.compared)
    cells = speedups(plan, [make_cell(plan, *place, runs, selection.tried) for place, runs in settled.items()])
    return Report(
        experiment=name,
        title=config.title,
        source=_source(config.source),
        scale=plan.scale,
        unit="%" if plan.spec.percent else _unit(plan.spec, shown),
        decimals=plan.decimals,
        cells=tuple(cells),
        notes=(
            *notes_of(plan, cells, shown),
            *_unmeasured(plan, settled),
            *selection.left_out,
            *_shown_by(plan.scale, everything, selection.apart),
        ),
        claims=tuple(check_claims(read_claims(folder / "claims.csv"), cells, plan.spec, plan.outside)),
        sensitivity=tuple(sensitivity),
        costs=tuple(costs_of(settled)),
        provenance=tuple(provenance_of(shown)),
        figure=make_figure(plan, config.figure or FigureSpec(kind="seeds"), settled, sensitivity, cells),
        timed=config.timed,
        device=shown[0].device if config.timed and shown else "",
        spec=plan.spec,
        runs=tuple(shown),
        published=plan.published,
        config=config,
        reduced=plan.reduced,
        beside=beside,
    )


def _unmeasured(plan: Plan, settled: Settled) -> list[str]:
    """A sentence for each column whose metric, or split of it, no run of its cells has: they only look as not run."""
    found = []
    for column in plan.spec.columns:
        runs = [run for (_, name), group in settled.items() if name == column for run in group if run.status == "ok"]
        metric, split = plan.spec.of(column, "metric"), plan.spec.of(column, "split")
        values = itertools.chain.from_iterable(run.values.of_metric(metric) for run in runs)
        if not runs or plan.is_speedup(column) or any(value.split == split for value in values):
            continue
        if splits := sorted({value.split for run in runs for value in run.values.of_metric(metric)}):
            there = " and ".join(name or "no split" for name in splits)
            found.append(f"{column}: its runs have {metric} of {there}, and none of {split or 'no split'}")
        else:
            close = nearest(metric, sorted({value.metric for run in runs for value in run.values}))
            found.append(f"{column}: none of its runs has the metric {metric}{close}")
    return found


def _shown_by(scale: str, runs: Sequence[StoredRun], keys: Sequence[str]) -> list[str]:
    """The options with which the command shows runs that the report leaves out, beside the others."""
    there = [key for key in ("model.name", *keys) if any(lookup(run.config, key) is not None for run in runs)]
    options = " ".join(f"--by {key}" for key in dict.fromkeys(there))
    # a report does not know the folders of a grid of one's own and of the rows, which that command names
    return [f"all of these runs: the same command with --scale {scale} {options}"] if keys else []


def _name(rows: pa.Table, folder: Path) -> str:
    if rows.num_rows:
        return str(rows["experiment"][0].as_py())
    # the checkout itself may lie in a folder of that name, so the last one counts
    above, _, name = folder.resolve().as_posix().rpartition("/reports/")
    return name if above else folder.name


def _source(source: Source | None) -> str:
    if source is None:
        return ""
    # a footnote or a file is named in words
    in_words = source.section is not None and len(first := source.section.split()[0]) > 1 and first.isalpha()
    kinds = (("table", source.table), ("figure", source.figure), ("" if in_words else "section", source.section))
    return ", ".join([source.paper, *(f"{kind} {value}".strip() for kind, value in kinds if value is not None)])


def _unit(spec: TableSpec, runs: Sequence[StoredRun]) -> str:
    """The unit that all cells share, or nothing."""
    metrics = {spec.of(column, "metric") for column in spec.columns}
    return shared_unit(value.unit for run in runs for metric in metrics for value in run.values.of_metric(metric))


COST_METRICS = {
    "num_parameters": "parameters",
    "state_size": "state size",
    "train_flops": "train flop",
    "inference_flops": "flop/token",
    "decode_flops": "decode flop/token",
    "train_tokens": "tokens read",
    "train_throughput": "train tokens/s",
    "inference_throughput": "inference tokens/s",
    "decode_throughput": "decode tokens/s",
    "peak_memory": "peak memory (B)",
    "peak_rss": "peak process memory (B)",
}
"""Metric to its column title, in the order of the columns."""
AT_LENGTHS = ("state_size", "decode_flops")
"""Metrics whose slice names the length at which they were taken."""


@dataclass(frozen=True)
class Cost:
    """Costs of one setting on one device."""

    label: str
    device: str
    values: dict[str, tuple[float, float, float]]
    """Metric to (median, smallest, largest) sample."""
    run_ids: tuple[str, ...]
    length: str = ""
    """Sequence length behind `state_size`, e.g. `length=512`."""


def costs_of(settled: Settled) -> list[Cost]:
    """One line for every row, setting and device; a row whose columns share their runs has one line."""
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    by_id: dict[str, StoredRun] = {}
    for (row, column), runs in settled.items():
        ok = [run for run in runs if run.status == "ok"]
        by_id.update({run.run_id: run for run in ok})
        if ok:
            lines.setdefault((row, tuple(sorted(run.run_id for run in ok))), []).append(column)
    rows = [row for row, _ in lines]
    costs = []
    for (row, ids), columns in lines.items():
        named = ", ".join(columns) if len(columns) < 4 else f"{columns[0]} to {columns[-1]}"
        label = row if rows.count(row) == 1 else f"{row}, {named}"
        # speeds of different devices are never pooled
        for device in sorted({by_id[i].device for i in ids}):
            cost = _cost(label, device, [by_id[i] for i in ids if by_id[i].device == device])
            if cost.values:
                costs.append(cost)
    return costs


def _cost(label: str, device: str, runs: Sequence[StoredRun]) -> Cost:
    values: dict[str, tuple[float, float, float]] = {}
    length = ""
    for metric in COST_METRICS:
        samples: list[float] = []
        for run in runs:
            latest = max((value.step for value in run.values.of_metric(metric)), default=0)
            for value in run.values.of_metric(metric):
                if value.value is None or (metric in SPENT and value.step < latest):
                    continue
                if metric == "state_size":
                    length = value.slice
                elif value.slice and metric not in AT_LENGTHS:
                    # a speed at one of several lengths; different lengths are not pooled
                    continue
                samples += value.samples or (value.value,)
        if samples:
            values[metric] = statistics.median(samples), min(samples), max(samples)
    return Cost(label, device, values, tuple(run.run_id for run in runs), length)


LONGEST_LIST = 12
"""A footnote names at most this many rows and cells."""


def notes_of(plan: Plan, cells: Sequence[Cell], runs: Sequence[StoredRun]) -> list[str]:
    """The lines under the table, in a fixed order, each only where it applies.

    runs: all runs that the cells show.
    """
    used = {mark for cell in cells for mark in cell.marks}
    notes = []
    if REDUCED in used:
        notes.append(f"{REDUCED} reduced: scale {plan.scale} ({_changes(plan)}); no verdict against the paper")
    if FEW_SEEDS in used:
        notes.append(f"{FEW_SEEDS} fewer than {FEWEST_SEEDS} seeds")
    if STAND_IN in used:
        reasons = "; ".join(sorted({run.stand_in for run in runs if run.stand_in}))
        notes.append(f"{STAND_IN} stand-in data, not comparable with the paper: {reasons}")
    if MIXED in used:
        mixes = "; ".join(
            f"{', '.join(where) or 'all cells'}: {words}" for words, where in _places(cells, lambda cell: cell.mixed)
        )
        notes.append(f"{MIXED} mean over runs of different operators or devices, which may not agree: {mixes}")
    chosen = [mark for mark in (SELECTED, SELECTED_ON_TEST) if mark in used]
    if chosen and plan.config.select is not None:
        select = plan.config.select
        picks = LISTED
        if not choices_are_listed(cells):
            places = _places(cells, lambda cell: cell.chosen)
            picks = ": " + "; ".join(f"{words}: {', '.join(where)}" if where else words for words, where in places)
        on_test = chosen == [SELECTED_ON_TEST] and select.split == "valid"
        rule = select.rule.replace(" on valid", " on valid, which are the test rows") if on_test else select.rule
        notes.append(f"{' '.join(chosen)} {rule}{picks}")
    if EPOCH_ON_TEST in used:
        notes.append(
            f"{EPOCH_ON_TEST} the best epoch, chosen on the test rows; `last epoch` has the mean at the last one"
        )
    if EDGE in used:
        where = " in some setting of the mean" if plan.spec.mean_over else ""
        notes.append(f"{EDGE} the chosen value is the smallest or the largest that was tried{where}")
    if plan.config.timed:
        notes.append(
            "a value is the median of raw samples, without the digits that their spread leaves open; spread: half the "
            "distance between their quartiles, over the median"
        )
    if times := training_times(runs):
        devices = ", ".join(sorted({run.device for run in runs}))
        notes.append(f"each run trained for {times}, so the values hold for {devices} alone")
    if NOISY in used:
        notes.append(f"{NOISY} half the distance between the quartiles is above {LARGE_SPREAD:.0%} of the median")
    if any(cell.unit in DEVICE_UNITS for cell in cells):
        notes += [
            f"busy machine: {device}; what shares a device is slower than alone"
            for device in sorted({run.device for run in runs if run.device.endswith("runs at a time")})
        ]
    asked = [cell for cell in cells if cell.planned]
    missing = sum(cell.missing for cell in asked)
    outside = sum(cell.missing and not plan.points_of(cell.row, cell.column) for cell in asked)
    within = f", {outside} of them not in scale {plan.scale}" if outside else ""
    notes.append(f"— not run: {missing} of {len(asked)} cells{within}")
    notes += [f"scale {scale} cannot run here: {reason}" for scale, reason in plan.config.cannot_run.items()]
    if any(cell.published and cell.planned for cell in cells):
        tolerance, far, twice = (_points(plan, factor * plan.spec.tolerance) for factor in (1, OUTRIGHT, 2))
        notes.append(
            f"verdicts: a seed succeeds if it is within {tolerance} of the {plan.spec.reference} or better; unstable: "
            f"one seed succeeds, and another diverged or is worse by more than {far}; otherwise the mean or the median "
            f"counts, whichever is farther from the {plan.spec.reference}; agrees: within {tolerance}; unclear: within "
            f"two standard errors and within {twice}; no verdict is given while a run is missing"
        )
        unjudged = {cell.verdict for cell in cells}
        if "other device" in unjudged:
            notes.append("other device: times, speeds and memory of two devices are not compared")
        if "at chance" in unjudged:
            notes.append(f"at chance: the {plan.spec.reference}'s number is within {tolerance} of a guess, or below it")
    if plan.spec.protocol:
        notes.append(f"other protocol: {' '.join(plan.spec.protocol.split())}")
    sources = sorted({cell.published.source for cell in cells if cell.published})
    if sources and (plan.cannot_run or any(cell.published and cell.planned for cell in cells)):
        notes.append(f"{plan.spec.reference}'s numbers from: {'; '.join(sources)}")
    return notes


def _points(plan: Plan, distance: float) -> str:
    """Text of a distance in the unit of the cells."""
    unit = "" if not plan.spec.percent else " point" if distance == 1 else " points"
    return f"{distance:g}{unit}"


def _changes(plan: Plan) -> str:
    """Text of the options that a reduced scale changes: `train.epochs: 20, model.d_model: [64]`."""
    scale = dict(plan.config.scales.get(plan.scale, {}))
    sweep: Mapping[str, Sequence[Any]] = scale.pop("sweep", {})
    changed = [f"{key}: {value}" for key, value in scale.items()]
    for axis, values in sweep.items():
        if any(isinstance(value, Mapping) for value in values):
            # such values are too long to print
            changed.append(f"{axis}: {len(values)} of {len(plan.config.sweep.get(axis, values))}")
        else:
            changed.append(f"{axis}: {values}")
    return ", ".join(changed)


def choices_are_listed(cells: Sequence[Cell]) -> bool:
    """Whether the values of `select.best_of` stand in the list of cells, because a footnote would name too many."""
    places = _places(cells, lambda cell: cell.chosen)
    return len({cell.column for cell in cells}) > 1 and sum(len(where) for _, where in places) > LONGEST_LIST


def _places(cells: Sequence[Cell], text: Callable[[Cell], str]) -> list[tuple[str, list[str]]]:
    """Every text that a cell has, in order, and the cells that have it.

    They are named as `row / column`, by the row alone where all cells of a row with a value have the text, and by
    nothing where all cells of the table with a value have it.
    """
    places: dict[str, list[Cell]] = {}
    for cell in cells:
        if text(cell):
            places.setdefault(text(cell), []).append(cell)
    filled = [cell for cell in cells if cell.mean is not None or text(cell)]
    if len(places) == 1 and len(filled) == len(*places.values()) > 1:
        return [(words, []) for words in places]
    named: list[tuple[str, list[str]]] = []
    for words, found in sorted(places.items()):
        names: dict[str, None] = {}
        for cell in found:
            row = [other for other in filled if other.row == cell.row]
            whole = len(row) > 1 and all(text(other) == words for other in row)
            names[cell.row if whole else f"{cell.row} / {cell.column}"] = None
        named.append((words, list(names)))
    return named


def provenance_of(runs: Sequence[StoredRun]) -> list[str]:
    """Devices, versions, commits and dates of the runs shown; empty where there are none."""
    if not runs:
        return []

    def listed(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "unknown"

    return [
        f"runs: {len(runs)}",
        f"device: {listed(run.device for run in runs)}",
        f"torch: {listed(run.torch for run in runs)}",
        f"precision: {listed(run.precision for run in runs)}",
        f"commit: {listed(run.commit for run in runs)}",
        f"dates: {days_of(runs) or 'unknown'}",
    ]
