"""A report as data: the paper's numbers beside ours, the claims, what it cost, and where every number comes from.

`build` is pure: an experiment's folder (grid.yaml parsed, expected.csv, claims.csv) and stored rows in, a `Report` out.
The formats only print what stands in it.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from reports.render.heatmap import KernelPanel, kernel_panel
from reports.render.rows import (
    LOWER_IS_BETTER,
    StoredRun,
    Value,
    grid_points,
    load_runs,
    matches,
    on_grid,
    one_device,
    planned_seeds,
    same,
    select_best,
    settle,
    slice_part,
)
from suite.bench.cases import spread
from suite.config import SECTIONS, ExperimentConfig, FigureSpec, TableSpec, lookup
from suite.registry import nearest

REDUCED, ONE_SEED, STAND_IN, SELECTED = "†", "‡", "§", "*"
"""Marks of a cell, explained under the table wherever they are used."""

UNPUBLISHED = {"oom": "oom", "fails": "fails", "not_reported": "not reported", "not_found": "not found"}
"""First word of a note in expected.csv, where the paper has no number, to what the cell shows."""

SHOWN = {"bytes": (2.0**-30, "GiB"), "tokens/s": (1e-3, "K tokens/s")}
"""Stored units that a table and a figure show in larger ones, and the factor between them."""

COMPARISONS: dict[str, Callable[[float, float, float], bool]] = {
    ">": lambda left, right, _: left > right,
    ">=": lambda left, right, _: left >= right,
    "<": lambda left, right, _: left < right,
    "~": lambda left, right, tolerance: abs(left - right) <= tolerance,
}


@dataclass(frozen=True)
class Published:
    """One value of expected.csv, in its own unit; `value` is None where the paper has none and `note` says why."""

    value: float | None
    decimals: int
    unit: str
    better: str
    """`higher`, `lower`, or empty where neither is better."""
    note: str
    source: str


@dataclass(frozen=True)
class Cell:
    """One row and column of the paper's table and what we have for it, in the shown unit."""

    row: str
    column: str
    published: Published | None = None
    mean: float | None = None
    sd: float | None = None
    """Sample standard deviation over seeds; None of a single one."""
    spread: float | None = None
    """Of the raw samples, where one run has them: half the distance between the quartiles over the median."""
    num_seeds: int = 0
    planned: int = 0
    """Seeds the grid asks for; 0 for a row that only the paper has."""
    failures: tuple[tuple[str, int], ...] = ()
    """(`diverged`, 1), ...: runs that gave no value."""
    marks: tuple[str, ...] = ()
    difference: float | None = None
    verdict: Literal["", "agrees", "unclear", "better", "worse", "differs"] = ""
    chosen: str = ""
    """The values of `select.best_of`, e.g. `train.lr=0.001 (best of 4)`."""
    run_ids: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Asked for by the grid, and no run has ended."""
        return bool(self.planned) and self.mean is None and not self.failures


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, checked on our means."""

    text: str
    formula: str
    source: str
    verdict: Literal["holds", "fails", "not run"]
    detail: str
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What one setting needs: medians over its runs on one device."""

    label: str
    device: str
    values: dict[str, tuple[float, float, float]]
    """Metric to median, smallest and largest sample."""
    run_ids: tuple[str, ...]
    length: str = ""
    """Sequence length behind `state_size`, e.g. `length=512`."""


@dataclass(frozen=True)
class Point:
    """A mean over seeds in a figure; sd is 0 where there is one seed."""

    x: Any
    y: float
    sd: float
    num_seeds: int


@dataclass(frozen=True)
class Series:
    """One line or set of bars: ours, and the paper's numbers where they are known."""

    label: str
    points: tuple[Point, ...]
    published: tuple[tuple[Any, float], ...] = ()
    ended: str = ""
    """Why there is no point behind the last one: `oom`."""


