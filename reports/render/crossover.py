"""From which length on a model or an operator is faster than attention, read from the figures of timed experiments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reports.render.figure import Series
from reports.render.report import Report

ATTENTION = re.compile(r"(?<!linear )(attention|transformer|mha)", re.IGNORECASE)
FASTER_IF_SMALLER = ("time", "decode_time", "prefill_time")
SPEEDS = ("train_throughput", "decode_throughput", "generate_throughput", *FASTER_IF_SMALLER)


@dataclass(frozen=True)
class Crossover:
    """One row of an experiment against the fastest attention of the same experiment, device and length."""

    experiment: str
    row: str
    attention: str
    """Labels of the rows that were compared with, joined by commas."""
    device: str
    unit: str
    points: tuple[tuple[float, float, float | None], ...]
    """(length, value of the row, value of attention or None where attention has none), in ascending order of length."""
    smaller_is_faster: bool

    @property
    def start(self) -> float | None:
        """The smallest length from which on the row is faster at every length measured, or None.

        Where attention has no value, e.g. because it ran out of memory, the row counts as faster.
        """
        found = None
        for length, ours, theirs in reversed(self.points):
            if theirs is not None and (ours >= theirs if self.smaller_is_faster else ours <= theirs):
                break
            found = length
        return found

    @property
    def text(self) -> str:
        """`from 2048 on`, `at all lengths, from 256 on`, or `not up to 16384`."""
        first, last = self.points[0][0], self.points[-1][0]
        if self.start is None:
            return f"not up to {last:g}"
        return f"at all lengths, from {first:g} on" if self.start == first else f"from {self.start:g} on"


def crossovers(report: Report) -> list[Crossover]:
    """One entry for every row of a timed report that is not attention; empty without rows of attention."""
    figure = report.figure
    if not report.timed or figure is None or figure.spec.x != "slice.length" or figure.spec.y not in SPEEDS:
        return []
    return [
        found
        for title, panel in figure.panels
        for found in _panel(report, title, panel, figure.spec.y in FASTER_IF_SMALLER, figure.spec.y_label)
    ]


def _panel(report: Report, title: str, panel: Sequence[Series], smaller_is_faster: bool, unit: str) -> list[Crossover]:
    theirs = [series for series in panel if ATTENTION.search(series.label) and series.points]
    best: dict[float, float] = {}
    for series in theirs:
        for point in series.points:
            values = [point.y, *([best[point.x]] if point.x in best else [])]
            best[point.x] = min(values) if smaller_is_faster else max(values)
    if not best:
        return []
    return [
        Crossover(
            experiment=report.experiment,
            row=f"{series.label}, {title}" if title else series.label,
            attention=", ".join(other.label for other in theirs),
            device=report.device,
            unit=unit,
            points=tuple((point.x, point.y, best.get(point.x)) for point in series.points),
            smaller_is_faster=smaller_is_faster,
        )
        for series in panel
        if series not in theirs and series.points
    ]
