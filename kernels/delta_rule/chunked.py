"""The delta rule in plain PyTorch: matrix products in chunks of 64 positions, and a loop over the chunks.

With M [K, V] the state and G_i the sum of the log-decays of a chunk up to position i, the state behind position i is

    M_i = exp(G_i) M_0 + sum_{j <= i} (exp(G_i - G_j) k_j) u_j^T
    u_i = b_i (v_i - (exp(G_i) k_i)^T M_0 - sum_{j < i} (k_i^T exp(G_i - G_j) k_j) u_j)

The u_i of a chunk are hence the solution of one triangular system,

    (I + diag(b) L) U = diag(b) (V - K_in M_0),      L_ij = k_i^T exp(G_i - G_j) k_j for j < i, else 0
                                                     K_in has the rows exp(G_i) k_i

which is solved for diag(b) V and diag(b) K_in before M_0 is known: U = U_0 - W M_0 (the WY or UT transform; Yang et al.
2024a and 2024b). Then

    O = scale (Q_in M_0 + A U),   M_C = exp(G_C) M_0 + K_out^T U,     A_ij = q_i^T exp(G_i - G_j) k_j for j <= i
                                                                      K_out has the rows exp(G_C - G_j) k_j

Where a position writes under another key than it reads, `write` takes the place of k_j and of the rows of K_out.

Where groups of heads share queries and keys, q^T k and k^T k are formed once for a group, and the system is solved in
the loop for diag(b) (V - K_in M_0), so that no K_in of a head is formed: decays of a head scale rows of products.

All exponents are sums of log-decays, never differences of such sums, so none is positive: they and the scores L and A
are those of gated linear attention, whose `chunked.py` describes them. The triangular system is solved in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention.chunked import (
    Decay,
    chunk_length,
    decayed_scores,
    from_chunks,
    make_decay,
    of_heads,
    to_chunks,
    to_groups,
    to_heads,
)

LOWEST_PLAIN = -50.0
"""The lowest log-decay of a step with keys `plain`; lower ones count as this one.

A key that reads what was held before a decay is divided by the decay (`generalised.py`), and so must stay in the range
of float32. A decay of exp(-50) keeps 2e-22 of a state, which no sum in float64 shows beside what is written.
"""


def pseudo_values(k: Tensor, write: Tensor, v: Tensor, beta: Tensor, decay: Decay | None) -> tuple[Tensor, Tensor]:
    """U_0 [..., C, V] and W [..., C, K] of every chunk.

    k, write: [..., C, K], the keys that are read and written; v: [..., C, V]; beta: [..., C, 1].
    """
    # unitriangular: the diagonal is taken as one, and what is above it is not read
    system = beta * decayed_scores(k, write, decay).tril(-1)
    k_in = k if decay is None else k * decay.prefix
    solved = torch.linalg.solve_triangular(system, beta * torch.cat([v, k_in], -1), upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    return u, w


def _chunks_of_groups(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Decay | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """o and the final state for q, k [B, G, n, C, K], v [B, H, n, C, V] and beta [B, H, n, C, 1].

    decay: that of heads, or None.   state: the initial state [B, H, K, V].
    """
    groups, heads = q.shape[1], v.shape[1]
    scores, system = (of_heads(decayed_scores(x, k, decay), heads) for x in (q, k))
    system = beta * system.tril(-1)
    outputs = []
    for i in range(q.shape[2]):
        held, read = (to_heads(x[:, :, i] @ to_groups(state, groups), heads) for x in (k, q))
        if decay is not None:
            held, read = decay.prefix[:, :, i] * held, decay.prefix[:, :, i] * read
        right = beta[:, :, i] * (v[:, :, i] - held)
        u = torch.linalg.solve_triangular(system[:, :, i], right, upper=False, unitriangular=True)
        outputs.append(read + scores[:, :, i] @ u)
        if decay is not None:
            u, state = decay.suffix[:, :, i] * u, decay.log_total[:, :, i].exp().unsqueeze(-1) * state
        state = state + to_heads(k[:, :, i].mT @ to_groups(u, groups), heads)
    return torch.stack(outputs, 2), state


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    write: Tensor | None = None,
    plain: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator; computes in float32 (float64 for float64 inputs).

    With `plain`, the right side of the system of a chunk has -(the scores of k with e at j < i) V in place of V, and V
    is added to the output and the state under e as in linear attention.
    """
    (batch, length, heads, value_dim), key_dim = v.shape, q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    work = torch.promote_types(q.dtype, torch.float32)
    size = chunk_length(length)
    with torch.autocast(q.device.type, enabled=False):
        c_q, c_k, c_v, c_beta = (to_chunks(x.to(work), size) for x in (scale * q.to(work), k, v, beta.unsqueeze(-1)))
        decay = None
        if log_decay is not None:
            log_decay = log_decay.to(work) if plain is None else log_decay.to(work).clamp(min=LOWEST_PLAIN)
            decay = make_decay(to_chunks(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1), size))
        state = c_q.new_zeros(batch, heads, key_dim, value_dim) if initial_state is None else initial_state.to(work)
        if c_q.shape[1] != heads:
            if write is None and plain is None and (decay is None or decay.log.shape[-1] == 1):
                o, state = _chunks_of_groups(c_q, c_k, c_v, c_beta, decay, state)
                o = from_chunks(o, length).to(v.dtype)
                return (o, state) if return_final_state else o
            c_q, c_k = of_heads(c_q, heads), of_heads(c_k, heads)
        c_write = c_k if write is None else to_chunks(write.to(work), size)
        scores = decayed_scores(c_q, c_write, decay)
        right, own = c_v, None
        if plain is not None:
            c_plain = to_chunks(plain.to(work), size)
            own = decayed_scores(c_q, c_plain, decay) @ c_v
            right = -decayed_scores(c_k, c_plain, decay).tril(-1) @ c_v
            plain_out = c_plain if decay is None else c_plain * decay.suffix
        u_0, w = pseudo_values(c_k, c_write, right, c_beta, decay)
        q_in, k_out = (c_q, c_write) if decay is None else (c_q * decay.prefix, c_write * decay.suffix)
        outputs = []
        for i in range(c_q.shape[2]):
            u = u_0[:, :, i] - w[:, :, i] @ state
            o_i = q_in[:, :, i] @ state + scores[:, :, i] @ u
            outputs.append(o_i if own is None else o_i + own[:, :, i])
            kept = state if decay is None else decay.log_total[:, :, i].exp().unsqueeze(-1) * state
            state = kept + k_out[:, :, i].mT @ u
            if plain is not None:
                state = state + plain_out[:, :, i].mT @ c_v[:, :, i]
        o = from_chunks(torch.stack(outputs, 2), length).to(v.dtype)
    return (o, state) if return_final_state else o