@dataclass(frozen=True)
class Figure:
    """The data of a figure: panels by title."""

    spec: FigureSpec
    panels: tuple[tuple[str, tuple[Series, ...]], ...]
    kernels: tuple[KernelPanel, ...] = ()
    """In place of panels where the figure shows kernels."""


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
    """What stands under the table: marks, what was selected, what is missing, the criterion."""
    claims: tuple[Claim, ...]
    costs: tuple[Cost, ...]
    provenance: tuple[str, ...]
    figure: Figure | None
    timed: bool = False
    """Whether the runs time operators, which have no seeds."""
    device: str = ""
    """Of a timed report, which has one only."""

    @property
    def has_published(self) -> bool:
        """Whether there is a number to compare with."""
        return any(cell.published for cell in self.cells)


def build(config: ExperimentConfig, folder: Path, frame: pd.DataFrame, *, scale: str | None = None) -> Report:
    """The report of one experiment.

    folder: where expected.csv and claims.csv may lie.
    frame: stored rows of the experiment, of any scales (`suite.storage.read`).
    scale: the one to show; None: `paper` if it has rows, else the first that has.
    """
    everything = load_runs(frame)
    scale = _pick_scale(config, everything, scale)
    points = grid_points(config, scale)
    runs, notes = on_grid([run for run in everything if run.scale == scale], points)
    if config.timed:
        runs, elsewhere = one_device(runs)
        notes += [f"left out, of another device than the newest run: {elsewhere} runs"] * bool(elsewhere)
    runs, tried = select_best(runs, config.select)
    spec = config.table or _plain_table(config, points)
    check_table(spec, str(folder), config.sections)
    published = read_expected(folder / "expected.csv")
    context = _Context(config, spec, scale, points, published, tried)
    settled: dict[tuple[str, str], list[StoredRun]] = {}
    stale: set[str] = set()
    cells = []
    for row, column in context.places():
        found = [run for run in runs if context.selects(row, column, run)]
        settled[row, column], _ = settle(found)
        stale |= {run.run_id for run in found} - {run.run_id for run in settled[row, column]}
        cells.append(context.cell(row, column, settled[row, column]))
    if stale:
        notes.append(f"left out, of an older setting than the newest run of their cell: {len(stale)} runs")
    shown = list({run.run_id: run for found in settled.values() for run in found}.values())
    source = config.source
    named = [] if source is None else [source.paper]
    if source is not None:
        kinds = (("table", source.table), ("figure", source.figure), ("section", source.section))
        named += [f"{kind} {value}" for kind, value in kinds if value is not None]
    return Report(
        experiment=_name(frame, folder),
        title=config.title,
        source=", ".join(named),
        scale=scale,
        unit="%" if spec.percent else _unit(spec, shown),
        decimals=max([p.decimals for p in published.values()] + [1]) if spec.decimals is None else spec.decimals,
        cells=tuple(cells),
        notes=tuple(context.notes(cells, shown) + notes),
        claims=tuple(check_claims(read_claims(folder / "claims.csv"), cells, spec, context.scale_marks)),
        costs=tuple(_costs(settled)),
        provenance=tuple(_provenance(shown)),
        figure=None if config.figure is None else context.figure(config.figure, settled),
        timed=config.timed,
        device=shown[0].device if config.timed and shown else "",
    )


def _unit(spec: TableSpec, runs: Sequence[StoredRun]) -> str:
    """The unit that all cells share, or nothing."""
    metrics = {column.get("metric", spec.metric) for column in spec.columns.values()}
    units = {value.unit for run in runs for value in run.values if value.metric in metrics}
    return SHOWN.get(unit, (1.0, unit))[1] if len(units) == 1 and (unit := units.pop()) != "fraction" else ""


def _shown(value: float, unit: str, percent: bool) -> float:
    """A stored value in the unit it is shown in."""
    return value * (100 if percent and unit == "fraction" else SHOWN.get(unit, (1.0, unit))[0])


def _name(frame: pd.DataFrame, folder: Path) -> str:
    if len(frame):
        return str(frame["experiment"].iloc[0])
    parts = folder.resolve().parts
    return "/".join(parts[parts.index("reports") + 1 :]) if "reports" in parts else folder.name


