"""The history of the operators' speed: the newest time of every case, comparisons of revisions, and their figure.

Times of different runs are shown side by side and never divided: a ratio comes from one run on one device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from subquad.reports.render.document import DASH, Document, Grid
from subquad.reports.render.figure import colors_of
from subquad.suite.bench.cases import SETS
from subquad.suite.environment import CALL
from subquad.suite.store.documents import verdict_in
from subquad.suite.store.storage import TEXTS


@dataclass(frozen=True)
class Point:
    """One measured case of one run."""

    op: str
    """Name of the operator."""
    case: str
    """`B8 T2048 D2048 W4 bfloat16`."""
    direction: str
    implementation: str
    device: str
    commit: str
    started_at: str
    run_id: str
    samples: tuple[float, ...]
    value: float | None
    status: str
    error: str
    others: dict[str, float]
    """The metrics `floor_time`, `peak_extra_memory` and `cold_start` of the same case and run."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.device, self.op, self.case, self.direction, self.implementation

    @property
    def share_of_floor(self) -> float | None:
        """The floor over the median time in percent, or None where either was not measured."""
        floor = self.others.get("floor_time")
        return None if floor is None or not self.value else 100 * floor / self.value

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quartiles of the samples, between which half of them lie; for a single sample, twice its value."""
        assert self.value is not None
        if len(self.samples) < 2:
            return self.value, self.value
        low, _, high = statistics.quantiles(self.samples, n=4)
        return low, high


def points_of(frame: pd.DataFrame) -> list[Point]:
    """The measured cases of all runs of `bench` for the sets of shapes that it offers, oldest first."""
    return sorted(_points(_shown(frame)), key=lambda point: point.started_at)


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the sets of shapes that `bench` offers, with an empty text where there is none."""
    # a copy, because other readers have the frame, too
    return frame[frame["scale"].isin(SETS)].fillna({name: "" for name in TEXTS if name in frame})


def _points(frame: pd.DataFrame) -> Iterator[Point]:
    columns = ["run_id", "task", "model", "slice", "device", "commit"]
    others: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in frame[frame["metric"].isin(["floor_time", "peak_extra_memory", "cold_start"])].to_dict("records"):
        others.setdefault(tuple(row[name] for name in columns), {})[row["metric"]] = row["value"]
    for row in frame[frame["metric"] == "time"].to_dict("records"):
        case, direction = case_of(row["slice"])
        yield Point(
            op=row["task"],
            case=case,
            direction=direction,
            implementation=row["model"],
            device=row["device"],
            commit=row["commit"] or "unknown",
            started_at=row["started_at"],
            run_id=row["run_id"],
            samples=tuple(row["samples"]) if row["samples"] is not None else (),
            value=None if pd.isna(row["value"]) else float(row["value"]),
            status=row["status"],
            error=row["error"],
            others=others.get(tuple(row[name] for name in columns), {}),
        )


def case_of(slice: str) -> tuple[str, str]:
    """`B=8,T=64,decay=key,dtype=bfloat16,pass=forward` as ("B8 T64 key bfloat16", "forward")."""
    pairs = dict(part.split("=", 1) for part in slice.split(","))
    direction = pairs.pop("pass")
    return " ".join(f"{key}{value}" if value.isdigit() else value for key, value in pairs.items()), direction


