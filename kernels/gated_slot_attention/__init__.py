"""Gated slot attention: a fixed number of memory slots, written with gates and read by a softmax over the slots.

    K_t = diag(a_t) K_{t-1} + s_t^T k_t,   V_t = diag(a_t) V_{t-1} + s_t^T v_t,   o_t = softmax(scale K_t q_t) V_t

Source: GSA paper (Zhang et al. 2024), equations 3, 6 and 7. GSA itself passes slots = 1 - exp(log_decay); attention
with bounded memory control (ABC, Peng et al. 2022) passes its own writing strengths and no decay.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kernels.gated_slot_attention.chunked import gated_slot_attention_chunked
from kernels.gated_slot_attention.reference import State, gated_slot_attention_reference, step

__all__ = ["gated_slot_attention", "gated_slot_attention_reference", "gated_slot_attention_step"]


def _fail(message: str) -> None:
    raise ValueError(f"gated_slot_attention: {message}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, log_decay: Tensor | None, initial_state: State | None
) -> None:
    if q.dim() != 4 or v.dim() != 4 or slots.dim() != 4:
        _fail(
            "q, v and slots must be [B, T, H, K], [B, T, H, V] and [B, T, H, M], "
            f"got {tuple(q.shape)}, {tuple(v.shape)} and {tuple(slots.shape)}."
        )
    if k.shape != q.shape:
        _fail(f"k must have the shape of q {tuple(q.shape)}, got {tuple(k.shape)}.")
    for name, x in (("v", v), ("slots", slots)):
        if x.shape[:3] != q.shape[:3]:
            _fail(f"{name} must share B, T, H with q {tuple(q.shape)}, got {tuple(x.shape)}.")
    if q.shape[1] < 1:
        _fail("needs at least one time step, got T=0.")
    if log_decay is not None and log_decay.shape != slots.shape:
        _fail(f"log_decay must have the shape of slots {tuple(slots.shape)}, got {tuple(log_decay.shape)}.")
    if initial_state is not None:
        batch, _, heads, key_dim = q.shape
        num_slots = slots.shape[-1]
        shapes = ((batch, heads, key_dim, num_slots), (batch, heads, num_slots, v.shape[-1]))
        given = tuple(tuple(x.shape) for x in initial_state)
        if given != shapes:
            _fail(f"initial_state must be ([B, H, K, M], [B, H, M, V]) = {shapes}, got {given}.")


def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor | tuple[Tensor, State]:
    """o [B, T, H, V], and the final state ([B, H, K, M], [B, H, M, V]) where asked for.

    q, k: [B, T, H, K]; v: [B, T, H, V]; any T >= 1.
    slots: [B, T, H, M], how strongly position t writes into each slot.
    log_decay: [B, T, H, M], at most 0, how much of each slot is kept; None keeps all.
    scale: of the logits, K^-0.5 where None.
    initial_state: zeros where None. States are float32 (float64 for float64 inputs).

    Raises ValueError for shapes or options that do not fit.
    """
    _check(q, k, v, slots, log_decay, initial_state)
    if backend not in ("auto", "triton", "torch"):
        _fail(f"backend={backend!r}, choose 'auto', 'triton' or 'torch'.")
    if backend == "triton":
        _fail("no Triton path yet; use backend='auto' or 'torch'.")
    return gated_slot_attention_chunked(
        q, k, v, slots, log_decay, scale=scale, initial_state=initial_state, return_final_state=return_final_state
    )


def gated_slot_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None,
    state: State,
    *,
    scale: float | None = None,
) -> tuple[Tensor, State]:
    """One position: q, k [B, H, K], v [B, H, V], slots and log_decay [B, H, M], state ([B, H, K, M], [B, H, M, V]).

    Gives o [B, H, V] in the dtype of v and the next state in the dtype of the state.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = state[0].dtype
    decay = None if log_decay is None else log_decay.to(dtype)
    o, state = step(q.to(dtype), k.to(dtype), v.to(dtype), slots.to(dtype), decay, state, scale=scale)
    return o.to(v.dtype), state
