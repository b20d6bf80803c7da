"""Noise of medians, and the differences that count: the rules that `bench --compare` and `compare` share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SMALLEST = 0.03
"""Slowdowns below this are never called one."""
NOISES = 3.0
"""A difference counts from this many times its noise on."""


def limit(noise: float) -> float:
    """The ratio from which on two speeds count as different, for the relative noise of the ratio."""
    return 1.0 + max(SMALLEST, NOISES * noise)


def error_of_median(values: Sequence[float] | np.ndarray) -> float:
    """The standard error of the median, 1.25 x 1.48 MAD / sqrt(n) (MAD: median absolute deviation)."""
    values = np.asarray(values, dtype=float)
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / math.sqrt(len(values))
