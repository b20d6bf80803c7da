"""Gated linear attention in Triton: chunks joined by their states, with the same kernels for every kind of decay.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t;   o_t = scale q_t S_t        source: docstring of the operator

A chunk is C positions. P_i is the sum of the log-decays of a chunk up to and including position i, R_j the sum of
those after j, and D_ij the sum of those in (j, i].

    scores.py  _scores_kernel  A_ij = scale sum_x q_ix k_jx exp(D_ijx), j <= i; q_in = scale q exp(P), k_out = k exp(R)
    states.py  _states_kernel  the state before every chunk, S <- exp(P_C) S + k_out^T v; in reverse its gradient dS
    read.py    _read_kernel    o = q_in S + A v; transposed, dv = k_out dS + A^T do
    walk.py    _walk_kernel    both in one with S in registers; only without gradients, bfloat16, K <= 256, Hopper
    grads.py   _grads_kernel   dq, dk and the gradient of the log-decays from dA = do v^T, do S^T and v dS^T
    step.py    _step_kernel    one position, for decoding

Heads that share queries and keys and have a decay of a head, and those of `ssd`, have kernels of their own for A, o and
the gradients: groups.py (scores of a group, and gradients summed over its heads) and group_reads.py (o, dv, gradients
of log-decays and weights, with the equations).

`passes.py` launches them in order, `autograd.py` joins the two passes, `plan.py` holds the tuning and the settings that
the kernels of one call share, `tiles.py` and `decays.py` hold device functions.

Without decay `_scores_kernel` is not launched: q_in and k_out are q and k, and the kernels that need A compute it.
Decays on values need no kernels of their own, since sum_ij A_ij <do_i, v_j> does not change when (q, k) and (do, v)
are exchanged: o is what `_grads_kernel` computes as dq, and dq, dk are what `_read_kernel` computes as o, dv (README).

D of a decay of a channel depends on i, j and the channel. Where each half of a chunk decays by less than exp(-LIMIT), D
is a difference of two sums about the middle of the chunk, whose exponentials stay in range, and one matrix product
gives all pairs. Otherwise blocks of 2h positions are halved, h = 1, 2, ..., C / 2: the factors of a query in the second
half and of a key in the first half have exponents <= 0, and each level of this tree (that of `chunked.py`) takes one
product. Exponents are products of log-decays with matrices of zeros and ones, so they are sums. They are differences
only for a decay of a head in half precision and about the middle, where the sums are small enough.

A long sequence with few heads is cut into segments that are walked at the same time. Packed sequences have a table of
their chunks, none of which crosses the end of a sequence.

float32: sums, exponentials, and states while they are updated. Operands of matrix products and states in memory are
bfloat16 for bfloat16 inputs and float32 otherwise, multiplied as tf32 for fp16 inputs and as three tf32 products for
float32 inputs. There are no atomics, so results are deterministic.
Saved for backward besides the inputs: the states before every chunk, K V / C elements for each position and head, and
with a decay k_out, q_in and A, 2 K + C elements.

Names in the kernels: `i_` index, `o_` offsets, `m_` mask, `p_` pointer, `b_` value of a block; B batch, T time,
H heads, K channels of keys, V channels of values, C positions in a chunk; `num_t` number of chunks, `i_t` chunk, `o_c`
positions in a chunk.
"""

from subquad.kernels.gated_linear_attention.triton.autograd import gated_linear_attention_triton
from subquad.kernels.gated_linear_attention.triton.step import gated_linear_attention_step_triton

__all__ = ["gated_linear_attention_step_triton", "gated_linear_attention_triton"]
