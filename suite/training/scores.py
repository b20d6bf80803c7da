"""Metrics of a split: sums over its batches, kept on the device, and the rows that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from suite.contracts import Task
from suite.runs import Outcome

UNITS = {
    "accuracy": "fraction",
    "macro_accuracy": "fraction",
    "loss": "nats",
    "nats_per_word": "nats",
    "bits_per_byte": "bits",
    "bits_per_base": "bits",
    "bits_per_sample": "bits",
    "judge_accuracy": "fraction",
    "exact": "fraction",
    "mean_absolute_error": "sd",
}

Metrics = dict[str, tuple[float, float]]
"""By metric, the sum over all that was scored and its count; their ratio is the metric."""


class Scores:
    """Adds up what a task says of logits.

    sums: by metric, a float64 tensor (sum, count) on the device. The tensors stay the same, so that a recorded CUDA
    graph can add to them.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.sums: dict[str, Tensor] = {}

    def add(self, pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int | None = None) -> None:
        """Adds the scores of logits and their targets, the pieces of one batch.

        num_rows: rows of the whole batch. A piece that has all of them counts in the metrics of batches, too.
        """
        for logits, targets in pieces:
            metrics = self.task.score(logits, targets)
            if len(targets) == num_rows:
                metrics = {**metrics, **self.task.score_batch(logits, targets)}
            for metric, (total, count) in metrics.items():
                if metric not in self.sums:
                    self.sums[metric] = torch.zeros(2, dtype=torch.float64, device=self.device)
                self.sums[metric][0] += total
                self.sums[metric][1] += count

    def clear(self) -> None:
        for total in self.sums.values():
            total.zero_()

    def read(self) -> Metrics:
        """The metrics that were counted since `clear`. It waits for the device."""
        sums = {metric: total.tolist() for metric, total in self.sums.items()}
        return {metric: (total, count) for metric, (total, count) in sums.items() if count}


def add_rows(
    outcome: Outcome, task: Task, split: str, parts: Mapping[str, Iterable[Metrics]], step: int, *, whole: bool = True
) -> dict[str, float]:
    """Adds the rows of a split and returns its means: each named slice, then the whole as the ratio of summed parts.

    parts: by the name of the slice ("" for segments without one), the metrics of each of its segments.
    whole: False where a part of the split is missing, so that the split as a whole has no means.
    """
    sums: Metrics = {}
    for part, segments in parts.items():
        metrics = _summed(segments)
        sums = _summed((sums, metrics))
        if part:
            for metric, (total, count) in metrics.items():
                outcome.add(metric, UNITS.get(metric, ""), total / count, split=split, slice=part, step=step)
    means = {metric: total / count for metric, (total, count) in sums.items()} if whole else {}
    for metric, mean in means.items():
        outcome.add(metric, UNITS.get(metric, ""), mean, split=split, step=step)
    # a perplexity is not a ratio of sums, so `score` cannot give it
    for metric, of in task.exponentials.items():
        if of in means:
            outcome.add(metric, "", math.exp(min(means[of], 700.0)), split=split, step=step)
    return means


def _summed(parts: Iterable[Metrics]) -> Metrics:
    summed: Metrics = {}
    for metrics in parts:
        for metric, (total, count) in metrics.items():
            before = summed.get(metric, (0.0, 0.0))
            summed[metric] = before[0] + total, before[1] + count
    return summed
