"""Metrics of a split: sums over its batches, kept on the device, and the rows that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from subquad.suite.contracts import Task
from subquad.suite.metrics import LARGEST, unit_of
from subquad.suite.runs import Outcome

MOST_NATS = math.floor(math.log(LARGEST))
"""A perplexity of a larger loss could not be stored."""

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


class Losses:
    """The training losses since the last evaluation, kept on the device, so that the loop never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        """Steps since the first one, not since the last evaluation."""
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        """The first step whose loss was not finite, or -1."""
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, which a recorded step changes in place."""
        return self.steps, self.bad_step, self.total, self.count

    def add(self, loss: Tensor) -> None:
        is_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step.copy_(torch.where(is_bad, self.steps, self.bad_step))
        self.steps += 1
        self.total += loss
        self.count += 1

    def mean(self) -> float | None:
        """The mean since `clear`, or None where there was no step. It waits for the device."""
        count = int(self.count)
        return float(self.total) / count if count else None

    def clear(self) -> None:
        self.total.zero_()
        self.count.zero_()


def add_rows(
    outcome: Outcome, task: Task, split: str, parts: Mapping[str, Iterable[Metrics]], step: int, *, lost: str = ""
) -> dict[str, float]:
    """Adds the rows of a split and returns its means: each named slice, then the whole as the ratio of summed parts.

    parts: by the name of the slice ("" for segments without one), the metrics of each of its segments.
    lost: why a part of the split has no metrics, so that the split as a whole has none either.
    """
    sums: Metrics = {}
    for part, segments in parts.items():
        metrics = _summed(segments)
        sums = _summed((sums, metrics))
        if part:
            for metric, (total, count) in metrics.items():
                outcome.add(metric, unit_of(metric), total / count, split=split, slice=part, step=step)
    means = {metric: total / count for metric, (total, count) in sums.items()} if not lost else {}
    for metric, mean in means.items():
        outcome.add(metric, unit_of(metric), mean, split=split, step=step)
    # a perplexity is not a ratio of sums, so `score` cannot give it
    for metric, of in task.exponentials.items():
        if of in means:
            outcome.add(metric, "", math.exp(min(means[of], MOST_NATS)), split=split, step=step)
    if lost:
        outcome.add("accuracy", "fraction", None, status="oom", error=lost, split=split, step=step)
    return means


def _summed(parts: Iterable[Metrics]) -> Metrics:
    summed: Metrics = {}
    for metrics in parts:
        for metric, (total, count) in metrics.items():
            before = summed.get(metric, (0.0, 0.0))
            summed[metric] = before[0] + total, before[1] + count
    return summed
