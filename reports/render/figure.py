"""The data of a report's figure: the mean and every seed's value for every table row, panel by panel."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.render.cells import Cell
from reports.render.heatmap import KernelPanel, kernel_panel
from reports.render.plan import Plan
from reports.render.rows import StoredRun, Value, commonest_device, slice_part
from reports.render.sensitivity import Sensitivity, plain
from reports.render.units import shown
from suite.registry import counted
from suite.settings.grid import lookup, order
from suite.settings.report_spec import FigureSpec

Settled = Mapping[tuple[str, str], Sequence[StoredRun]]
"""(row, column) to the runs that its cell shows."""


@dataclass(frozen=True)
class Point:
    """A mean over seeds, and the value of each of them.

    A figure shows the values, because a standard deviation around the mean passes 100 % where one seed fails.
    """

    x: Any
    """A number or a word."""
    y: float
    seeds: tuple[float, ...]
    """Ascending; one value where there is one seed."""


@dataclass(frozen=True)
class Series:
    """One line or set of bars: our points, and the paper's (x, y) where they are known."""

    label: str
    points: tuple[Point, ...]
    published: tuple[tuple[Any, float], ...] = ()
    ended: str = ""
    """The reason why there is no point beyond the last one, e.g. `oom`."""


@dataclass(frozen=True)
class Figure:
    """The data of a figure."""

    spec: FigureSpec
    panels: tuple[tuple[str, tuple[Series, ...]], ...]
    """Title and series of each panel; empty where the figure shows cells, learned kernels or successes."""
    cells: tuple[Cell, ...] = ()
    costs: tuple[tuple[str, float], ...] = ()
    """Pairs of a row and its cost, of the rows that have one; empty where `spec.x` names no cost."""
    kernels: tuple[KernelPanel, ...] = ()
    successes: tuple[Sensitivity, ...] = ()
    reference: str = "paper"
    """Source of the numbers beside ours, see `TableSpec.reference`."""
    device: str = ""
    """The device of the runs that a figure over a speed shows, and how many runs of other devices it leaves out."""

    @property
    def x_label(self) -> str:
        """The name of the horizontal axis, on a second line the device."""
        name = self.spec.x_label or self.spec.x * (self.spec.x != "column")
        return f"{name}\n{self.device}" if self.device else name

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (self.cells or self.kernels or self.successes) and not any(
            s.points or s.published for _, panel in self.panels for s in panel
        )


def make_figure(
    plan: Plan, spec: FigureSpec, settled: Settled, sensitivity: Sequence[Sensitivity] = (), cells: Sequence[Cell] = ()
) -> Figure:
    """The figure that `spec` asks for; a figure of learned kernels shows those of the first seed, and one over a speed
    the runs of the device that most runs used, because speeds of two devices are never compared."""
    if spec.kind == "successes":
        return Figure(spec, (), successes=tuple(sensitivity))
    if spec.kind == "kernels":
        found = [kernel_panel(row, _runs_of(row, settled)) for row in plan.spec.rows]
        return Figure(spec, (), kernels=tuple(panel for panel in found if panel is not None))
    device = ""
    if spec.x.endswith("throughput"):
        kept, elsewhere = commonest_device([run for runs in settled.values() for run in runs])
        settled = {place: [run for run in runs if run in kept] for place, runs in settled.items()}
        if kept:
            others = f"; {counted(elsewhere)} on others not shown" if elsewhere else ""
            device = f"{kept[0].device or 'unknown device'}{others}"
    if spec.kind == "cells":
        costs = [(row, _cost(spec, _runs_of(row, settled))) for row in plan.spec.rows]
        return Figure(
            spec,
            (),
            cells=tuple(cells) if any(cell.mean is not None for cell in cells) else (),
            costs=tuple((row, cost) for row, cost in costs if cost is not None),
            device=device,
        )
    panels: dict[str, list[Series]] = {}
    for row in plan.spec.rows:
        points: dict[str, dict[Any, dict[str, float]]] = {}
        for (_, column), runs in ((place, runs) for place, runs in settled.items() if place[0] == row):
            cost = _cost(spec, runs)
            for run in runs:
                for x, y in _values(plan, spec, column, run, cost):
                    points.setdefault(_panel(spec, run), {}).setdefault(x, {})[run.run_id] = y
        published = _published(plan, spec, row)
        for panel in points or ({"": {}} if published else {}):
            drawn = []
            for x, by_run in sorted(points.get(panel, {}).items(), key=lambda item: order(item[0])):
                values = tuple(sorted(by_run.values()))
                drawn.append(Point(x, statistics.fmean(values), values))
            if spec.x == "column":
                place = {column: i for i, column in enumerate(plan.spec.columns)}
                drawn.sort(key=lambda point: place[point.x])
            ended = _ended(spec, row, panel, settled, drawn)
            panels.setdefault(panel, []).append(Series(row, tuple(drawn), published, ended))
    drawn_panels = tuple((title, tuple(series)) for title, series in panels.items())
    return Figure(spec, drawn_panels, reference=plan.spec.reference, device=device)