def _pick_scale(config: ExperimentConfig, runs: Sequence[StoredRun], asked: str | None) -> str:
    there = {run.scale for run in runs}
    if asked is not None:
        if asked not in config.scales:
            names = ", ".join(config.scales)
            raise ValueError(f"unknown scale {asked!r}{nearest(asked, config.scales)}; there are: {names}")
        return asked
    order = sorted(config.scales, key=lambda name: name != "paper")
    return next((name for name in order if name in there), next(iter(config.scales)))


def _plain_table(config: ExperimentConfig, points: Sequence[Mapping[str, Any]]) -> TableSpec:
    """For a grid without a table: a row for every point, named by what changes, and one column."""
    hidden = config.select.best_of if config.select else ()
    varying = [
        key
        for key in dict.fromkeys(key for point in points for key in point)
        if key not in hidden and len({str(point.get(key)) for point in points}) > 1
    ]
    rows = {
        ", ".join(f"{key}={point[key]}" for key in varying if key in point) or "all": {
            key: point[key] for key in varying if key in point
        }
        for point in points
    }
    if config.timed:
        lengths = dict.fromkeys(length for point in points for length in point.get("bench.lengths", ()))
        columns: dict[str, dict[str, Any]] = {f"T={length}": {"slice": f"length={length}"} for length in lengths}
        return TableSpec(rows=rows, columns=columns, metric="time", split="", percent=False, decimals=4)
    return TableSpec(rows=rows, columns={"accuracy": {}})


def check_table(spec: TableSpec, where: str, sections: Sequence[str] = SECTIONS) -> None:
    """Raises ValueError for a selector key that is neither a dotted key of a run nor a name of a measurement."""
    for kind, selectors in (("rows", spec.rows), ("columns", spec.columns)):
        words = ("slice", "metric", "split") if kind == "columns" else ()
        for label, selector in selectors.items():
            for key in selector:
                section, dot, _ = key.partition(".")
                if not (dot and section in sections) and key not in words:
                    allowed = ", ".join([*(f"{s}.<key>" for s in sections), *words])
                    raise ValueError(
                        f"{where}: table.{kind}.{label}: {key!r} selects nothing; a key is one of {allowed}"
                    )


def read_expected(path: Path) -> dict[tuple[str, str], Published]:
    """(row, column) to the published value; nothing where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (line["row"], line["column"]): Published(
                value=float(line["value"]) if line["value"] else None,
                decimals=len(line["value"].partition(".")[2]),
                unit=line["unit"],
                better=line["better"],
                note=line["note"],
                source=line["source"],
            )
            for line in csv.DictReader(file)
        }


def read_claims(path: Path) -> list[dict[str, str]]:
    """Lines of claims.csv (`claim,left,comparison,right,source`); none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def judge(mean: float, sd: float | None, num_seeds: int, value: float, tolerance: float, lower: bool) -> str:
    """`agrees` within the tolerance, `unclear` within two standard errors of our mean, else `better` or `worse`."""
    difference = mean - value
    error = 0.0 if sd is None else sd / math.sqrt(num_seeds)
    # a difference of exactly the tolerance must not hang on its last bit
    if abs(difference) <= tolerance + 1e-9:
        return "agrees"
    if abs(difference) <= 2 * error:
        return "unclear"
    return "better" if (difference < 0) == lower else "worse"


