"""Gated slot attention: a fixed number of memory slots, written with gates and read by a softmax over the slots.

    K_t = diag(a_t) K_{t-1} + s_t^T k_t,   V_t = diag(a_t) V_{t-1} + s_t^T v_t,   o_t = softmax(scale K_t q_t) V_t

Source: GSA paper (Zhang et al. 2024), equations 3, 6 and 7. GSA itself passes slots = 1 - exp(log_decay); attention
with bounded memory control (ABC, Peng et al. 2022) passes its own writing strengths and no decay.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import check_heads, check_number, check_shapes
from subquad.kernels.gated_linear_attention import gated_linear_attention_step
from subquad.kernels.gated_linear_attention.packed import filled, one_by_one, sequence_ends, states_of_all
from subquad.kernels.gated_slot_attention.chunked import gated_slot_attention_chunked
from subquad.kernels.gated_slot_attention.reference import State, gated_slot_attention_reference
from subquad.kernels.operations import counted

__all__ = ["gated_slot_attention", "gated_slot_attention_reference", "gated_slot_attention_step"]


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, log_decay: Tensor | None, scale: float | None
) -> None:
    """Checks what a sequence and a step share, which is everything but the states."""
    check_heads(op, q, v, is_step=op.endswith("_step"))
    check_number(op, "scale", scale)
    shape = (*q.shape[:-1], slots.shape[-1] if slots.dim() else 0)
    wanted = {"k": (k, tuple(q.shape)), "slots": (slots, shape), "log_decay": (log_decay, shape)}
    check_shapes(op, wanted, to_go_with="q and slots")
    if slots.shape[-1] == 0:
        raise ValueError(f"{op}: needs at least one slot, got M=0.")


def _check_state(op: str, name: str, state: State | None, batch: int, q: Tensor, v: Tensor, slots: Tensor) -> None:
    keys, values = (None, None) if state is None else state
    heads, key_dim, num_slots = q.shape[-2], q.shape[-1], slots.shape[-1]
    shapes = (batch, heads, key_dim, num_slots), (batch, heads, num_slots, v.shape[-1])
    check_shapes(op, {f"{name}[0]": (keys, shapes[0]), f"{name}[1]": (values, shapes[1])}, to_go_with="q, v and slots")


@counted("gated_slot_attention")
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
    _check("gated_slot_attention", q, k, v, slots, log_decay, scale)
    ends = sequence_ends("gated_slot_attention", cu_seqlens, q.shape[0], q.shape[1])
    num_states = q.shape[0] if ends is None else len(ends) - 1
    _check_state("gated_slot_attention", "initial_state", initial_state, num_states, q, v, slots)
    keys, values = (None, None) if initial_state is None else initial_state
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "slots": slots, "log_decay": log_decay}
    filled_ends, *start = filled(ends, keys, values)
    o: Tensor
    final: Any
    if use_triton("gated_slot_attention", backend, *inputs.values(), keys, values):
        from subquad.kernels.gated_slot_attention.triton import gated_slot_attention_triton

        states = {"initial_state": None if keys is None else tuple(start), "sequence_ends": filled_ends}
        with on_device_of(q):
            o, final = gated_slot_attention_triton(
                **inputs, **states, scale=scale, return_final_state=return_final_state
            )
    else:

        def run(keys: Tensor | None, values: Tensor | None, **inputs: Tensor) -> tuple[Tensor, ...]:
            first = None if keys is None or values is None else (keys, values)
            o, last = gated_slot_attention_chunked(**inputs, scale=scale, initial_state=first, return_final_state=True)
            return o, *last

        o, *final = one_by_one(run, inputs, {"keys": start[0], "values": start[1]}, filled_ends)
    if not return_final_state:
        return o
    return o, (states_of_all(final[0], keys, ends), states_of_all(final[1], values, ends))


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
    lets it overwrite the state. Raises ValueError for shapes that do not fit.
    """
    _check("gated_slot_attention_step", q, k, v, slots, log_decay, scale)
    _check_state("gated_slot_attention_step", "state", state, q.shape[0], q, v, slots)
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
