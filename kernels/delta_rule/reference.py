"""The delta rule with decays, one loop over time in the dtype it is given.

    S_t = S_{t-1} diag(a_t) (I - b_t k_t w_t^T) + b_t v_t w_t^T        a_t = exp(log_decay_t),  w_t = k_t by default
    S_t = S_{t-1} diag(a_t) (I - b_t k_t w_t^T) + v_t e_t^T            where e_t (`plain`) is given
    o_t = scale S_t q_t

S is [V, K] here, as in the papers. The state that goes in and comes out is its transpose [K, V], as in gated linear
attention: M_t = (I - b_t w_t k_t^T) diag(a_t) M_{t-1} + b_t w_t v_t^T.

Source: Yang et al. 2024a (arXiv 2406.06484), without decay; Yang et al. 2024b (arXiv 2412.06464), one decay a head;
Kimi Team 2025 (arXiv 2510.26692), one decay a key channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention.reference import each_head


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    scale: float,
    write: Tensor | None = None,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, H, V] and the next state of one step.

    q, k: [B, G, K]; write, plain: [B, H, K]; v: [B, H, V]; beta: [B, H]; log_decay: [B, H, K], [B, H] or None;
    state: [B, H, K, V]. Heads h r, ..., h r + r - 1 of v share head h of q and k, with r = H / G.
    """
    q, k = each_head(q, v.shape[1]), each_head(k, v.shape[1])
    if log_decay is not None:
        decay = log_decay.exp()
        state = (decay.unsqueeze(-1) if decay.dim() == 3 else decay[..., None, None]) * state
    # a mean of v and of the value that the decayed state holds for the key replaces that value
    held = (k.unsqueeze(-1) * state).sum(-2)
    w = k if write is None else write
    value = v if plain is None else torch.zeros_like(v)
    state = state + w.unsqueeze(-1) * (beta.unsqueeze(-1) * (value - held)).unsqueeze(-2)
    if plain is not None:
        state = state + plain.unsqueeze(-1) * v.unsqueeze(-2)
    return scale * (q.unsqueeze(-1) * state).sum(-2), state


def delta_rule_reference(
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
    """o [B, T, H, V], with `return_final_state` also the final state; arguments as in the public operator."""
    (batch, length, heads, value_dim), key_dim = v.shape, q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    state = q.new_zeros(batch, heads, key_dim, value_dim) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        decay = None if log_decay is None else log_decay[:, t]
        w, e = (None if x is None else x[:, t] for x in (write, plain))
        o_t, state = step(q[:, t], k[:, t], v[:, t], beta[:, t], decay, state, scale=scale, write=w, plain=e)
        outputs.append(o_t.to(v.dtype))
    o = torch.stack(outputs, dim=1)
    return (o, state) if return_final_state else o
