"""Learned kernels as a picture: rows of pixels, and eigenvalues below (DSS, Gupta et al. 2022, figures 2 and 3).

A panel shows one run. A row of pixels is one kernel, |K_k| divided by its largest value at any lag; white lines
separate the layers. Below are the eigenvalues of all layers at (Re, arcsinh(Im / 2)), in black those before the first
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.render.rows import StoredRun, slice_part
from reports.render.verbatim import verbatim

LEARNED, INITIAL = "#0072b2", "#000000"


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


def draw_kernels(canvas: Any, panels: Sequence[KernelPanel]) -> None:
    """Draws one column for each panel: pixels above, and eigenvalues below where there are any."""
    spectra = any(panel.eigenvalues for panel in panels)
    axes = canvas.subplots(1 + spectra, len(panels), squeeze=False, height_ratios=[2, 1][: 1 + spectra])
    image = None
    for above, below, panel in zip(axes[0], axes[-1], panels, strict=True):
        image = _pixels(above, panel)
        if spectra:
            _spectrum(below, panel)
    axes[0][0].set_ylabel("layer")
    canvas.colorbar(image, ax=list(axes[0]), label="|K| / largest |K|", pad=0.01)
    if spectra:
        axes[1][0].set_ylabel("arcsinh(Im λ / 2)")
        handles, labels = axes[1][0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", frameon=False, ncols=2)


def _pixels(ax: Any, panel: KernelPanel) -> Any:
    width = panel.span * max(map(len, panel.kernels))
    extent = (0, width, len(panel.kernels), 0)
    image = ax.imshow(
        panel.kernels, aspect="auto", interpolation="nearest", cmap="magma", vmin=0, vmax=1, extent=extent
    )
    names = list(dict.fromkeys(panel.layers))
    starts = [panel.layers.index(name) for name in names]
    for start in starts[1:]:
        ax.axhline(start, color="white", lw=1)
    ends = [*starts[1:], len(panel.layers)]
    ax.set_yticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)], [str(n + 1) for n in names])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title(verbatim(panel.title))
    ax.set_xlabel("lag")
    return image


def _spectrum(ax: Any, panel: KernelPanel) -> None:
    for values, color, size, label in (
        (panel.eigenvalues, LEARNED, 8, "λ after training"),
        (panel.initial, INITIAL, 3, "λ before"),
    ):
        x, y = [re for re, _ in values], [math.asinh(im / 2) for _, im in values]
        ax.scatter(x, y, s=size, color=color, linewidths=0, label=label)
    ax.set_xlabel("Re λ")