@dataclass(frozen=True)
class _Context:
    config: ExperimentConfig
    spec: TableSpec
    scale: str
    points: Sequence[Mapping[str, Any]]
    published: Mapping[tuple[str, str], Published]
    tried: Mapping[str, int]

    @property
    def reduced(self) -> bool:
        """Whether this scale is smaller than what it is compared with."""
        return self.scale != "paper" and bool(self.config.source or self.config.scales.get(self.scale))

    @property
    def scale_marks(self) -> tuple[str, ...]:
        return (REDUCED,) if self.reduced else ()

    def places(self) -> list[tuple[str, str]]:
        """The cells in table order; rows that only the paper has (chance, say) come first."""
        known = [row for row, column in self.published if column in self.spec.columns and row not in self.spec.rows]
        only = [(r, c) for r in dict.fromkeys(known) for c in self.spec.columns if (r, c) in self.published]
        return only + [(row, column) for row in self.spec.rows for column in self.spec.columns]

    def selects(self, row: str, column: str, run: StoredRun) -> bool:
        if row not in self.spec.rows:
            return False
        return matches({**self.spec.rows[row], **self.spec.columns[column]}, run.config)

    def measured(self, column: str, run: StoredRun) -> tuple[float | None, str]:
        """(value in the shown unit, how it ended): `ok`, a failure, or empty where nothing was measured."""
        if run.status != "ok":
            return None, run.status
        found = self._found(column, run)
        if found is None:
            return None, ""
        if found.value is None:
            return None, found.status if found.status != "ok" else "failed"
        return _shown(found.value, found.unit, self.spec.percent), "ok"

    def _found(self, column: str, run: StoredRun) -> Value | None:
        choice = self.spec.columns[column]
        metric, split = choice.get("metric", self.spec.metric), choice.get("split", self.spec.split)
        return run.find(metric, split, choice.get("slice", ""))

    def cell(self, row: str, column: str, runs: Sequence[StoredRun]) -> Cell:
        published = self.published.get((row, column))
        if row not in self.spec.rows:
            return Cell(row, column, published)
        results = {run: self.measured(column, run) for run in sorted(runs, key=lambda run: (run.seed, run.run_id))}
        values = [value for value, _ in results.values() if value is not None]
        ends = [end for _, end in results.values() if end not in ("ok", "")]
        samples = [found for run in runs if (found := self._found(column, run)) is not None]
        mean = statistics.fmean(values) if values else None
        sd = statistics.stdev(values) if len(values) > 1 else None
        stand_in = any(run.stand_in for run in runs)
        marks = [*self.scale_marks] if runs else []
        marks += [ONE_SEED] if len(values) == 1 and not self.config.timed else []
        marks += [STAND_IN] if stand_in else []
        chosen = self._chosen(runs)
        marks += [SELECTED] if chosen else []
        difference, verdict = None, ""
        if mean is not None and published is not None and published.value is not None and not stand_in:
            difference = mean - published.value
            # survivors of failed runs are no fair mean
            if not self.reduced and not ends:
                lower = self.spec.columns[column].get("metric", self.spec.metric) in LOWER_IS_BETTER
                verdict = judge(mean, sd, len(values), published.value, self.spec.tolerance, lower)
                if verdict in ("better", "worse") and not published.better:
                    verdict = "differs"
        return Cell(
            row=row,
            column=column,
            published=None if stand_in else published,
            mean=mean,
            sd=sd,
            spread=spread(samples[0].samples) if len(samples) == 1 else None,
            num_seeds=len(values),
            planned=max(planned_seeds(self.config, self.scale), len(runs)),
            failures=tuple((end, ends.count(end)) for end in sorted(set(ends))),
            marks=tuple(marks),
            difference=difference,
            verdict=verdict,  # type: ignore[arg-type]
            chosen=chosen,
            run_ids=tuple(run.run_id for run in results),
        )

    def _in_scale(self, row: str, column: str) -> bool:
        """Whether some point of the grid contradicts neither selector; keys it leaves at their default may be right."""
        wanted = {**self.spec.rows[row], **self.spec.columns[column]}
        length = slice_part(wanted.get("slice", ""), "length")
        return any(
            all(same(value, point.get(key, value)) for key, value in wanted.items())
            and length in point.get("bench.lengths", point.get("speed.lengths", [length]))
            for point in self.points
        )

    def _chosen(self, runs: Sequence[StoredRun]) -> str:
        if self.config.select is None or not runs:
            return ""
        values = ", ".join(f"{key}={lookup(runs[0].config, key)}" for key in self.config.select.best_of)
        return f"{values} (best of {self.tried[runs[0].run_id]})"

    def _narrowed(self, axis: str, values: Sequence[Any]) -> str:
        if any(isinstance(value, Mapping) for value in values):
            return f"{len(values)} of {len(self.config.sweep.get(axis, values))}"
        return str(values)

    def notes(self, cells: Sequence[Cell], runs: Sequence[StoredRun]) -> list[str]:
        """The lines under the table, in a fixed order, each only where it applies."""
        used = {mark for cell in cells for mark in cell.marks}
        notes = []
        if REDUCED in used:
            scale = dict(self.config.scales.get(self.scale, {}))
            sweep = scale.pop("sweep", {})
            changed = [f"{key}: {value}" for key, value in scale.items()]
            changed += [f"{axis}: {self._narrowed(axis, values)}" for axis, values in sweep.items()]
            changes = ", ".join(changed)
            notes.append(f"{REDUCED} reduced: scale {self.scale} ({changes}); no verdict against the paper")
        if ONE_SEED in used:
            notes.append(f"{ONE_SEED} one seed")
        if STAND_IN in used:
            reasons = "; ".join(sorted({run.stand_in for run in runs if run.stand_in}))
            notes.append(f"{STAND_IN} stand-in data, not comparable with the paper: {reasons}")
        if SELECTED in used and self.config.select is not None:
            select = self.config.select
            picks: dict[str, list[str]] = {}
            for cell in cells:
                if cell.chosen:
                    picks.setdefault(cell.chosen, []).append(f"{cell.row} / {cell.column}")
            which = "; ".join(f"{chosen}: {', '.join(places)}" for chosen, places in sorted(picks.items()))
            notes.append(f"{SELECTED} chosen by {select.split} {select.by}, mean over seeds: {which}")
        if self.config.timed:
            notes.append("median of raw samples; spread: half the distance between their quartiles over it")
        asked = [cell for cell in cells if cell.planned]
        missing = sum(cell.missing for cell in asked)
        outside = sum(cell.missing and not self._in_scale(cell.row, cell.column) for cell in asked)
        within = f", {outside} of them not in scale {self.scale}" if outside else ""
        notes.append(f"— not run: {missing} of {len(asked)} cells{within}")
        if any(cell.published and cell.planned for cell in cells):
            unit = "" if not self.spec.percent else " point" if self.spec.tolerance == 1 else " points"
            tolerance = f"{self.spec.tolerance:g}{unit}"
            notes.append(
                f"verdict: agrees if |difference| <= {tolerance}, unclear if <= two standard errors of our mean; "
                "none where a seed failed"
            )
            sources = sorted({cell.published.source for cell in cells if cell.published})
            notes.append(f"paper's numbers from: {'; '.join(sources)}")
        return notes

    def figure(self, spec: FigureSpec, settled: Mapping[tuple[str, str], Sequence[StoredRun]]) -> Figure:
        """Mean and spread over seeds for every table row, panel by panel; of kernels, those of the first seed."""
        if spec.kind == "kernels":
            found = [kernel_panel(row, self._runs_of(row, settled)) for row in self.spec.rows]
            return Figure(spec, (), tuple(panel for panel in found if panel is not None))
        panels: dict[str, list[Series]] = {}
        for row in self.spec.rows:
            points: dict[str, dict[Any, dict[str, float]]] = {}
            for (_, column), runs in ((place, runs) for place, runs in settled.items() if place[0] == row):
                for run in runs:
                    panel = "" if spec.panels is None else str(lookup(run.config, spec.panels))
                    for x, y in self._figure_values(spec, column, run):
                        points.setdefault(panel, {}).setdefault(x, {})[run.run_id] = y
            published = self._figure_published(spec, row)
            for panel in points or ({"": {}} if published else {}):
                drawn = []
                for x, by_run in sorted(points.get(panel, {}).items(), key=lambda item: item[0]):
                    values = list(by_run.values())
                    sd = statistics.stdev(values) if len(values) > 1 else 0.0
                    drawn.append(Point(x, statistics.fmean(values), sd, len(values)))
                if spec.x == "column":
                    order = {column: i for i, column in enumerate(self.spec.columns)}
                    drawn.sort(key=lambda point: order[point.x])
                ended = self._figure_end(spec, row, panel, settled, drawn)
                panels.setdefault(panel, []).append(Series(row, tuple(drawn), published, ended))
        return Figure(spec, tuple((title, tuple(series)) for title, series in panels.items()))

    def _runs_of(self, row: str, settled: Mapping[tuple[str, str], Sequence[StoredRun]]) -> list[StoredRun]:
        return list({run.run_id: run for place, runs in settled.items() if place[0] == row for run in runs}.values())

    def _figure_values(self, spec: FigureSpec, column: str, run: StoredRun) -> Iterable[tuple[Any, float]]:
        if run.status != "ok":
            return
        if spec.x == "step":
            wanted = [v for v in run.values if (v.metric, v.split, v.slice) == (spec.y, spec.split, "")]
        elif spec.x.startswith("slice."):
            wanted = [v for v in run.values if (v.metric, v.split) == (spec.y, spec.split) and v.slice]
        else:
            part = self.spec.columns[column].get("slice", "")
            found = run.find(spec.y, spec.split, part)
            wanted = [] if found is None else [found]
        for value in wanted:
            x: Any = {"step": value.step, "column": column}.get(spec.x)
            if spec.x.startswith("slice."):
                x = slice_part(value.slice, spec.x.removeprefix("slice."))
            elif x is None:
                x = lookup(run.config, spec.x)
            if value.value is not None and x is not None:
                yield x, _shown(value.value, value.unit, spec.percent)

    def _figure_end(
        self,
        spec: FigureSpec,
        row: str,
        panel: str,
        settled: Mapping[tuple[str, str], Sequence[StoredRun]],
        drawn: Sequence[Point],
    ) -> str:
        if not spec.x.startswith("slice.") or not drawn:
            return ""
        lost = [
            (slice_part(value.slice, spec.x.removeprefix("slice.")), value.status)
            for place, runs in settled.items()
            for run in runs
            if place[0] == row and (spec.panels is None or str(lookup(run.config, spec.panels)) == panel)
            for value in run.values
            if (value.metric, value.split) == (spec.y, spec.split) and value.slice and value.value is None
        ]
        behind = [(x, status) for x, status in lost if x is not None and x > drawn[-1].x]
        return min(behind)[1] if behind else ""

    def _figure_published(self, spec: FigureSpec, row: str) -> tuple[tuple[Any, float], ...]:
        # panels are values of a run, which a published number does not carry
        if spec.panels is not None or spec.x == "step":
            return ()
        found = []
        for column, selector in self.spec.columns.items():
            value = self.published.get((row, column))
            x: Any = column if spec.x == "column" else selector.get(spec.x)
            if spec.x.startswith("slice."):
                x = slice_part(selector.get("slice", ""), spec.x.removeprefix("slice."))
            if value is not None and value.value is not None and x is not None:
                found.append((x, value.value))
        return tuple(found)