def draw_speed(points: Sequence[Point]) -> Any:
    """One panel for each operator, one line for each case, on the device of the newest row; None without rows.

    points: oldest first.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from subquad.reports.render.lines import MARKERS
    from subquad.reports.render.sheet import STYLE

    measured = [point for point in points if point.share_of_floor is not None]
    if not measured:
        return None
    device = measured[-1].device
    operators: dict[str, dict[str, list[Point]]] = {}
    for point in measured:
        if point.device == device:
            operators.setdefault(point.op, {}).setdefault(f"{point.case}, {point.direction}", []).append(point)
    operators = dict(sorted(operators.items()))
    names = sorted(
        {point.implementation for cases in operators.values() for found in cases.values() for point in found}
    )
    colors = colors_of(names)
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}
    rows = [len(cases) for cases in operators.values()]
    with matplotlib.rc_context({**STYLE, "font.size": 8}):
        canvas = Figure(figsize=(9, 1.2 + 0.5 * len(rows) + 0.17 * sum(rows)), layout="constrained")
        FigureCanvasAgg(canvas)
        # a panel is as high as its lines, and half a line more above and below
        axes = canvas.subplots(
            len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in rows]}
        )[:, 0]
        for ax, (operator, cases) in zip(axes, operators.items(), strict=True):
            for y, found in enumerate(cases.values()):
                newest = {point.implementation: point for point in found}
                for point in found:
                    color, marker = colors[point.implementation], markers[point.implementation]
                    share, is_newest = point.share_of_floor, point is newest[point.implementation]
                    ax.plot(share, y, marker, ms=5, color=color, mfc=color if is_newest else "none", mew=0.7)
                    if is_newest and share is not None and point.value is not None:
                        # the share at the upper and at the lower quartile of the time
                        ends = [share * point.value / quartile for quartile in point.quartiles]
                        ax.plot(ends, [y, y], color=color, lw=1.2)
            ax.set_yticks(range(len(cases)), list(cases))
            ax.set_ylim(len(cases) - 0.5, -0.5)
            ax.set_title(operator, loc="left")
        axes[-1].set_xlim(left=0)
        axes[-1].set_xlabel("share of the floor (%)")
        handles = [Line2D([], [], ls="none", marker=markers[name], ms=5, color=colors[name]) for name in names]
        handles.append(Line2D([], [], ls="none", marker="o", ms=5, color="black", mfc="none", mew=0.7))
        canvas.legend(handles, [*names, "earlier commit"], loc="outside lower center", frameon=False, ncols=5)
        canvas.suptitle(f"speed of the operators, {device}", fontsize=10)
    return canvas


def history(frame: pd.DataFrame) -> Document:
    """The document of stored benchmark rows (experiment `kernels`), of any devices, shapes and commits.

    Only the sets of shapes that `bench` offers are shown. Other rows, e.g. those of planted slowdowns, do not measure a
    revision.
    """
    frame = _shown(frame)
    points = points_of(frame)
    newest = {point.key: point for point in points}
    counts: dict[tuple[str, ...], int] = {}
    for point in points:
        counts[point.key] = counts.get(point.key, 0) + (point.value is not None)
    # sorting is stable, so cases keep the order of the newest benchmark, which is that of the operators' tables
    shown = sorted(newest.values(), key=lambda point: (point.device, point.op))
    header = ("operator", "case", "pass", "implementation", "median ms", "spread", "of floor", "extra MiB", "cold s")
    lines = tuple((*_line(point), point.commit[:10], str(counts[point.key])) for point in shown)
    grids = [Grid("", (*header, "commit", "times"), lines, 4, tuple((point.run_id,) for point in shown))]
    compared = list(_comparisons(frame))
    if compared:
        titles = ("operator", "case", "implementation", "verdict", "base", "this", "ratio", "95 % interval", "noise")
        heading = "Revisions against each other, on one device in one run"
        grids.append(Grid(heading, titles, tuple(compared), 4, ((),) * len(compared)))
    reasons = dict.fromkeys(f"{p.implementation} ({p.op}): {p.status}: {p.error}" for p in shown if p.value is None)
    devices = sorted({point.device for point in points})
    commits = dict.fromkeys(point.commit[:10] for point in points)
    return Document(
        name="kernels",
        title="kernels: speed of the operators",
        where=f"device: {'; '.join(devices) or 'none'}; median of raw samples, newest run of each case",
        grids=tuple(grids),
        notes=(
            "spread: half the distance between the quartiles. of floor: least time the bytes or the matrix products "
            "need on this device, over the median. times: how many runs measured the case.",
            *reasons,
        )
        if points
        else (f"No benchmark has run; start one with: {CALL} bench",),
        provenance=(
            f"runs: {frame['run_id'].nunique()}",
            f"commits: {', '.join(commits) or 'none'}",
            f"torch: {', '.join(sorted(set(frame['torch']))) or 'none'}",
            f"triton: {', '.join(sorted(set(frame['triton']))) or 'none'}",
        ),
        draw=lambda width="page": draw_speed(points),
    )


def _line(point: Point) -> tuple[str, ...]:
    where = (point.op, point.case, point.direction, point.implementation)
    if point.value is None:
        return (*where, point.status, "", "", "", "")
    low, high = point.quartiles
    extra, cold = (point.others.get(name) for name in ("peak_extra_memory", "cold_start"))
    share = point.share_of_floor
    return (
        *where,
        f"{point.value:.4f}",
        f"{(high - low) / 2 / point.value:.1%}",
        DASH if share is None else f"{share:.0f}%",
        DASH if extra is None else f"{extra / 2**20:.1f}",
        DASH if cold is None else f"{cold:.1f}",
    )


def _comparisons(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    found = frame[(frame["metric"] == "ratio") & frame["value"].notna()]
    for row in found.sort_values("started_at", kind="stable").to_dict("records"):
        config = verdict_in(row["config"])
        case, direction = case_of(row["slice"])
        yield (
            row["task"],
            f"{case} {direction}",
            row["model"],
            config["verdict"],
            config["base"][:10],
            (row["commit"] or "unknown")[:10],
            f"{row['value']:.3f}",
            f"[{config['low']:.3f}, {config['high']:.3f}]",
            f"{config['noise']:.1%}",
        )
