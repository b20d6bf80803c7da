"""Gated slot attention: a fixed number of memory slots, written with gates and read by a softmax over the slots.

    K_t = diag(a_t) K_{t-1} + s_t^T k_t,   V_t = diag(a_t) V_{t-1} + s_t^T v_t,   o_t = softmax(scale K_t q_t) V_t

Source: GSA paper (Zhang et al. 2024), equations 3, 6 and 7. GSA itself passes slots = 1 - exp(log_decay); attention
with bounded memory control (ABC, Peng et al. 2022) passes its own writing strengths and no decay.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kernels.autograd import needs_gradient
from kernels.backend import NO_GRADIENT, on_device_of, use_triton
from kernels.gated_linear_attention import gated_linear_attention_step
from kernels.gated_linear_attention.packed import (
    filled_sequences,
    has_empty,
    one_by_one,
    sequence_ends,
    states_of_all,
)
from kernels.gated_slot_attention.chunked import gated_slot_attention_chunked
from kernels.gated_slot_attention.reference import State, gated_slot_attention_reference

__all__ = ["gated_slot_attention", "gated_slot_attention_reference", "gated_slot_attention_step"]


def _fail(message: str) -> None:
    raise ValueError(f"gated_slot_attention: {message}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
) -> list[int] | None:
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
    ends = sequence_ends("gated_slot_attention", cu_seqlens, q.shape[0], q.shape[1])
    if initial_state is not None:
        batch, heads, key_dim = q.shape[0] if ends is None else len(ends) - 1, q.shape[2], q.shape[3]
        num_slots = slots.shape[-1]
        shapes = ((batch, heads, key_dim, num_slots), (batch, heads, num_slots, v.shape[-1]))
        given = tuple(tuple(x.shape) for x in initial_state)
        if given != shapes:
            _fail(f"initial_state must be ([B, H, K, M], [B, H, M, V]) = {shapes}, got {given}.")
    return ends


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
    cu_seqlens: Tensor | None = None,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Returns o [B, T, H, V] in the dtype of v, or (o, final state) with `return_final_state`.

    q, k:          [B, T, H, K]; v: [B, T, H, V]; T is at least 1.
    slots:         [B, T, H, M], how strongly each position writes into each slot.
    log_decay:     [B, T, H, M], at most 0: the logarithm of the part of each slot that is kept; None keeps all.
    scale:         factor of the logits; None stands for K^-0.5.
    initial_state: ([B, H, K, M], [B, H, M, V]); None stands for zeros. States are float32 (float64 for float64 inputs).
    cu_seqlens:    [N + 1] integers, 0 and where each of N sequences ends, for sequences packed along time with B = 1.
                   States then have N in place of B. Sequences may be empty: their final state is their initial state.
                   The values are read on the host.
    backend:       "auto" uses the Triton kernels on a GPU and plain PyTorch elsewhere.

    Raises ValueError for shapes or options that do not fit.
    """
    ends = _check(q, k, v, slots, log_decay, initial_state, cu_seqlens)
    keys, values = (None, None) if initial_state is None else initial_state
    if ends is not None and has_empty(ends):
        filled = filled_sequences(ends)
        o, final = gated_slot_attention(
            q,
            k,
            v,
            slots,
            log_decay,
            scale=scale,
            initial_state=None if initial_state is None else (initial_state[0][filled], initial_state[1][filled]),
            return_final_state=True,
            cu_seqlens=torch.tensor(sorted(set(ends))),
            backend=backend,
        )
        final_state = states_of_all(final[0], keys, ends), states_of_all(final[1], values, ends)
        return (o, final_state) if return_final_state else o
    if use_triton("gated_slot_attention", backend, q, k, v, slots, log_decay, keys, values):
        from kernels.gated_slot_attention.triton import gated_slot_attention_triton

        with on_device_of(q):
            o, last_state = gated_slot_attention_triton(
                q,
                k,
                v,
                slots,
                log_decay,
                scale=scale,
                initial_state=initial_state,
                return_final_state=return_final_state,
                sequence_ends=ends,
            )
        return o if last_state is None else (o, last_state)

    def run(time: slice, states: slice) -> tuple[Tensor, ...]:
        o, (keys, values) = gated_slot_attention_chunked(
            q[:, time],
            k[:, time],
            v[:, time],
            slots[:, time],
            None if log_decay is None else log_decay[:, time],
            scale=scale,
            initial_state=None if initial_state is None else (initial_state[0][states], initial_state[1][states]),
            return_final_state=True,
        )
        return o, keys, values

    o, *final = run(slice(None), slice(None)) if ends is None else one_by_one(run, ends)
    return (o, (final[0], final[1])) if return_final_state else o


def gated_slot_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    log_decay: Tensor | None,
    state: State,
    *,
    scale: float | None = None,
    in_place: bool = False,
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> tuple[Tensor, State]:
    """One position, for decoding: returns o [B, H, V] in the dtype of v and the next state in the dtype of `state`.

    q, k: [B, H, K]; v: [B, H, V]; slots, log_decay: [B, H, M]; state: ([B, H, K, M], [B, H, M, V]).
    These are two steps of gated linear attention joined by a softmax; the Triton kernel has no gradient, and in_place
    lets it overwrite the state.
    """
    keys, values = state
    dtype = keys.dtype
    tensors = (q, k, v, slots, log_decay, *state)
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else None
    in_triton = use_triton("gated_slot_attention_step", backend, *tensors, obstacle=obstacle)
    write = partial(gated_linear_attention_step, in_place=in_place, backend="triton" if in_triton else "torch")
    # with slots in the dtype of the state, logits and weights have it too
    logits, keys = write(q, k, slots.to(dtype), log_decay, keys, decay_on="value", scale=scale)
    o, values = write(logits.softmax(-1), slots, v, log_decay, values, scale=1.0)
    return o, (keys, values)
