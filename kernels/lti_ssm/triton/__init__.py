"""The state space model in Triton: Toeplitz products inside chunks, states between them, all on matrix units.

With chunks of C steps, v_r the inputs of chunk r, h_r the state before it and a = Abar^C, for one channel

    y_r = v_r K + Re(h_r O);   h_{r+1} = a h_r + v_r E
    K[i, j] = taps[j - i],     E[i, n] = Bbar_n Abar_n^{C-1-i},     O[n, i] = c_n Abar_n^i,     c = s C Abar

No power but 0 .. C (and that of a segment) is ever formed, so nothing overflows where |Abar| <= 1. A program holds
one channel. A row of its tiles is a segment of a sequence, and it goes through ROWS of them at once, chunk by chunk:
products [ROWS, C] x [C, C], [ROWS, C] x [C, N] and [ROWS, N] x [N, C], states that are accumulators, nothing that
crosses rows. Where rows are segments of one sequence, a first pass over all but the last gives the states they end in
from zero, and one scan over rows where they start; that part of u is read twice. The filter, and matrices for a
channel, exist in shared memory only: K is read from C taps, E and O are made from two short tables of powers
(k = i J + j). `_prepare_kernel` computes taps, powers, Bbar and c from the parameters in float64, `_prepare_bwd_kernel`
takes their gradients back. Where there are few sequences they are cut into pieces first: a launch (y=None) gives their
ends from a zero start, PyTorch passes them on.

Backward, with g_r the gradient of y_r and H_r that of h_r (real part: of Re h, imaginary part: of Im h),

    H_r = g_r conj(O) + conj(a) H_{r+1};   dv_r = g_r K^T + Re(H_{r+1} conj(E))
    dK = sum v_r^T g_r;   dE = sum v_r^T H_{r+1};   dO = sum g_r^T conj(h_r);   da = sum H_{r+1} conj(h_r)

is the same in reverse; forward kept the state before each chunk (in bfloat16 as many bytes as u, at N = 32). At its end
a program contracts dK to C taps, and dE, dO, da to the gradients of Bbar, c and z = log Abar (d Abar^k / dz =
k Abar^k), one row of partial sums for each program.

Layout: time contiguous; u and the gates may be any view of that kind, others are copied into it. y and du have it too.
float32: v, gates, sums, states, scans (of float32 inputs in float64). Decays are in two terms for float32 inputs, as
rounding would add up from chunk to chunk. bfloat16 inputs meet bfloat16 matrices, as one or two terms (Config); float32
and float16 inputs multiply in tf32x3. Deterministic: partial sums, no atomics. Limits: N <= 64; not dss-softmax, not
two-sided. Numbers of B T D read or written: forward 3 (2 where a sequence is a row), one more to keep states;
backward 5. Multiply-adds a step at N complex states: forward C + 6 N, backward 2 C + 10 N + 4 N^2 / C, and C more in
each for the second term of taps (C + 4 N more in the backward pass with gate_out).
"""

from __future__ import annotations

from kernels.lti_ssm.triton.calls import CallPlan, Planner
from kernels.lti_ssm.triton.operator import lti_ssm_triton, lti_ssm_triton_bidirectional
from kernels.lti_ssm.triton.plan import TUNING, Plan, Tuning, backward_plan, cheapest_plan

__all__ = [
    "TUNING",
    "CallPlan",
    "Plan",
    "Planner",
    "Tuning",
    "backward_plan",
    "cheapest_plan",
    "lti_ssm_triton",
    "lti_ssm_triton_bidirectional",
]
