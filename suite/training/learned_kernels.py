"""Rows that record the filters of a model's layers: learnt kernels K [D, L] and eigenvalues of state space models.

Curves are stored in `samples`, with their largest element in `value`:

    kernel             fraction  |K_k| / max_{k < L} |K_k|, the largest of every `span` neighbours, three decimals
                                 slice layer=0,filter=ssm,channel=3,span=8
    eigenvalue_real    1/dt      slice layer=0,filter=ssm
    eigenvalue_imag    1/dt      the same, in the same order

One value for the whole model, over all kernels of all layers and channels; L is the task's longest sequence:

    kernel_peak_p95    lags      95th percentile of argmax_{k < L} |K_k|; DSS, table 3
    kernels_near       fraction  of kernels whose mean |K| at lags below `near` is over twice that behind; section 4.2
    kernels_far        fraction  of kernels whose mean |K| at lags below `near` is less than that behind; section 4.2
    eigenvalue_max     1/dt      the largest real part
    eigenvalue_ranks   ratio     rank correlation (Spearman) of real and imaginary parts; none while one of them is
                                 the same everywhere
    log_dt_median      ratio     median of the logarithms of all step sizes; DSS, figure 5
    log_dt_max         ratio     the largest of them

The paper calls kernels local where the first 128 positions are `significantly higher than the later positions`; twice
the mean is our reading. Rows from before the first step begin their slice with `at=start`; they have no `kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.suite.model import Convolution
from subquad.suite.training.config import KernelProbe

EIGENVALUES = 256
"""Largest number of recorded eigenvalues of a filter; of more, evenly spaced ones are kept."""
NEAR_RATIO = 2.0


@torch.no_grad()
def kernel_rows(
    parts: Mapping[str, Convolution], length: int, probe: KernelProbe, *, start: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of a model for sequences of `length`; where no part of it is a fixed filter, one row that says so."""
    if not parts:
        if not start:
            reason = "no layer of this model convolves with a fixed filter"
            yield {"metric": "kernel", "unit": "fraction", "value": None, "status": "n/a", "error": reason}
        return
    at = ("at=start",) if start else ()
    peaks, nears, behinds, values, steps = [], [], [], [], []
    for name, part in parts.items():
        size = part.kernel(length).detach().abs().double().cpu()
        peaks.append(size.argmax(-1))
        nears.append(size[:, : probe.near].mean(-1))
        behinds.append(size[:, probe.near :].mean(-1))
        if not start:
            yield from _curves(name, size, probe)
        if (log_dt := getattr(part, "log_dt", None)) is not None:
            steps.append(log_dt.detach().double().flatten().cpu())
        if (eigenvalues := getattr(part, "eigenvalues", None)) is not None:
            found = eigenvalues().detach().to(torch.complex128).flatten().cpu()
            values.append(found)
            kept = found[spaced(len(found), EIGENVALUES)]
            for metric, each in (("eigenvalue_real", kept.real), ("eigenvalue_imag", kept.imag)):
                samples = each.tolist()
                where = ",".join((*at, name))
                yield {"metric": metric, "unit": "1/dt", "value": max(samples), "samples": samples, "slice": where}

    def whole(metric: str, unit: str, value: float) -> dict[str, Any]:
        return {"metric": metric, "unit": unit, "value": value, "slice": ",".join(at)}

    yield whole("kernel_peak_p95", "lags", float(torch.quantile(torch.cat(peaks).double(), 0.95)))
    if length > probe.near:
        near, behind = torch.cat(nears), torch.cat(behinds)
        yield whole("kernels_near", "fraction", float((near > NEAR_RATIO * behind).double().mean()))
        yield whole("kernels_far", "fraction", float((near < behind).double().mean()))
    if values:
        found = torch.cat(values)
        yield whole("eigenvalue_max", "1/dt", float(found.real.max()))
        correlation = rank_correlation(found.real, found.imag)
        if not math.isnan(correlation):
            yield whole("eigenvalue_ranks", "ratio", correlation)
    if steps:
        yield whole("log_dt_median", "ratio", float(torch.cat(steps).median()))
        yield whole("log_dt_max", "ratio", float(torch.cat(steps).max()))


def _curves(name: str, size: Tensor, probe: KernelProbe) -> Iterator[dict[str, Any]]:
    """|K| [D, L] of a filter as rows: the recorded channels, each divided by its largest value at any lag."""
    span = probe.lags // probe.points
    chosen = spaced(len(size), probe.channels)
    curves = size[chosen] / size[chosen].amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    curves = curves[:, : probe.lags]
    # a sequence shorter than the lags asked for has fewer points, the last of them of what is left
    curves = F.max_pool1d(curves.unsqueeze(1), span, ceil_mode=True).squeeze(1)
    for channel, curve in zip(chosen.tolist(), curves, strict=True):
        # a picture shows no more, and the file stays small
        samples = [round(value, 3) for value in curve.tolist()]
        where = f"{name},channel={channel},span={span}"
        yield {"metric": "kernel", "unit": "fraction", "value": max(samples), "samples": samples, "slice": where}


def spaced(count: int, wanted: int) -> Tensor:
    """At most `wanted` of the indices below `count`, evenly spaced, the first one among them."""
    wanted = min(count, wanted)
    return torch.arange(wanted) * count // wanted


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: the correlation of the ranks of x [n] and y [n], the mean rank where values are equal; nan without
    two different ones."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(x: Tensor) -> Tensor:
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    behind = counts.cumsum(0)
    return (behind - (counts - 1) / 2).double()[inverse]
