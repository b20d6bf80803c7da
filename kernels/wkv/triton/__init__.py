"""WKV in Triton; letters and formulas are those of `kernels.wkv` and `kernels.wkv.chunked`.

A thread owns channels of one batch row and goes through time, STEPS steps at a time, which are loaded before they are
computed. Sums, scales and exponentials are float32. Where few channels leave the chip empty, time is cut into segments
that run side by side: a first launch leaves the end of every segment from an empty state, and a program of the second
one folds the ends of the segments before its own into its start.

Forward keeps z_t = log(M_{t-1} + exp(u + k_t)), 4 bytes for each element of k, so that backward needs no states: one
kernel goes back through time (dk, dv, du), one forward (dw). Results are deterministic.
"""

from __future__ import annotations

from subquad.kernels.wkv.triton.autograd import wkv_triton
from subquad.kernels.wkv.triton.plan import TUNING, Tuning
from subquad.kernels.wkv.triton.step import wkv_step_triton

__all__ = ["TUNING", "Tuning", "wkv_step_triton", "wkv_triton"]