def check_claims(
    lines: Sequence[Mapping[str, str]], cells: Sequence[Cell], spec: TableSpec, marks: tuple[str, ...] = ()
) -> list[Claim]:
    """Every claim on our means: `holds`, `fails`, or `not run` while a cell it needs is empty and none refutes it.

    A side is a number, `row | column`, or a ratio `row | column / row | column`; `*` for the column stands for every
    column, everywhere in the claim the same one.
    """
    means = {(cell.row, cell.column): cell.mean for cell in cells}
    claims = []
    for line in lines:
        sides = [_side(line[side], spec, line["claim"]) for side in ("left", "right")]
        if line["comparison"] not in COMPARISONS:
            allowed = ", ".join(COMPARISONS)
            raise ValueError(
                f"claims.csv: {line['claim']!r}: comparison {line['comparison']!r} is not one of {allowed}"
            )
        compare = COMPARISONS[line["comparison"]]
        starred = any("*" in term for side in sides for term in side)
        columns: Sequence[str] = list(spec.columns) if starred else [""]
        held, refuted, ratios = 0, [], []
        for column in columns:
            left, right = (_operand(side, column, means) for side in sides)
            if left is None or right is None:
                continue
            ratios += [value for side, value in zip(sides, (left, right), strict=True) if len(side) == 2]
            if compare(left, right, spec.tolerance):
                held += 1
            else:
                where = f" at {column}" if column else ""
                refuted.append(f"{left:.2f} against {right:.2f}{where}")
        verdict: Literal["holds", "fails", "not run"] = "holds"
        detail = f"{held} of {len(columns)}" if len(columns) > 1 else ""
        if ratios:
            # a cell shows its value, a ratio stands nowhere else
            span = f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else f"{ratios[0]:.3g}"
            detail = f"{detail}, {span}".lstrip(", ")
        if refuted:
            verdict, detail = "fails", "; ".join(refuted)
        elif held < len(columns):
            verdict = "not run"
        formula = f"{line['left']} {line['comparison']} {line['right']}"
        shown = marks if held or refuted else ()
        claims.append(Claim(line["claim"], formula, line["source"], verdict, detail, shown))
    return claims


