"""The scoreboard as a picture: for each paper or experiment, a bar of its cells and a bar of its claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GREEN, BLUE, AMBER, PURPLE, RED, GREY = "#3d8f6a", "#4a7fd0", "#c79a2e", "#9b6fc0", "#c9574e", "#d5d5d5"
CELLS = {
    "agree": (GREEN, "agrees"),
    "better": (BLUE, "better"),
    "unclear": (AMBER, "unclear"),
    "unstable": (PURPLE, "unstable"),
    "differ": (RED, "worse"),
    "empty": (GREY, "not run"),
}
CLAIMS = {
    "claims hold": (GREEN, "holds"),
    "unsure": (AMBER, "unsure"),
    "fail": (RED, "fails"),
    "not run": (GREY, "not run"),
}
"""What is counted, to the colour and the name of its part of the bar."""
SMALLEST = 0.04
"""Share of a bar from which on a part has its number written into it."""


def draw_board(title: str, lines: Sequence[tuple[str, Mapping[str, int]]]) -> Any:
    """Bars of the same length with a number in each part; None where nothing is counted.

    lines: name, and what is counted (`overview.COUNTED`) to its number.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from reports.render.plots import STYLE
    from reports.render.verbatim import verbatim

    halves = [("cells of the paper", CELLS), ("claims", CLAIMS)]
    lines = [(name, counts) for name, counts in lines if any(counts[key] for _, half in halves for key in half)]
    if not lines:
        return None
    with rc_context({**STYLE, "axes.grid": False}):
        canvas = Figure(figsize=(8, 1.0 + 0.32 * len(lines)), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(1, 2, sharey=True)
        for ax, (heading, half) in zip(axes, halves, strict=True):
            for y, (_, counts) in enumerate(lines):
                total = sum(counts[key] for key in half)
                left = 0.0
                for key, (color, _) in half.items():
                    share = counts[key] / total if total else 0.0
                    ax.barh(y, share, 0.72, left, color=color)
                    if share >= SMALLEST:
                        ax.text(left + share / 2, y, str(counts[key]), ha="center", va="center", fontsize=8)
                    left += share
                if not total:
                    ax.text(0.01, y, "none", va="center", fontsize=8, color="#777777")
            handles = [ax.barh(0, 0, color=color, label=name) for color, name in half.values()]
            ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8,
                      ncols=len(half), columnspacing=0.8, handlelength=0.9, handletextpad=0.4)  # fmt: skip
            ax.set_title(heading, fontsize=9)
            ax.tick_params(length=0)
            ax.set_xlim(0, 1)
            ax.set_xticks([])
            ax.spines[:].set_visible(False)
        axes[0].set_yticks(range(len(lines)), [verbatim(name) for name, _ in lines])
        axes[0].set_ylim(len(lines) - 0.5, -0.5)
        canvas.suptitle(verbatim(title), fontsize=10)
    return canvas
