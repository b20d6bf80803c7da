"""The history of the operators' speed: the newest time of every case, what changed since the commit before, comparisons
of revisions in one run, and their figure.

What `changes` says across two runs of one device is named as such, with its criterion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from subquad.reports.render.changes import HEADER, RULE, changes_of, draw_changes, line_of
from subquad.reports.render.document import DASH, Document, Grid
from subquad.reports.render.figure import looks_of
from subquad.reports.render.speed import Point, points_of, shown_rows
from subquad.suite.environment import CALL

if TYPE_CHECKING:
    from subquad.reports.render.sheet import Canvas, Width

CHANGES = (
    f"{RULE} repeats: largest ratio of two runs of one commit. fastest: ratio of the fastest samples. others: ratio of "
    "the other implementations in the same two runs, which no commit of ours changes."
)


def draw_speed(points: Sequence[Point], width: Width = "page") -> Canvas | None:
    """The share of the floor of every case: a panel for each operator on each device; None without rows.

    points: oldest first.
    """
    import matplotlib
    from matplotlib.lines import Line2D

    from subquad.reports.render.sheet import SMALL, STYLE, TEXT, WIDTHS, Heading, settled, sheet, verbatim, wrapped

    measured = [point for point in points if point.share_of_floor is not None]
    if not measured:
        return None
    panels: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for point in sorted(measured, key=lambda point: (point.device, point.op)):
        panels.setdefault((point.device, point.op), {}).setdefault(f"{point.case}, {point.direction}", []).append(point)
    names = sorted({point.implementation for point in measured})
    looks = looks_of(names)
    legend: list[tuple[Any, str]] = [
        (Line2D([], [], ls="none", marker=mark, ms=4, color=color), name) for name, (color, mark) in looks.items()
    ]
    legend.append((Line2D([], [], ls="none", marker="o", ms=4, color="black", mfc="none", mew=0.7), "earlier commit"))
    labels = {case: wrapped(case, WIDTHS[width] * 0.45, SMALL) for cases in panels.values() for case in cases}
    rows = [[0.11 * len(labels[case]) + 0.05 for case in cases] for cases in panels.values()]
    devices = list(dict.fromkeys(device for device, _ in panels))
    title = 0.28 if len(devices) == 1 else 0.4
    note = f"Median of raw samples, with their quartiles. Measured on {' and '.join(devices)}."
    heading = Heading("Speed of the operators", "", "share of the floor (%)", note=note)
    with matplotlib.rc_context(STYLE):
        canvas = sheet(width, sum(map(sum, rows)) + title * len(rows) + 0.25, heading, legend)
        # a panel is as high as its lines, and half a line more above and below
        heights = [sum(row) + 0.1 for row in rows]
        axes = canvas.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for ax, ((device, operator), cases), row in zip(axes, panels.items(), rows, strict=True):
            places = [0.05 + sum(row[:i]) + row[i] / 2 for i in range(len(row))]
            for y, found in zip(places, cases.values(), strict=True):
                newest = {point.implementation: point for point in found}
                for point in found:
                    color, marker = looks[point.implementation]
                    share, is_newest = point.share_of_floor, point is newest[point.implementation]
                    ax.plot(share, y, marker, ms=4, color=color, mfc=color if is_newest else "none", mew=0.7)
                    if is_newest and share is not None and point.value is not None:
                        # the share at the upper and at the lower quartile of the time
                        ends = [share * point.value / quartile for quartile in point.quartiles]
                        ax.plot(ends, [y, y], color=color, lw=1.2)
            ax.set_yticks(places, [verbatim("\n".join(labels[case])) for case in cases], linespacing=0.95)
            ax.set_ylim(sum(row) + 0.1, 0)
            where = operator if len(devices) == 1 else f"{operator}\n{device}"
            ax.set_title(verbatim(where), loc="left", fontsize=TEXT)
            ax.tick_params(axis="y", length=0)
        axes[-1].set_xlim(left=0)
        return settled(canvas)


def history(frame: pd.DataFrame, figure: Literal["changes", "shares"] | None = None) -> Document:
    """The document of stored benchmark rows (experiment `kernels`), of any devices, shapes and commits.

    figure: the changes since the commit before, or the shares of the floor; None: the changes, if there are any.

    Only the sets of shapes that `bench` offers are shown. Other rows, e.g. those of planted slowdowns, do not measure a
    revision.
    """
    frame = shown_rows(frame)
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
    changes = changes_of(points)
    if told := [change for change in changes if change.verdict != "unchanged"]:
        lines = tuple((change.newest.device, *line_of(change)) for change in told)
        heading = "Newest against the commit before, on one device; unchanged cases left out"
        grids.append(Grid(heading, ("device", *HEADER), lines, 4, tuple((c.newest.run_id,) for c in told)))
    compared = list(_comparisons(points))
    if compared:
        titles = ("operator", "case", "implementation", "verdict", "base", "this", "ratio", "95 % interval", "noise")
        heading = "Revisions against each other, on one device in one run"
        grids.append(Grid(heading, titles, tuple(compared), 4, ((),) * len(compared)))

    def draw(width: Width = "page") -> Canvas | None:
        if figure == "changes" or (figure is None and changes):
            return draw_changes(changes, width)
        return draw_speed(points, width)

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
            *([CHANGES] if changes else []),
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
        draw=draw,
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


def _comparisons(points: Sequence[Point]) -> Iterator[tuple[str, ...]]:
    for point in points:
        if found := point.compared:
            yield (
                point.op,
                f"{point.case} {point.direction}",
                point.implementation,
                found["verdict"],
                found["base"][:10],
                point.commit[:10],
                f"{found['ratio']:.3f}",
                f"[{found['low']:.3f}, {found['high']:.3f}]",
                f"{found['noise']:.1%}",
            )
