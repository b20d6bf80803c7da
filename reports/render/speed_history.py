"""The history of the operators' speed: the newest time of every case, comparisons of revisions.

Times of different runs are shown side by side and never divided: a ratio comes from one run on one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from reports.render.document import DASH, Document, Grid
from reports.render.speed_figure import draw_speed
from reports.render.speed_points import Point, case_of, points_of
from suite.bench.cases import SETS


def history(frame: pd.DataFrame) -> Document:
    """The document of stored benchmark rows (experiment `kernels`), of any devices, shapes and commits.

    Only the sets of shapes that `bench` offers are shown. Other rows, e.g. those of planted slowdowns, do not measure a
    revision.
    """
    frame = frame[frame["scale"].isin(SETS)]
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
        else ("No benchmark has run; start one with: python run_suite.py bench",),
        provenance=(
            f"runs: {frame['run_id'].nunique()}",
            f"commits: {', '.join(commits) or 'none'}",
            f"torch: {', '.join(sorted(set(frame['torch']))) or 'none'}",
            f"triton: {', '.join(sorted(set(frame['triton']))) or 'none'}",
        ),
        draw=lambda: draw_speed(points),
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
        config = json.loads(row["config"])
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
