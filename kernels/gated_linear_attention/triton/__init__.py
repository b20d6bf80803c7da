"""Gated linear attention in Triton: chunks joined by their states, five kernels for every kind of decay.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t;   o_t = scale q_t S_t        source: package docstring

A chunk is C positions; P_i sums the log-decays of a chunk up to and with i, R_j those after j, D_ij those in (j, i].

    _scores_kernel   A_ij = scale sum_x q_ix k_jx exp(D_ijx) for j <= i, q_in = scale q exp(P), k_out = k exp(R)
    _states_kernel   the state before every chunk: S <- exp(P_C) S + k_out^T v; in reverse, its gradient
    _read_kernel     o = q_in S + A v; transposed, dv = k_out dS + A^T do
    _walk_kernel     the two in one, on Hopper for bfloat16, K <= 256 and no gradients: S stays in registers, unwritten
    _grads_kernel    dq, dk and the gradient of the log-decays, from dA = do v^T, do S^T and v dS^T

Without decay the first is left out: q_in and k_out are q and k, and who needs A forms it. Decays on values need no
kernel of their own: sum_ij A_ij <do_i, v_j> is the same under (q, k) <-> (do, v), so that o is what `_grads_kernel`
gives as dq, and dq, dk are what `_read_kernel` gives as o, dv (README).

D of a decay a channel couples i, j and the channel. Where both halves of a chunk decay by less than exp(-LIMIT), it is
the difference of two factors about the middle, within range on either side, and one product serves all pairs. Else a
block of 2h positions is halved; a query in its second half and a key in its first factor about the middle with
exponents <= 0, a level of the tree of `chunked.py`: h = 1, 2, ..., C/2, one product each, the diagonal apart. Exponents
are products of log-decays with matrices of zeros and ones: sums only, never a difference (of one decay a head in half
precision, and about the middle: differences of what is small enough).

A long sequence is cut in segments walked side by side: once from zeros, for what each adds to the state at its end, and
once from what those before it add up to. Chunks of packed sequences stand in a table and straddle no boundary.

float32: sums, exponentials, states while they grow. Operands of products and kept states: bfloat16 for bfloat16 inputs,
else float32 (fp16: tf32, fp32: three tf32 products). Deterministic: no atomics. Tiles are 64 numbers wide or more:
ptxas 12.8, which Triton 3.6 brings, gets addresses in shared memory wrong where narrower ones meet them outside of a
loop (README).
Kept for backward besides the inputs: the state before each chunk, K V / C numbers a position; with a decay also the
outputs of `_scores_kernel`, 2 K + C.
"""

from kernels.gated_linear_attention.triton.autograd import gated_linear_attention_triton
from kernels.gated_linear_attention.triton.step import gated_linear_attention_step_triton

__all__ = ["gated_linear_attention_step_triton", "gated_linear_attention_triton"]
