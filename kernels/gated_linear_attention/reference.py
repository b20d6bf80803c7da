"""The recurrence of gated linear attention, one loop over time in the dtype it is given.

    S_t = diag(a_t) S_{t-1} + k_t^T v_t      decay_on="key":   a_t [K] scales the rows of S [K, V]
    S_t = S_{t-1} diag(a_t) + k_t^T v_t      decay_on="value": a_t [V] scales the columns
    o_t = scale q_t S_t                      a_t = exp(log_decay_t)

Heads h r, ..., h r + r - 1 of v read and write with head h of q and k, where v has r times as many heads.

Source: GSA paper (Zhang et al. 2024), section 2.3; Yang et al. 2023, equations 3 and 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def each_head(x: Tensor, heads: int) -> Tensor:
    """x [..., G, K] with each of its heads repeated for the heads of its group: [..., H, K] for H heads of v."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, decay_on: str, scale: float
) -> tuple[Tensor, Tensor]:
    """o [B, H, V] and the next state of one step.

    q, k: [B, G, K]; v: [B, H, V]; log_decay: [B, H, K] or, on values, [B, H, V], or [B, H], [H], None;
    state: [B, H, K, V].
    """
    q, k = each_head(q, v.shape[1]), each_head(k, v.shape[1])
    write = k[..., :, None] * v[..., None, :]
    if log_decay is None:
        state = state + write
    elif log_decay.dim() < 3:
        state = log_decay.exp()[..., None, None] * state + write
    elif decay_on == "key":
        state = log_decay.exp()[..., :, None] * state + write
    else:
        state = log_decay.exp()[..., None, :] * state + write
    return scale * (q[..., :, None] * state).sum(-2), state


def gated_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    decay_on: str = "key",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """o [B, T, H, V], with `return_final_state` also the final state; arguments as in the public operator."""
    (batch, length, heads, value_dim), key_dim = v.shape, q.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    state = q.new_zeros(batch, heads, key_dim, value_dim) if initial_state is None else initial_state
    decays = [log_decay] * length if log_decay is None or log_decay.dim() == 1 else log_decay.unbind(1)
    outputs = []
    for q_t, k_t, v_t, decay_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), decays, strict=True):
        o_t, state = step(q_t, k_t, v_t, decay_t, state, decay_on=decay_on, scale=scale)
        outputs.append(o_t.to(v.dtype))
    o = torch.stack(outputs, dim=1)
    return (o, state) if return_final_state else o
