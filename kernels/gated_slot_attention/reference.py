"""The recurrence of gated slot attention, one loop over time in the dtype it is given.

    K_t = diag(a_t) K_{t-1} + s_t^T k_t        key memories   [M, K], a_t = exp(log_decay_t) [M], s_t = slots_t [M]
    V_t = diag(a_t) V_{t-1} + s_t^T v_t        value memories [M, V]
    o_t = softmax(scale K_t q_t) V_t

Source: GSA paper (Zhang et al. 2024), equation 6, where s = 1 - a; equation 3 (ABC) has a = 1.
Departure: the key state is stored transposed, [K, M], as the first pass of equation 7 has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]


def step(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, log_decay: Tensor | None, state: State, *, scale: float
) -> tuple[Tensor, State]:
    """o [B, H, V] and the next state of one step.

    q, k: [B, H, K]; v: [B, H, V]; slots, log_decay: [B, H, M]; state: ([B, H, K, M], [B, H, M, V]).
    """
    keys, values = state
    if log_decay is not None:
        decay = log_decay.exp()
        keys, values = decay[..., None, :] * keys, decay[..., :, None] * values
    keys = keys + k[..., :, None] * slots[..., None, :]
    values = values + slots[..., :, None] * v[..., None, :]
    weights = (scale * (q[..., :, None] * keys).sum(-2)).softmax(-1)
    return (weights[..., :, None] * values).sum(-2), (keys, values)


def gated_slot_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """o [B, T, H, V], with `return_final_state` also the final state; arguments as in the public operator."""
    batch, length, heads, key_dim = q.shape
    scale = key_dim**-0.5 if scale is None else scale
    if initial_state is None:
        num_slots = slots.shape[-1]
        state = (
            q.new_zeros(batch, heads, key_dim, num_slots),
            q.new_zeros(batch, heads, num_slots, v.shape[-1]),
        )
    else:
        state = initial_state
    decays = [None] * length if log_decay is None else log_decay.unbind(1)
    inputs = zip(q.unbind(1), k.unbind(1), v.unbind(1), slots.unbind(1), decays, strict=True)
    outputs = []
    for q_t, k_t, v_t, slots_t, decay_t in inputs:
        o_t, state = step(q_t, k_t, v_t, slots_t, decay_t, state, scale=scale)
        outputs.append(o_t.to(v.dtype))
    o = torch.stack(outputs, dim=1)
    return (o, state) if return_final_state else o
