"""The data of a report's figure: median and every seed's value for every table row, panel by panel; and its colours.

A family of models has one colour in every figure and on every page. Several rows of one family in a figure, such as
attention with two kinds of positions, have shades of it. A name of no known family takes a colour that the figure does
not use otherwise. Rows whose colours are near to each other have different marks.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

from subquad.reports.render.document import shown
from subquad.reports.render.judge import Cell, Sensitivity, plain
from subquad.reports.render.plan import Plan, slice_part
from subquad.reports.render.rows import StoredRun, Value
from subquad.reports.render.selection import Settled, commonest_device
from subquad.suite.registry import counted
from subquad.suite.settings.grid import lookup, order
from subquad.suite.settings.report_spec import FigureSpec


@dataclass(frozen=True)
class Point:
    """A median over seeds, and the value of each of them.

    A figure shows the values, because a standard deviation around the mean passes 100 % where one seed fails, and the
    median, because no seed is near the mean where some succeed and others are at chance.
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
    if spec.kind in ("seeds", "costs", "curves", "cells"):
        return Figure(spec, (), cells=tuple(cells) if any(cell.mean is not None for cell in cells) else ())
    device = ""
    if spec.x.endswith(("throughput", "train_seconds")):
        kept, elsewhere = commonest_device([run for runs in settled.values() for run in runs])
        settled = {place: [run for run in runs if run in kept] for place, runs in settled.items()}
        if kept:
            others = f"; {counted(elsewhere)} on others not shown" if elsewhere else ""
            device = f"{kept[0].device or 'unknown device'}{others}"
    panels: dict[str, list[Series]] = {}
    for row in plan.spec.rows:
        points: dict[str, dict[Any, dict[str, float]]] = {}
        for (_, column), runs in ((place, runs) for place, runs in settled.items() if place[0] == row):
            cost = _cost(spec, runs)
            for run in runs:
                for x, y in _values(plan, spec, (row, column), run, cost):
                    points.setdefault(_panel(spec, run), {}).setdefault(x, {})[run.run_id] = y
        published = _published(plan, spec, row)
        for panel in points or ({"": {}} if published else {}):
            drawn = []
            for x, by_run in sorted(points.get(panel, {}).items(), key=lambda item: order(item[0])):
                values = tuple(sorted(by_run.values()))
                drawn.append(Point(x, statistics.median(values), values))
            if spec.x == "column":
                place = {column: i for i, column in enumerate(plan.spec.columns)}
                drawn.sort(key=lambda point: place[point.x])
            ended = _ended(plan, spec, row, panel, settled, drawn)
            panels.setdefault(panel, []).append(Series(row, tuple(drawn), published, ended))
    drawn_panels = tuple((title, tuple(series)) for title, series in panels.items())
    return Figure(spec, drawn_panels, reference=plan.spec.reference, device=device)


def _runs_of(row: str, settled: Settled) -> list[StoredRun]:
    return list({run.run_id: run for place, runs in settled.items() if place[0] == row for run in runs}.values())


def _panel(spec: FigureSpec, run: StoredRun) -> str:
    """Title of the panel that a run belongs to."""
    return "" if spec.panels is None else str(lookup(run.config, spec.panels))


def _cost(spec: FigureSpec, runs: Sequence[StoredRun]) -> float | None:
    """The x of a point in a figure over a cost: its median over the runs; None in other figures."""
    if not spec.x.startswith("metric."):
        return None
    found = [value for run in runs for value in run.costs(spec.x.removeprefix("metric."))]
    return statistics.median(found) if found else None


def _values(
    plan: Plan, spec: FigureSpec, place: tuple[str, str], run: StoredRun, cost: float | None
) -> Iterator[tuple[Any, float]]:
    """(x, y) of every measurement of a run that the figure shows for a cell (row, column), y in the shown unit."""
    if run.status != "ok":
        return
    for value in _measurements(plan, spec, place, run):
        x: Any = {"step": value.step, "column": place[1]}.get(spec.x, cost)
        if spec.x.startswith("slice."):
            x = slice_part(value.slice, spec.x.removeprefix("slice."))
        elif x is None:
            x = plain(lookup(run.config, spec.x))
        if value.value is not None and x is not None:
            yield x, shown(value.value, value.unit, spec.percent)