def _runs_of(row: str, settled: Settled) -> list[StoredRun]:
    return list({run.run_id: run for place, runs in settled.items() if place[0] == row for run in runs}.values())


def _panel(spec: FigureSpec, run: StoredRun) -> str:
    """Title of the panel that a run belongs to."""
    return "" if spec.panels is None else str(lookup(run.config, spec.panels))


def _cost(spec: FigureSpec, runs: Sequence[StoredRun]) -> float | None:
    """The x of a cell in a figure over a cost: its median over the runs; None in other figures."""
    found = [
        value.value
        for run in runs
        for value in run.values.of_metric(spec.x.removeprefix("metric."))
        if spec.x.startswith("metric.") and value.value is not None
    ]
    return statistics.median(found) if found else None


def _values(
    plan: Plan, spec: FigureSpec, column: str, run: StoredRun, cost: float | None
) -> Iterator[tuple[Any, float]]:
    """(x, y) of every measurement of a run that the figure shows, y in the shown unit."""
    if run.status != "ok":
        return
    for value in _measurements(plan, spec, column, run):
        x: Any = {"step": value.step, "column": column}.get(spec.x, cost)
        if spec.x.startswith("slice."):
            x = slice_part(value.slice, spec.x.removeprefix("slice."))
        elif x is None:
            x = plain(lookup(run.config, spec.x))
        if value.value is not None and x is not None:
            yield x, shown(value.value, value.unit, spec.percent)


def _measurements(plan: Plan, spec: FigureSpec, column: str, run: StoredRun) -> list[Value]:
    if spec.x == "step":
        return run.values.of(spec.y, spec.split, "")
    if spec.x.startswith("slice."):
        return [v for v in run.values.of_metric(spec.y) if v.split == spec.split and v.slice]
    found = run.find(spec.y, spec.split, plan.spec.columns[column].get("slice", ""))
    return [] if found is None else [found]


def _ended(spec: FigureSpec, row: str, panel: str, settled: Settled, drawn: Sequence[Point]) -> str:
    """The status of the nearest x beyond the last point that has a row and no value; empty where there is none."""
    if not spec.x.startswith("slice.") or not drawn:
        return ""
    lost = [
        (slice_part(value.slice, spec.x.removeprefix("slice.")), value.status)
        for place, runs in settled.items()
        for run in runs
        if place[0] == row and _panel(spec, run) == panel
        for value in run.values.of_metric(spec.y)
        if value.split == spec.split and value.slice and value.value is None
    ]
    beyond = [(order(x), status) for x, status in lost if x is not None and order(x) > order(drawn[-1].x)]
    return min(beyond)[1] if beyond else ""


def _published(plan: Plan, spec: FigureSpec, row: str) -> tuple[tuple[Any, float], ...]:
    # a panel or a step is a value of a run, which a published number does not carry
    if spec.panels is not None or spec.x == "step":
        return ()
    found = []
    for column, selector in plan.spec.columns.items():
        value = plan.published.get((row, column))
        x: Any = column if spec.x == "column" else plain(selector.get(spec.x))
        if spec.x.startswith("slice."):
            x = slice_part(selector.get("slice", ""), spec.x.removeprefix("slice."))
        if value is not None and value.value is not None and x is not None:
            found.append((x, value.value))
    return tuple(found)
