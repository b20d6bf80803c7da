"""Costs of each setting: parameters, state size, speeds and memory, as medians over its runs on one device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from reports.render.figure import Settled
from reports.render.rows import StoredRun

COST_METRICS = {
    "num_parameters": "parameters",
    "state_size": "state size",
    "train_throughput": "train tokens/s",
    "inference_throughput": "inference tokens/s",
    "decode_throughput": "decode tokens/s",
    "peak_memory": "peak memory (B)",
    "peak_rss": "peak process memory (B)",
}
"""Metric to its column title, in the order of the columns."""


@dataclass(frozen=True)
class Cost:
    """Costs of one setting on one device."""

    label: str
    device: str
    values: dict[str, tuple[float, float, float]]
    """Metric to (median, smallest, largest) sample."""
    run_ids: tuple[str, ...]
    length: str = ""
    """Sequence length behind `state_size`, e.g. `length=512`."""


def costs_of(settled: Settled) -> list[Cost]:
    """One line for every row, setting and device; a row whose columns share their runs has one line."""
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    by_id: dict[str, StoredRun] = {}
    for (row, column), runs in settled.items():
        ok = [run for run in runs if run.status == "ok"]
        by_id.update({run.run_id: run for run in ok})
        if ok:
            lines.setdefault((row, tuple(sorted(run.run_id for run in ok))), []).append(column)
    rows = [row for row, _ in lines]
    costs = []
    for (row, ids), columns in lines.items():
        named = ", ".join(columns) if len(columns) < 4 else f"{columns[0]} to {columns[-1]}"
        label = row if rows.count(row) == 1 else f"{row}, {named}"
        # speeds of different devices are never pooled
        for device in sorted({by_id[i].device for i in ids}):
            cost = _cost(label, device, [by_id[i] for i in ids if by_id[i].device == device])
            if cost.values:
                costs.append(cost)
    return costs


def _cost(label: str, device: str, runs: Sequence[StoredRun]) -> Cost:
    values: dict[str, tuple[float, float, float]] = {}
    length = ""
    for metric in COST_METRICS:
        samples: list[float] = []
        for run in runs:
            for value in run.values.of_metric(metric):
                if value.value is None:
                    continue
                if metric == "state_size":
                    length = value.slice
                elif value.slice:
                    # a speed at one of several lengths; different lengths are not pooled
                    continue
                samples += value.samples or (value.value,)
        if samples:
            values[metric] = statistics.median(samples), min(samples), max(samples)
    return Cost(label, device, values, tuple(run.run_id for run in runs), length)