def _side(text: str, spec: TableSpec, claim: str) -> tuple[tuple[str, ...], ...]:
    """The terms of one side: one, or two of a ratio."""
    # a label may hold a stroke, as in `steps / s`
    terms = text.split(" / ", 1) if text.count("|") == 2 else [text]
    return tuple(_term(term, spec, claim) for term in terms)


def _term(text: str, spec: TableSpec, claim: str) -> tuple[str, ...]:
    row, bar, column = (part.strip() for part in text.partition("|"))
    if not bar:
        try:
            float(row)
        except ValueError:
            raise ValueError(
                f"claims.csv: {claim!r}: {text!r} is neither a number nor `row | column` nor a ratio of two of them"
            ) from None
        return (row,)
    for name, names in ((row, [*spec.rows]), (column, [*spec.columns, "*"])):
        if name not in names:
            raise ValueError(f"claims.csv: {claim!r}: no {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
    return row, column


def _operand(
    side: tuple[tuple[str, ...], ...], column: str, means: Mapping[tuple[str, str], float | None]
) -> float | None:
    found = []
    for term in side:
        value = float(term[0]) if len(term) == 1 else means.get((term[0], column if term[1] == "*" else term[1]))
        if value is None:
            return None
        found.append(value)
    if len(found) == 1:
        return found[0]
    return found[0] / found[1] if found[1] else None


COST_METRICS = (
    "num_parameters",
    "state_size",
    "train_throughput",
    "inference_throughput",
    "decode_throughput",
    "peak_memory",
    "peak_rss",
)


def _costs(settled: Mapping[tuple[str, str], Sequence[StoredRun]]) -> list[Cost]:
    """One line for every row, setting and device; a row whose columns share their runs has one."""
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
            runs = [by_id[i] for i in ids if by_id[i].device == device]
            values: dict[str, tuple[float, float, float]] = {}
            length = ""
            for metric in COST_METRICS:
                samples: list[float] = []
                for run in runs:
                    for value in (v for v in run.values if v.metric == metric and v.value is not None):
                        if metric == "state_size":
                            length = value.slice
                        elif value.slice:
                            # a speed at one of several lengths, which are not pooled
                            continue
                        samples += value.samples or (value.value,)  # type: ignore[arg-type]
                if samples:
                    values[metric] = statistics.median(samples), min(samples), max(samples)
            if not values:
                continue
            costs.append(Cost(label, device, values, tuple(run.run_id for run in runs), length))
    return costs


def _provenance(runs: Sequence[StoredRun]) -> list[str]:
    if not runs:
        return []

    def listed(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "unknown"

    dates = sorted(run.started_at[:10] for run in runs if run.started_at)
    return [
        f"runs: {len(runs)}",
        f"device: {listed(run.device for run in runs)}",
        f"torch: {listed(run.torch for run in runs)}",
        f"precision: {listed(run.precision for run in runs)}",
        f"commit: {listed(run.commit for run in runs)}",
        f"dates: {dates[0]} to {dates[-1]}" if dates else "dates: unknown",
    ]
