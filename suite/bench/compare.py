"""Tells whether this revision is slower than another one; the noise is that of the other one against itself.

A round times every process once: the base (A), this revision (B) and the base again in a process of its own (A', the
control). The order rotates, so a drift of the clock affects all alike. With m the median of a round's samples,

    ratio = median over rounds of  m_B / sqrt(m_A m_A'),      noise from  n = log(m_A' / m_A)  over the same rounds,
    noise = max(|median n|, 1.25 x 1.48 MAD(n) / sqrt(rounds)),

the second term being the standard error of a median. A regression is a ratio beyond 1 + max(3 %, 3 x noise) in the
first measurement and again in the next, longer one; its interval is the 95 % bootstrap interval of the ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from subquad.suite.store.noise import NOISES, SMALLEST, error_of_median, limit

ROUNDS = 9
SIDES = ("A", "B", "control")

Sample = Callable[[str], list[float]]
"""Times a few calls of one side (`A`, `B` or `control`) now and returns their times in milliseconds."""


@dataclass(frozen=True)
class Comparison:
    """The times of two revisions for one case. All ratios are new over base."""

    ratio: float
    low: float
    high: float
    noise: float
    """Relative noise of the ratio."""
    samples: dict[str, list[float]]
    """Raw milliseconds by side."""
    ratios: list[float]
    """The ratio of each round."""

    @property
    def limit(self) -> float:
        """The ratio above which this revision counts as slower."""
        return limit(self.noise)

    @property
    def verdict(self) -> Literal["slower", "faster", "same"]:
        if self.ratio > self.limit:
            return "slower"
        return "faster" if self.ratio < 1.0 / self.limit else "same"


def rounds(sample: Sample, count: int) -> Comparison:
    """Times `count` rounds and sums them up."""
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    medians: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(count):
        for offset in range(len(SIDES)):
            side = SIDES[(turn + offset) % len(SIDES)]
            taken = sample(side)
            samples[side] += taken
            medians[side].append(math.log(statistics.median(taken)))
    a, b, control = (np.array(medians[side]) for side in SIDES)
    change, null = b - (a + control) / 2, control - a
    drawn = np.random.default_rng(0).integers(count, size=(2000, count))
    low, high = np.quantile(np.median(change[drawn], axis=1), (0.025, 0.975))
    return Comparison(
        ratio=math.exp(float(np.median(change))),
        low=math.exp(low),
        high=math.exp(high),
        noise=max(abs(float(np.median(null))), error_of_median(null)),
        samples=samples,
        ratios=np.exp(change).tolist(),
    )


def compare(sample: Sample, count: int = ROUNDS) -> Comparison:
    """Measures once and, unless that clearly says `same`, again and longer until two in a row agree; thrice at most.

    If they do not agree, the change of the ratio from one measurement to the next is noise that the rounds did not
    show, and it is added to the noise.
    """
    last = rounds(sample, count)
    if last.verdict == "same" and NOISES * last.noise <= SMALLEST:
        return last
    for _ in range(2):
        again = rounds(sample, 2 * count)
        if again.verdict == last.verdict:
            return again
        moved = abs(math.log(again.ratio / last.ratio))
        last = again
    return replace(last, noise=max(last.noise, moved))
