"""Successes as a picture: a line for every cell of the table, a field for every value of the setting.

A field's colour and its first number are the share of the seeds that succeed. The number below is their median.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.render.sensitivity import Sensitivity, rank, text
from reports.render.verbatim import verbatim


def draw_successes(canvas: Any, found: Sequence[Sensitivity], x_label: str, unit: str) -> None:
    """Draws the fields; `unit` is that of the median."""
    values = sorted({value for line in found for value, _, _ in line.tried}, key=rank)
    shares = [[float("nan")] * len(values) for _ in found]
    ax = canvas.subplots()
    for i, line in enumerate(found):
        for (value, successes, runs), median in zip(line.tried, line.medians, strict=True):
            at, share = values.index(value), successes / runs
            shares[i][at] = share
            color = "black" if share > 0.5 else "white"
            ax.text(at, i - 0.18, f"{successes}/{runs}", ha="center", va="center", color=color)
            ax.text(at, i + 0.24, f"{median:.1f}", ha="center", va="center", color=color, fontsize=7)
    image = ax.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    ax.grid(visible=False)
    ax.set_xticks(range(len(values)), [verbatim(text(value)) for value in values])
    columns = {line.column for line in found}
    ax.set_yticks(range(len(found)), [verbatim(line.row + f", {line.column}" * (len(columns) > 1)) for line in found])
    ax.tick_params(length=0)
    ax.set_xlabel(verbatim(x_label))
    canvas.colorbar(image, ax=ax, label=f"seeds that succeed (below: median, {unit})" if unit else "seeds that succeed")