def _measurements(plan: Plan, spec: FigureSpec, place: tuple[str, str], run: StoredRun) -> list[Value]:
    if spec.x == "step":
        return run.values.of(spec.y, spec.split, "")
    if spec.x.startswith("slice."):
        return _of_slices(plan, spec, place[0], run)
    found = run.find(spec.y, spec.split, plan.spec.part(*place))
    return [] if found is None else [found]


def _of_slices(plan: Plan, spec: FigureSpec, row: str, run: StoredRun) -> list[Value]:
    """The values that a run measured on slices of its split, of our model or of the library that the row shows."""
    library = plan.spec.peer_of(row)
    found = [value for value in run.values.of_metric(spec.y) if value.split == spec.split and value.slice]
    return [value for value in found if slice_part(value.slice, "against") == library]


def _ended(plan: Plan, spec: FigureSpec, row: str, panel: str, settled: Settled, drawn: Sequence[Point]) -> str:
    """The status of the nearest x beyond the last point that has a row and no value; empty where there is none."""
    if not spec.x.startswith("slice.") or not drawn:
        return ""
    lost = [
        (slice_part(value.slice, spec.x.removeprefix("slice.")), value.status)
        for place, runs in settled.items()
        for run in runs
        if place[0] == row and _panel(spec, run) == panel
        for value in _of_slices(plan, spec, row, run)
        if value.value is None
    ]
    beyond = [(order(x), status) for x, status in lost if x is not None and order(x) > order(drawn[-1].x)]
    return min(beyond)[1] if beyond else ""


def _published(plan: Plan, spec: FigureSpec, row: str) -> tuple[tuple[Any, float], ...]:
    # a panel or a step is a value of a run, which a published number does not carry
    if spec.panels is not None or spec.x == "step":
        return ()
    found = []
    for column, selector in plan.spec.columns.items():
        value = None if plan.is_speedup(column) else plan.published.get((row, column))
        x: Any = column if spec.x == "column" else plain(selector.get(spec.x))
        if spec.x.startswith("slice."):
            x = slice_part(selector.get("slice", ""), spec.x.removeprefix("slice."))
        if value is not None and value.value is not None and x is not None:
            found.append((x, value.value))
    return tuple(found)


@dataclass(frozen=True)
class KernelPanel:
    """The kernels and eigenvalues that one run recorded (`suite/training/learned_kernels.py`)."""

    title: str
    layers: tuple[int, ...]
    """Layer of each kernel, ascending."""
    kernels: tuple[tuple[float, ...], ...]
    """Points of each kernel."""
    span: int
    """Number of lags that a point stands for."""
    eigenvalues: tuple[tuple[float, float], ...]
    """Real and imaginary parts after training."""
    initial: tuple[tuple[float, float], ...]
    """Real and imaginary parts before the first step."""


def kernel_panel(title: str, runs: Sequence[StoredRun]) -> KernelPanel | None:
    """The panel of the first seed that recorded kernels, or None where none did."""
    for run in sorted((run for run in runs if run.status == "ok"), key=lambda run: (run.seed, run.run_id)):
        rows = [value for value in run.values.of_metric("kernel") if value.samples]
        if not rows:
            continue
        spans = {slice_part(row.slice, "span") for row in rows}
        assert len(spans) == 1, "one probe has one span"
        return KernelPanel(
            title=f"{title} (stand-in data)" if run.stand_in else title,
            layers=tuple(int(slice_part(row.slice, "layer") or 0) for row in rows),
            kernels=tuple(row.samples for row in rows),
            span=int(spans.pop() or 1),
            eigenvalues=_eigenvalues(run, start=False),
            initial=_eigenvalues(run, start=True),
        )
    return None


def _eigenvalues(run: StoredRun, start: bool) -> tuple[tuple[float, float], ...]:
    real, imag = (
        [x for v in run.values.of_metric(metric) if v.slice.startswith("at=start") == start for x in v.samples]
        for metric in ("eigenvalue_real", "eigenvalue_imag")
    )
    return tuple(zip(real, imag, strict=True))


