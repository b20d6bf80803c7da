"""Says of a metric, by its name, whether a smaller value is the better one."""

from __future__ import annotations

SMALLER = frozenset({"loss", "error", "perplexity", "memory", "time", "fid"})
"""Last words of the names of metrics of which a smaller value is the better one."""
LARGER = frozenset({"accuracy", "exact", "score", "precision", "recall", "f1", "auc", "throughput"})
"""Last words of the names of metrics of which a larger value is the better one."""
SMALLER_BEGINNINGS = ("bits_per_", "nats_per_")
"""Beginnings of the names of metrics of which a smaller value is the better one."""


def smaller_is_better(metric: str) -> bool | None:
    """Returns whether a smaller value of a metric is the better one; None where its name does not say so.

    The last word of the name says it (`mean_absolute_error`, `macro_accuracy`), or its beginning (`bits_per_byte`).
    """
    if metric.startswith(SMALLER_BEGINNINGS):
        return True
    word = metric.rpartition("_")[2]
    return True if word in SMALLER else False if word in LARGER else None


def check_direction(metric: str) -> None:
    """Raises ValueError where nothing says whether a smaller value of a metric is the better one."""
    if smaller_is_better(metric) is None:
        raise ValueError(
            f"the name {metric!r} does not say whether a smaller value is better, which a choice by it needs; "
            f"let it end in one of {', '.join(sorted(SMALLER))} (smaller) or {', '.join(sorted(LARGER))} (larger)"
        )
