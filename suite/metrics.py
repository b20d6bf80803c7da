"""The metrics of rows: their units, the values that they can have, and whether a smaller value is the better one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LARGEST = 1e150
"""Largest size of a stored number. The squares of larger ones, of which spreads are made, are not finite."""
ROUNDING = 1e-6
"""By so much a mean may be outside of its range, because sums of fractions are rounded."""
POSITIVE = math.ulp(0.0)
"""Smallest number above 0."""


class Domain(NamedTuple):
    """The values that a metric can have: numbers from `least` to `most`."""

    unit: str | None = None
    """Unit of the values; None for a metric of which only its name is known."""
    least: float = -LARGEST
    most: float = LARGEST
    is_whole: bool = False
    """Whether the values are whole numbers."""

    def words(self) -> str:
        """The domain as the end of a sentence: `from 0 to 1`, `above 0`, `a whole number from 0 on`."""
        if self.least > self.most:
            return "no number at all"
        if (self.least, self.most) == (-LARGEST, LARGEST):
            return f"a finite number of at most {LARGEST:g} in size"
        beginning = "a whole number " * self.is_whole
        # rounding removes the margin for rounding errors, and adding zero makes a zero of a negative zero
        least, most = round(self.least, 3) + 0.0, round(self.most, 3)
        if self.most == LARGEST:
            return f"{beginning}above 0" if self.least == POSITIVE else f"{beginning}from {least:g} on"
        return f"{beginning}from {least:g} to {most:g}"

    def has(self, value: float) -> bool:
        """Whether a value is in the domain. NaN and infinity are in none."""
        return self.least <= value <= self.most and (not self.is_whole or float(value).is_integer())


FINITE = Domain()
SPENT = ("train_seconds", "train_flops", "train_tokens")
"""Metrics of all steps up to a step, which stand beside every evaluation; the last one is that of the run."""


def _all(
    unit: str, names: str, least: float = -LARGEST, most: float = LARGEST, *, whole: bool = False
) -> dict[str, Domain]:
    return {name: Domain(unit, least, most, whole) for name in names.split()}


METRICS: dict[str, Domain] = {
    # rows that say how something ended, or where a run was trained before
    **_all("", "run generation continued", math.inf, -math.inf),
    **_all("fraction", "accuracy macro_accuracy judge_accuracy exact", -ROUNDING, 1 + ROUNDING),
    **_all("fraction", "weights_taken kernel kernels_near kernels_far", -ROUNDING, 1 + ROUNDING),
    # the loss of a plugin may be the logarithm of a density, which has any sign
    **_all("nats", "loss"),
    **_all("nats", "nats_per_word", -ROUNDING),
    **_all("bits", "bits_per_byte bits_per_base bits_per_sample", -ROUNDING),
    **_all("", "perplexity word_perplexity", 1 - ROUNDING),
    **_all("sd", "mean_absolute_error", 0.0),
    **_all("count", "num_parameters", 0.0, whole=True),
    **_all("numbers", "state_size", 0.0, whole=True),
    **_all("bytes", "peak_memory peak_rss peak_extra_memory", 0.0),
    **_all("MiB", "extra_memory", 0.0),
    **_all("ms", "time graph_time kernel_time decode_time prefill_time", POSITIVE),
    **_all("ms", "floor_time", 0.0),
    **_all("us", "host_time", POSITIVE),
    **_all("s", "cold_start", POSITIVE),
    **_all("tokens/s", "train_throughput inference_throughput decode_throughput generate_throughput", POSITIVE),
    **_all("steps/s", "train_steps", POSITIVE),
    **_all("bytes/s", "copy_bandwidth", POSITIVE),
    **_all("flop/s", "matmul_rate", POSITIVE),
    # the sum over all steps up to the row's, or the one step that a timing repeats; forward and backward pass
    **_all("flop", "train_flops", 0.0, whole=True),
    # the first: a forward pass, for each of its tokens; the second: one step of decoding behind the slice's positions
    **_all("flop", "inference_flops decode_flops", 0.0),
    **_all("tokens", "train_tokens", 0.0, whole=True),
    # the sum over all optimizer steps up to the row's, without evaluation, checkpoints and compilation
    **_all("s", "train_seconds", 0.0),
    **_all("", "ratio", POSITIVE),
    **_all("", "relative_error", 0.0),
    **_all("ratio", "step_scale speedup", POSITIVE),
    **_all("", "recorded", 0.0, 1.0, whole=True),
    **_all("ratio", "eigenvalue_ranks", -1 - ROUNDING, 1 + ROUNDING),
    **_all("ratio", "log_dt_median log_dt_max"),
    **_all("1/dt", "eigenvalue_real eigenvalue_imag eigenvalue_max"),
    **_all("lags", "kernel_peak_p95", 0.0),
}
"""Metrics of the suite, by name. A metric that a plugin defines has finite values and no unit."""


def domain_of(metric: str) -> Domain:
    """The domain of a metric; that of an unknown one has every finite number."""
    return METRICS.get(metric, FINITE)


def unit_of(metric: str) -> str:
    """The unit of a metric; of an unknown one none."""
    return METRICS.get(metric, FINITE).unit or ""


def is_number(value: float) -> bool:
    """Whether a value can be stored at all: it is finite, and so is its square."""
    return abs(value) <= LARGEST


def value_fault(metric: str, domain: Domain, value: float | None, samples: Iterable[float] = ()) -> str:
    """A sentence on the first of these values that is not in the domain of the metric; empty where all are."""
    for what, number in (("", value), *(("a sample of ", sample) for sample in samples)):
        if number is not None and not domain.has(number):
            return f"{what}{metric} is {number:.6g}, which must be {domain.words()}"
    return ""


SMALLER = frozenset({"loss", "error", "perplexity", "memory", "time", "fid"})
"""Last words of the names of metrics of which a smaller value is the better one."""
LARGER = frozenset({"accuracy", "exact", "score", "precision", "recall", "f1", "auc", "throughput"})
"""Last words of the names of metrics of which a larger value is the better one."""
SMALLER_BEGINNINGS = ("bits_per_", "nats_per_", "am_score")
"""Beginnings of the names of metrics of which a smaller value is the better one; an AM score is a divergence."""


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
