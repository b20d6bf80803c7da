"""What tasks draw: the one segment of a split, and the probability of counts."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from subquad.suite.contracts import Segment


def only(task: Any, split: str, seed: int = 0) -> Segment:
    """The segment of a split that has one."""
    (segment,) = task.segments(split, seed)
    return segment


def p_value(counts: ArrayLike, expected: ArrayLike | None = None) -> float:
    """The probability of counts at least as far from the expected ones, or from equal ones, by the chi-squared test."""
    # the import takes a second, which collecting tests does not need
    from scipy import stats

    return stats.chisquare(counts, expected).pvalue
