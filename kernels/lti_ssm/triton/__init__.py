"""The state space model in Triton: Toeplitz products inside chunks, states passed between them, on matrix units.

A sequence is cut into chunks of CHUNK steps. For one channel, with v_r [CHUNK] the inputs of chunk r, h_r [N] the state
before it and a = Abar^CHUNK,

    y_r = v_r K + Re(h_r W);   h_{r+1} = a h_r + v_r E
    K[i, j] = taps[j - i],     E[i, n] = Bbar_n Abar_n^{CHUNK-1-i},     W[n, i] = w_n Abar_n^i,     w = s C Abar

Only the powers 0 .. CHUNK of Abar occur (and those of a segment and a piece, below), so nothing overflows where
|Abar| <= 1.

Backward, with g_r the gradient of y_r and dh_r that of h_r (real part: of Re h, imaginary part: of Im h),

    dh_r = g_r conj(W) + conj(a) dh_{r+1};   dv_r = g_r K^T + Re(dh_{r+1} conj(E))
    dK = sum v_r^T g_r;   dE = sum v_r^T dh_{r+1};   dW = sum g_r^T conj(h_r);   da = sum dh_{r+1} conj(h_r)

How the work is divided:

- A program works on one channel, and its matrices are in shared memory only: K is read from CHUNK taps, E and W are
  made from two short tables of powers (`tables.py`).
- A *segment* is a run of consecutive chunks of one sequence. A *tile* has ROWS rows, each of them a segment, and the
  program walks through all of its rows at once, chunk by chunk: products [ROWS, CHUNK] x [CHUNK, CHUNK], [ROWS,
  CHUNK] x [CHUNK, N] and [ROWS, N] x [N, CHUNK], with states that are accumulators. Nothing crosses rows inside the
  loop.
- Where several rows are segments of one sequence, a first loop gives the state that each segment reaches from zero,
  and one scan over rows gives the state in which each segment starts (`scan.py`); that part of u is read twice.
- Where the batch has too few sequences to fill the GPU, a sequence is cut into *pieces* of several segments: a first
  launch (y=None) gives the state that each piece reaches from zero, and PyTorch passes the states on.

| module | what |
| --- | --- |
| `plan.py` | sizes of tiles, segments and pieces, from shapes and `Tuning` |
| `prepare.py` | kernels from the parameters to the tables of a channel, and from their gradients back |
| `products.py`, `tables.py`, `scan.py` | what both other kernels are made of |
| `forward.py`, `backward.py` | the two kernels that go through time |
| `step.py` | one step of decoding |
| `calls.py` | what a call allocates and launches, kept for calls with equal shapes |
| `autograd.py`, `operator.py` | the autograd function; the operator on one side and on both |

Layout: time contiguous in memory. u and the gates may be any view of that kind, others are copied into one. y and du
are contiguous as [B, D, T].

Precision: the tables come from float64. float32: v, gates, sums, states, scans (float64 for float32 inputs). The
decays a are in two terms where inputs are float32, as their rounding errors would add up from chunk to chunk.
bfloat16 inputs are multiplied by bfloat16 matrices in one or two terms (`plan.Tile`); float32 and float16 inputs
multiply in tf32x3.

Deterministic: partial sums, no atomics. Limits: N <= 64; dss-softmax is not supported; two sides are two calls.

Elements read or written, in units of B T D: forward 3 (2 where a sequence is one row), one more to keep the states;
backward 5. With gate_out, the forward pass also keeps y before this gate, which the backward pass reads. Multiply-adds
a step with N complex states: forward CHUNK + 6 N, backward 2 CHUNK + 10 N + 4 N^2 / CHUNK, and CHUNK more in each for
the second term of the taps (with gates in bfloat16, 4 N more in each for second terms of states and maps).
"""

from __future__ import annotations

from subquad.kernels.lti_ssm.triton.calls import Plan, Planner
from subquad.kernels.lti_ssm.triton.operator import lti_ssm_triton, lti_ssm_triton_bidirectional
from subquad.kernels.lti_ssm.triton.plan import TUNING, Division, Tuning, backward_division, cheapest_division

__all__ = [
    "TUNING",
    "Division",
    "Plan",
    "Planner",
    "Tuning",
    "backward_division",
    "cheapest_division",
    "lti_ssm_triton",
    "lti_ssm_triton_bidirectional",
]
