"""Gated slot attention in plain PyTorch: two passes of chunked gated linear attention joined by a softmax.

    o'_t = GLA(q, k, slots; decay on the value channels)          [M] logits a position
    o_t  = GLA(softmax(o'), slots, v; decay on the key channels)

Both passes decay along the same axis, the slots, so the tree of decays is formed once and shared; numerical safety
and cost are those of `kernels/gated_linear_attention/chunked.py`. Source: GSA paper, equation 7 and appendices A, B.
Departure: where the paper's listing 1 cuts chunks of 64 into sub-blocks of 16 and treats the diagonal sub-blocks
element by element, the tree halves down to single positions and uses matrix products throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.gated_linear_attention.chunked import (
    attend_chunks,
    chunk_length,
    from_chunks,
    make_decay,
    to_chunks,
)
from subquad.kernels.gated_slot_attention.reference import State


def gated_slot_attention_chunked(
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
    """Arguments and results as in the public operator; computes in float32 (float64 for float64 inputs)."""
    batch, length, heads, key_dim = q.shape
    scale = key_dim**-0.5 if scale is None else scale
    work = torch.promote_types(q.dtype, torch.float32)
    size = chunk_length(length)
    with torch.autocast(q.device.type, enabled=False):
        c_q, c_k, c_v, c_s = (to_chunks(x, size) for x in (scale * q.to(work), k.to(work), v.to(work), slots.to(work)))
        decay = None if log_decay is None else make_decay(to_chunks(log_decay.to(work), size))
        if initial_state is None:
            num_slots = slots.shape[-1]
            keys = c_q.new_zeros(batch, heads, key_dim, num_slots)
            values = c_q.new_zeros(batch, heads, num_slots, v.shape[-1])
        else:
            keys, values = (x.to(work) for x in initial_state)
        logits, keys = attend_chunks(c_q, c_k, c_s, decay, on_key=False, initial=keys)
        o, values = attend_chunks(logits.softmax(-1), c_s, c_v, decay, on_key=True, initial=values)
        o = from_chunks(o, length).to(v.dtype)
    return (o, (keys, values)) if return_final_state else o
