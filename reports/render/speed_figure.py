"""The figure of the operators' speed: share of the floor of every case, a dot for each implementation.

Filled dots are the newest measurements, with a line between the quartiles of their samples. Hollow dots are those of
earlier commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.render.colors import colors_of
from reports.render.speed_points import Point


def draw_speed(points: Sequence[Point]) -> Any:
    """One panel for each operator, one line for each case, on the device of the newest row; None without rows.

    points: oldest first.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from reports.render.plots import MARKERS, STYLE

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
