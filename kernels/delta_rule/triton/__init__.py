"""The delta rule in Triton: chunks joined by one walk over time, with the same kernels for every kind of decay.

    M_t = (I - b_t k_t k_t^T) diag(a_t) M_{t-1} + b_t k_t v_t^T,   o_t = scale M_t^T q_t     M = S^T, see the operator

A chunk is C positions. With P_i, R_j and D_ij the sums of log-decays of gated linear attention, w_j = b_j k_j and

    A_ij = scale q_i^T exp(D_ij) w_j for j <= i,   L_ij = k_i^T exp(D_ij) w_j for j < i,   delta = v less what M holds

    factors.py  _factors_kernel A, (I + L)^-1 and the decays between positions and the ends of the chunk
    walk.py     _walk_kernel    delta = (I + L)^-1 (v - k_in M);  o = q_in M + A delta;  M <- exp(P_C) M + k_out^T delta
    back.py     _back_kernel    dv = (I + L)^-T (A^T do + k_out dM);  dM <- exp(P_C) dM + q_in^T do - k_in^T dv
    row_grads.py _row_grads_kernel  gradients of q, k, b and the log-decays from do, dv, delta, M and dM, chunk by chunk
    mild_grads.py _mild_grads_kernel  the same for a decay of a channel, of chunks that are factored about their middle
    grads.py    _grads_kernel   the same of those that are factored by a tree
    pairs.py    _pairs_kernel   for a decay of a channel, the part of the gradients that all blocks of keys share
    segments.py _starts_kernel  the states from which segments of a long sequence start
    step.py     _step_kernel    one position, for decoding
    reading.py  _reading_kernel for the rule of RWKV-7, the keys with which it reads its state
    hopper/     _hopper_forward_kernel, _hopper_walk_kernel, _hopper_back_kernel  factors and walk in Gluon

with q_in = scale q exp(P), k_in = k exp(P), k_out = w exp(R). For a decay of a channel these three are written by
`_factors_kernel`; otherwise rows of the products are scaled, and q and k are read as they are.

`autograd.py` launches them in order, `plan.py` holds the tuning and the settings of a call, `tiles.py` holds device
functions.

This is not the usual order of the WY transform, which solves the triangular system for V and K_in before the state is
known. Here the system is solved for V - K_in M inside the walk: one product of [C, C] more on its way, but neither
(I + L)^-1 V nor (I + L)^-1 K_in is ever in memory, and the gradient of v is what the backward walk computes anyway.

A long sequence with few heads is cut into segments that are walked at the same time (`segments.py`). Packed sequences
have a table of their chunks, none of which crosses the end of a sequence.

float32: sums, exponentials, the triangular inverse, delta and states while they are updated. For bfloat16 inputs the
operands of matrix products and what is kept for backward (delta, M and dM of every chunk) are bfloat16; (I + L)^-1,
what it is multiplied with, and what is added to M are the sum of two bfloat16 terms. All other inputs, float16 too,
have float32 operands, multiplied as three tf32 products. There are no atomics, so results are deterministic.
Saved for backward besides the inputs, in elements for each position and head: delta V, M K V / C, A and (I + L)^-1
3 C, and for a decay of a channel 3 K; and a matrix of K^2 for each segment and head.

Names in the kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` value of a block; B batch, T time,
H heads, K channels of keys, V channels of values, C positions in a chunk; `num_t` number of chunks, `i_t` chunk, `o_c`
positions in a chunk. States in memory are [V, K] for every chunk and [K, V] at both ends.
"""

from subquad.kernels.delta_rule.triton.autograd import delta_rule_triton
from subquad.kernels.delta_rule.triton.step import delta_rule_step_triton

__all__ = ["delta_rule_step_triton", "delta_rule_triton"]