FAMILIES = {
    r"linear attention|linear-attention|lightning|based": "#e69f00",
    r"attention|flashattention|transformer|xfmr|gpt|mha|sdpa|pythia|llama": "#6b6b6b",
    r"gated[ -]deltanet|deltanet|delta[ -]?product|kda|comba|mesanet": "#6a5acd",
    r"retnet": "#a6841b",
    r"gla": "#56b4e9",
    r"hgrn2": "#009e73",
    r"abc": "#cc79a7",
    r"gsa": "#d55e00",
    r"sashimi": "#aa4499",
    r"rwkv": "#4d7c8a",
    r"mlstm|slstm|xlstm": "#c2185b",
    r"dss": "#17a2a2",
    r"s4d": "#98a010",
    r"s4|s6|ssm": "#8c564b",
    r"gss|gated state spaces": "#9467bd",
    r"h3": "#0072b2",
    r"hyena|hyenadna": "#882255",
    r"mamba|scan": "#2a8a2a",
    r"convolution": "#bb5566",
    r"triton": "#4477aa",
    r"pytorch|torch": "#e07b6a",
}
"""Pattern of a name to the colour of its family, which is visible on a white and on a black background."""
OTHERS = ("#66a61e", "#aa3377", "#bb9f24", "#3aa6c4", "#ee6677", "#7f7f7f")
"""Colours of names that belong to no family, such as implementations of an operator."""
SHADES = (0.0, 0.38, -0.35, 0.6)
"""Shades of a family in the order in which a figure uses them: towards white where positive, else towards black."""

MARKERS = "osD^vP*X<>"
"""Marks of rows, by the names that matplotlib has for them."""


def _family(label: str) -> tuple[int, str] | None:
    """The first place at which a label names a family, and that family's colour; None without a family."""
    places = []
    for pattern, color in FAMILIES.items():
        found = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z])", label.lower())
        if found:
            places.append((found.start(), -len(found.group()), color))
    if not places:
        return None
    start, _, color = min(places)
    return start, color


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """The colour of every label of one figure, as `#rrggbb`."""
    members: dict[str, list[tuple[int, int, str]]] = {}
    unknown = 0
    for label in dict.fromkeys(labels):
        found = _family(label)
        if found is None:
            found = 0, OTHERS[unknown % len(OTHERS)]
            unknown += 1
        members.setdefault(found[1], []).append((found[0], len(label), label))
    colors = {}
    for base, found_in in members.items():
        # the family's own colour is for its plain name, which begins with it and is the shortest
        for i, (_, _, label) in enumerate(sorted(found_in, key=lambda member: member[:2])):
            colors[label] = shade(base, SHADES[i % len(SHADES)])
    return colors


def looks_of(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The colour and the mark of every label of one figure.

    Each mark is used once before one is used again, and then the one whose labels are farthest from this one's colour,
    as it looks without green cones: such eyes know a colour by its brightness and its blue.
    """
    labels = tuple(dict.fromkeys(labels))
    colors = colors_of(labels)
    users: dict[str, list[tuple[float, int]]] = {mark: [] for mark in MARKERS}
    looks = {}
    for label in labels:
        red, green, blue = _parts(colors[label])
        seen = 0.3 * red + 0.7 * green, blue

        def distance(mark: str, seen: tuple[float, int] = seen) -> float:
            return min((max(map(abs, map(sub, seen, other))) for other in users[mark]), default=math.inf)

        mark = max(MARKERS, key=distance)
        users[mark].append(seen)
        looks[label] = colors[label], mark
    return looks


def _parts(color: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`."""
    red, green, blue = bytes.fromhex(color[1:])
    return red, green, blue


def shade(color: str, amount: float) -> str:
    """A colour moved towards white by a share `amount`, or towards black where it is negative."""
    target = 255 if amount > 0 else 0
    return "#" + "".join(f"{round(part + (target - part) * abs(amount)):02x}" for part in _parts(color))
